"""`gptq`: what GPTQModel reads, and transformers with optimum; vLLM and SGLang only 4 and 8 bits with symmetric levels.

Per linear P `[m, n]` of b = 2, 3, 4 or 8 bits and G groups: `P.qweight` int32 `[n * b / 32, m]`, unsigned codes, bit-stream along the inputs; `P.qzeros` int32
`[G, m * b / 32]`, zero points along the outputs; `P.scales` float16 `[G, m]`; `P.g_idx` int32 `[n]`, the group of each input. A weight is
`scale * (code - zero)`. Symmetric levels have zero 2^(b - 1) and go as version 1, `gptq`, which stores zero - 1; others as version 2, `gptq_v2`, which stores
zero itself: version 1 has no way to say zero 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron.export.checkpoint import Linear, check_codes, held_scale
from bakron.export.compressed_tensors import pack
from bakron.grids import UniformGrid

WIDTHS = (2, 3, 4, 8)


def encode(module: str, linear: Linear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The four tensors of one linear; `dtype` is not heeded, scales are float16.

    Raises:
        RecipeError: Scales that float16 cannot hold.
        OutputError: Codes outside their grid.
    """
    check_codes(module, linear)
    grid, width, n = linear.grid, code_bits(linear.grid), linear.codes.shape[1]
    middle = 1 << (width - 1)
    stored = torch.full(grid.scale.shape, middle - 1) if grid.zero is None else grid.zero
    return {
        f"{module}.qweight": pack(linear.codes + (middle if grid.symmetric else 0), width).T.contiguous(),
        f"{module}.qzeros": pack(stored.T, width),
        f"{module}.scales": held_scale(module, grid.scale, torch.float16).T.contiguous(),
        f"{module}.g_idx": grid.groups(n).to(torch.int32),
    }


def quantization_config(grid: UniformGrid, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json, also written to quantize_config.json. The head is the one linear that this format leaves alone."""
    from bakron import __version__

    return {
        "quant_method": "gptq",
        "bits": code_bits(grid),
        "group_size": grid.group_size or -1,
        "desc_act": False,
        "sym": grid.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if grid.symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"bakron:{__version__}"]},
    }


def beside(out: Path, grid: UniformGrid, ignore: list[str]) -> None:
    """quantize_config.json, which GPTQModel reads."""
    (out / "quantize_config.json").write_text(json.dumps(quantization_config(grid, ignore), indent=2) + "\n", "utf-8")


def bits(grid: UniformGrid, dtype: torch.dtype) -> float:
    """Stored bits per quantized weight of a group, scale and zero point included; a row's, spread over its width, are left out when there are no groups."""
    width = code_bits(grid)
    return width + ((16 + width) / grid.group_size if grid.group_size else 0.0)


def caveat(grid: UniformGrid) -> str | None:
    """What a user has to know to load the file."""
    if grid.symmetric and code_bits(grid) in (4, 8):
        return None
    return "vLLM and SGLang read gptq files only of 4 or 8 bits with symmetric levels; for them choose format compressed-tensors"


def code_bits(grid: UniformGrid) -> int:
    """Bits that the file spends on a code."""
    needed = max(-grid.low, grid.high + 1) * 2 if grid.symmetric else grid.high + 1
    return next(width for width in WIDTHS if needed <= 1 << width)
