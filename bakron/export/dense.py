"""`dense`: ordinary weights that happen to lie on the grid. As large as the original; every tool reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bakron.export.checkpoint import Linear, check_codes
from bakron.grids import OffsetGrid, UniformGrid


def encode(module: str, linear: Linear, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weight `[m, n]`, `(code - zero) * scale` rounded to `dtype`."""
    check_codes(module, linear, offsets=isinstance(linear.grid, OffsetGrid))
    return {f"{module}.weight": linear.grid.values(linear.codes).to(dtype)}


def quantization_config(grid: UniformGrid, ignore: list[str]) -> dict[str, Any] | None:
    """None: to its readers this is a plain model."""
    return None


def bits(grid: UniformGrid, dtype: torch.dtype) -> float:
    """Stored bits per quantized weight."""
    return float(torch.finfo(dtype).bits)


def caveat(grid: UniformGrid) -> str | None:
    """What a user has to know to load the file."""
    return None
