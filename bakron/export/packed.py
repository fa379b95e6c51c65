"""`packed`: our own, the smallest: whole codes in a fraction of a bit, 2.82 bits a weight at 7 levels. Layout and reader are in `bakron/reader.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bakron.export.checkpoint import Linear, check_codes
from bakron.grids import UniformGrid
from bakron.reader import METHOD, word


def encode(module: str, linear: Linear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one linear; scales keep their own dtype.

    Raises:
        OutputError: Codes outside their grid.
    """
    check_codes(module, linear)
    grid = linear.grid
    tensors = {
        f"{module}.weight_packed": pack(linear.codes - grid.low, grid.levels),
        f"{module}.weight_scale": grid.scale,
    }
    if grid.zero is not None:
        tensors[f"{module}.weight_zero"] = grid.zero.to(torch.uint8)
    return tensors


def quantization_config(grid: UniformGrid, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    return {
        "quant_method": METHOD,
        "levels": grid.levels,
        "group_size": grid.group_size,
        "symmetric": grid.symmetric,
        "ignore": ignore,
    }


def bits(grid: UniformGrid, dtype: torch.dtype) -> float:
    """Stored bits per quantized weight of a group, scale and zero point included; a row's, spread over its width, are left out when there are no groups."""
    count, size = word(grid.levels)
    beside = torch.finfo(grid.scale.dtype).bits + (0 if grid.symmetric else 8)
    return 8 * size / count + (beside / grid.group_size if grid.group_size else 0.0)


def caveat(grid: UniformGrid) -> str | None:
    """What a user has to know to load the file."""
    return "format packed is read by transformers after `import bakron.reader`; without it, it warns and goes on with random weights"


def pack(codes: Tensor, levels: int) -> Tensor:
    """Codes in words, each a number in base `levels`.

    Args:
        codes: Integers in `[0, levels)`, of any shape.
        levels: The base.

    Returns:
        uint8 `[words, bytes]`.
    """
    count, size = word(levels)
    flat = codes.flatten().to(torch.int64)
    digits = torch.nn.functional.pad(flat, (0, -len(flat) % count)).view(-1, count)
    value = torch.zeros(len(digits), dtype=torch.int64)
    for i in reversed(range(count)):
        value.mul_(levels).add_(digits[:, i])
    return torch.stack([value >> (8 * i) & 255 for i in range(size)], 1).to(torch.uint8)
