"""Scalar grids: which numbers a weight may become. A grid is data (tensors and integers), not a callback, so compiled kernels specialise on it.

The one definition of rounding, shared by every solver and every test:

    code = clamp(round_half_even(t / scale) + zero, low, high)        value = (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bakron.errors import RecipeError, ShapeError

if TYPE_CHECKING:
    from bakron.kron import Kron

SCALES = ("absmax", "mse", "curvature")
SHRINKS = 80  # candidate scales per group: 1.0 down to SMALLEST times the absmax scale
SMALLEST = 0.25
REFINEMENTS = 3  # closed-form least-squares steps on the best candidate's codes


def check_group(n: int, group_size: int | None, name: str = "the weight") -> int:
    """Groups in a row of n inputs.

    Raises:
        RecipeError: The group size is not positive or does not divide n.
    """
    if group_size is None:
        return 1
    if group_size < 1 or n % group_size:
        choices = [g for g in (16, 32, 64, 128, 256) if n % g == 0]
        raise RecipeError(
            f"group size {group_size} does not divide the {n} inputs of {name}",
            "a divisor of the width, or no groups (one scale per row)",
            f"Use one of {choices}, or group_size=None" if choices else "Use group_size=None",
        )
    return n // group_size


def check_groups(widths: Mapping[str, int], group_size: int | None) -> None:
    """Refuse a group size that does not divide every width, before any work is done.

    Args:
        widths: Inputs by name of a linear, or of several.
        group_size: Inputs per scale; None = the whole row.

    Raises:
        RecipeError: All linears that it does not fit are named, and sizes that fit every one.
    """
    unfit = [f"the {n} inputs of {name}" for name, n in widths.items() if group_size is not None and (group_size < 1 or n % group_size)]
    if unfit:
        choices = [str(g) for g in (16, 32, 64, 128, 256) if not any(n % g for n in widths.values())]
        raise RecipeError(
            f"group size {group_size} does not divide {', nor '.join(unfit)}",
            "a divisor of every width, or no groups (one scale per row)",
            f"Use {', '.join(choices)} or -1 (no groups)" if choices else "Use -1 (no groups)",
        )


@dataclass(frozen=True)
class UniformGrid:
    """Equally spaced levels with a scale per row or per group of inputs; static, so that the result does not depend on the schedule.

    Attributes:
        scale: `[m, G]`, G = 1 (per row) or n / group_size; positive, held in the dtype that is stored, so codes fit the file exactly.
        zero: `[m, G]` int32 integer zero points, or None for a symmetric grid.
        low: Smallest code.
        high: Largest code.
        group_size: Inputs per scale; None = the whole row.
    """

    scale: Tensor
    zero: Tensor | None
    low: int
    high: int
    group_size: int | None = None

    @property
    def levels(self) -> int:
        """Number of codes."""
        return self.high - self.low + 1

    @property
    def symmetric(self) -> bool:
        """Whether the code 0 stands for the value 0 in every group."""
        return self.zero is None

    @classmethod
    def fit(
        cls,
        W: Tensor,
        levels: int | None = None,
        group_size: int | None = None,
        scale: Literal["absmax", "mse", "curvature"] = "mse",
        symmetric: bool = True,
        kron: Kron | None = None,
        *,
        bits: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> UniformGrid:
        """Choose a scale (and zero point) for every row or group of `W`.

        Args:
            W: Weight `[m, n]`, floating point.
            levels: Number of levels, 2 to 256. Odd symmetric grids reach equally far both ways (7: -3..3); even ones have one more negative
                code (8: -4..3). Asymmetric codes are 0..levels-1.
            group_size: Inputs per scale; None = one scale per row.
            scale: "absmax" covers every weight; "mse" minimises the squared rounding error; "curvature" minimises it weighted by the pivots of A,
                the coefficients of each entry in the loss identity (needs `kron`).
            symmetric: No zero points.
            kron: Damped Hessian, for "curvature".
            bits: Instead of levels: levels = 2**bits.
            dtype: Dtype in which scales are stored; default: W's, or float32 where W is float64.

        Raises:
            RecipeError: Levels or bits out of range or both given, unknown scale rule, group size that does not divide n, curvature without kron.
            ShapeError: W is not a finite matrix, or kron is of another width.
        """
        low, high = code_range(levels, bits, symmetric)
        if scale not in SCALES:
            raise RecipeError(f"scale rule {scale!r}", f"one of {', '.join(SCALES)}")
        if W.ndim != 2 or W.numel() == 0 or not W.is_floating_point():
            raise ShapeError(f"a weight of shape {list(W.shape)} and dtype {W.dtype}", "a floating point matrix [m, n]")
        if not bool(torch.isfinite(W).all()):
            i, j = (~torch.isfinite(W)).nonzero()[0].tolist()
            raise ShapeError(f"a weight with {float(W[i, j])} at [{i}, {j}]", "finite weights")
        groups = check_group(W.shape[1], group_size)
        weight = None
        if scale == "curvature":
            if kron is None:
                raise RecipeError("scale='curvature' without kron", "a damped Kron, whose pivots weigh the errors")
            kron.check(W)
            weight = kron.A.pivots.float().to(W.device)
        dtype = dtype or (torch.float32 if W.dtype == torch.float64 else W.dtype)
        rows = W.detach().float().reshape(W.shape[0], groups, -1)
        weights = torch.ones_like(rows[:1]) if weight is None else weight.reshape(1, groups, -1)
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))  # a group of dead inputs
        fitted, zero = (_fit_symmetric if symmetric else _fit_asymmetric)(rows, weights, low, high, search=scale != "absmax")
        tiny = torch.finfo(dtype).tiny
        stored = fitted.clamp(tiny, torch.finfo(dtype).max).to(dtype)
        return cls(stored, zero, low, high, group_size)

    def expand(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Scale and zero of every entry, `[m, n]` each, in `dtype`."""
        repeat = n // self.scale.shape[1]
        scale = self.scale.to(dtype).repeat_interleave(repeat, 1)
        zero = torch.zeros_like(scale) if self.zero is None else self.zero.to(dtype).repeat_interleave(repeat, 1)
        return scale, zero

    def project(self, T: Tensor, rows: slice = slice(None), cols: slice = slice(None), n: int | None = None) -> tuple[Tensor, Tensor]:
        """Nearest grid point of every entry of T.

        Args:
            T: Targets, the block `[rows, cols]` of an `[m, n]` matrix.
            rows: Which rows of the weight T stands for.
            cols: Which columns.
            n: Width of the weight; only needed when T is not as wide.

        Returns:
            codes int32 and values in T's dtype, both of T's shape.
        """
        scale, zero = self.expand(n or T.shape[1], T.dtype)
        scale, zero = scale[rows, cols], zero[rows, cols]
        codes = ((T / scale).round() + zero).clamp(self.low, self.high)
        return codes.to(torch.int32), (codes - zero) * scale

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`(code - zero) * scale` of integer codes `[m, n]`."""
        scale, zero = self.expand(codes.shape[1], dtype)
        return (codes.to(dtype) - zero) * scale

    def check(self, W: Tensor) -> None:
        """Refuse a weight that this grid was not made for.

        Raises:
            ShapeError: Another number of rows, or a width that the groups do not tile.
        """
        m, groups = self.scale.shape
        if W.shape[0] != m or (groups * self.group_size != W.shape[1] if self.group_size else groups != 1):
            wanted = f"[{m}, {groups * self.group_size}]" if self.group_size else f"[{m}, n]"
            raise ShapeError(f"a weight of shape {list(W.shape)}", f"{wanted}, as this grid was fitted for")


def code_range(levels: int | None, bits: int | None, symmetric: bool) -> tuple[int, int]:
    """Smallest and largest code of a grid.

    Raises:
        RecipeError: Neither or both of levels and bits, or out of range.
    """
    if levels is not None and bits is not None and levels != 2**bits:
        raise RecipeError(f"levels={levels} and bits={bits}", "one of the two")
    if levels is None and bits is None:
        raise RecipeError("neither levels nor bits", "levels (2 to 256) or bits (1 to 8)")
    count = levels if levels is not None else 2 ** (bits or 0)
    if not 2 <= count <= 256:
        raise RecipeError(f"{count} levels", "2 to 256 levels")
    return (-(count // 2), (count - 1) // 2) if symmetric else (0, count - 1)


def _fit_symmetric(W: Tensor, weights: Tensor, low: int, high: int, search: bool) -> tuple[Tensor, None]:
    """Scale per group of `W [m, G, g]`: the best of a line of shrunken absmax scales, then closed-form least squares on the chosen codes."""
    top, bottom = W.amax(-1, keepdim=True), W.amin(-1, keepdim=True)
    widest = torch.maximum(top / max(high, 1), -bottom / -low).clamp_min(0)
    widest = torch.where(widest > 0, widest, torch.ones_like(widest))  # a zero group: any scale codes it as zeros
    if not search:
        return widest[..., 0], None

    def error(scale: Tensor) -> tuple[Tensor, Tensor]:
        codes = (W / scale).round_().clamp_(low, high)
        return (weights * (codes * scale - W).square_()).sum(-1, keepdim=True), codes

    best, scale = torch.full_like(widest, torch.inf), widest
    for k in range(SHRINKS):
        candidate = widest * (1 - (1 - SMALLEST) * k / SHRINKS)
        err, _ = error(candidate)
        better = err < best
        best, scale = torch.where(better, err, best), torch.where(better, candidate, scale)
    for _ in range(REFINEMENTS):
        _, codes = error(scale)
        power = (weights * codes.square()).sum(-1, keepdim=True)
        candidate = torch.where(power > 0, (weights * codes * W).sum(-1, keepdim=True) / power.clamp_min(1e-38), scale)
        candidate = torch.where(candidate > 0, candidate, scale)
        err, _ = error(candidate)
        better = err < best
        best, scale = torch.where(better, err, best), torch.where(better, candidate, scale)
    return scale[..., 0], None


def _fit_asymmetric(W: Tensor, weights: Tensor, low: int, high: int, search: bool) -> tuple[Tensor, Tensor]:
    """Scale and integer zero per group of `W [m, G, g]`; the range always contains 0, so that zero is a code."""
    top, bottom = W.amax(-1, keepdim=True).clamp_min(0), W.amin(-1, keepdim=True).clamp_max(0)
    span = torch.where(top > bottom, top - bottom, torch.ones_like(top))

    def zero_of(scale: Tensor, shift: float) -> Tensor:
        return (-bottom / scale * shift).round().clamp(low, high)

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        codes = ((W / scale).round() + zero).clamp_(low, high)
        return (weights * ((codes - zero) * scale - W).square_()).sum(-1, keepdim=True)

    scale = span / (high - low)
    zero = zero_of(scale, 1.0)
    if search:
        best = error(scale, zero)
        for k in range(SHRINKS):
            shrink = 1 - (1 - SMALLEST) * k / SHRINKS
            candidate = span / (high - low) * shrink
            middle = zero_of(candidate, shrink)  # clips both ends alike
            for shifted in (middle - 1, middle, middle + 1):
                shifted = shifted.clamp(low, high)
                err = error(candidate, shifted)
                better = err < best
                best = torch.where(better, err, best)
                scale, zero = torch.where(better, candidate, scale), torch.where(better, shifted, zero)
    return scale[..., 0], zero[..., 0].to(torch.int32)
