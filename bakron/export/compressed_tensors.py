"""`compressed-tensors`, format `pack-quantized`: what vLLM and transformers read. Integer codes of 2 to 8 bits, dense bit-stream along the inputs.

Per linear P `[m, n]`: `P.weight_packed` int32 `[m, ceil(n * bits / 32)]`, code u from 0 (symmetric: u = q + 2^(bits - 1)), element i at bit i * bits, little
endian; `P.weight_scale` `[m, groups]`; `P.weight_zero_point` int32 `[ceil(m * bits / 32), groups]`, packed along the outputs, only where levels are not
symmetric; `P.weight_shape` int64 `[2]`. Widths other than 2, 4 and 8 bits need compressed-tensors 0.18 or newer to read: older ones padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bakron.export.checkpoint import Linear, check_codes, held_scale
from bakron.grids import UniformGrid

ASYMMETRIC = (
    "transformers loads compressed-tensors files with zero points only as from_pretrained(..., "
    "quantization_config=CompressedTensorsConfig(dequantize=True)) in its current version"
)


def encode(module: str, linear: Linear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one linear.

    Raises:
        RecipeError: Scales that `dtype` cannot hold.
        OutputError: Codes outside their grid.
    """
    check_codes(module, linear)
    grid, width = linear.grid, code_bits(linear.grid)
    tensors = {
        f"{module}.weight_packed": pack(linear.codes + (1 << (width - 1) if grid.symmetric else 0), width),
        f"{module}.weight_scale": held_scale(module, grid.scale, dtype),
        f"{module}.weight_shape": torch.tensor(linear.codes.shape, dtype=torch.int64),
    }
    if grid.zero is not None:
        tensors[f"{module}.weight_zero_point"] = pack(grid.zero.T, width).T.contiguous()
    return tensors


def quantization_config(grid: UniformGrid, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        grid: One linear's; all have the same levels and group size.
        ignore: Module names of linears that are not quantized.
    """
    weights: dict[str, Any] = {"num_bits": code_bits(grid), "type": "int", "symmetric": grid.symmetric, "dynamic": False}
    weights |= {"strategy": "group", "group_size": grid.group_size} if grid.group_size else {"strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def bits(grid: UniformGrid, dtype: torch.dtype) -> float:
    """Stored bits per quantized weight of a group, scale and zero point included; a row's, spread over its width, are left out when there are no groups."""
    width = code_bits(grid)
    return width + ((torch.finfo(dtype).bits + (0 if grid.symmetric else width)) / grid.group_size if grid.group_size else 0.0)


def caveat(grid: UniformGrid) -> str | None:
    """What a user has to know to load the file."""
    return None if grid.symmetric else ASYMMETRIC


def code_bits(grid: UniformGrid) -> int:
    """Bits that the file spends on a code: those of the smallest integer that holds the grid, signed where it is symmetric."""
    if not grid.symmetric:
        return max(2, grid.high.bit_length())
    return next(b for b in range(2, 9) if -(1 << (b - 1)) <= grid.low and grid.high < 1 << (b - 1))


def pack(codes: Tensor, width: int) -> Tensor:
    """Unsigned codes as a little-endian bit-stream along each row.

    Args:
        codes: Integers in `[0, 2^width)`, `[m, n]`.
        width: Bits per code.

    Returns:
        int32 `[m, ceil(n * width / 32)]`, the last word zero-padded.
    """
    m, n = codes.shape
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -n % 32)).reshape(m, -1, 32)
    words = torch.zeros(m, padded.shape[1], width, dtype=torch.int64)  # 32 codes fill `width` words exactly
    for k in range(32):
        word, shift = divmod(k * width, 32)
        words[..., word] |= padded[..., k] << shift
        if shift + width > 32:
            words[..., word + 1] |= padded[..., k] >> (32 - shift)
    words &= 0xFFFFFFFF
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return signed.reshape(m, -1)[:, : -(-n * width // 32)].contiguous()
