"""Equally spaced levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bakron.errors import RecipeError
from bakron.grids.scalar import ScalarGrid
from bakron.grids.scales import SHRINKS, SMALLEST, Snap, fit_quadratic, fit_scale, prepare, snapper

if TYPE_CHECKING:
    from bakron.kron import Kron


@dataclass(frozen=True)
class UniformGrid(ScalarGrid):
    """Equally spaced levels: `code = clamp(round_half_even(t / scale) + zero, low, high)`, `value = (code - zero) * scale`."""

    @property
    def levels(self) -> int:
        """Number of codes."""
        return self.high - self.low + 1

    @property
    def symmetric(self) -> bool:
        """Whether the code 0 stands for the value 0 in every group."""
        return self.zero is None

    def levels_of(self, x: Tensor) -> Tensor:
        """Nearest integer, half to even."""
        return x.round()

    def decode(self, codes: Tensor) -> Tensor:
        """The codes themselves."""
        return codes

    @classmethod
    def fit(
        cls,
        W: Tensor,
        levels: int | None = None,
        group_size: int | None = None,
        scale: Literal["absmax", "mse", "curvature", "diagonal", "quadratic"] = "mse",
        symmetric: bool = True,
        kron: Kron | None = None,
        *,
        bits: int | None = None,
        dtype: torch.dtype | None = None,
        scale_format: str = "float",
    ) -> UniformGrid:
        """Choose a scale (and zero point) for every row or group of `W`.

        Args:
            W: Weight `[m, n]`, floating point.
            levels: Number of levels, 2 to 256. Odd symmetric grids reach equally far both ways (7: -3..3); even ones have one more negative
                code (8: -4..3). Asymmetric codes are 0..levels-1.
            group_size: Inputs per scale; None = one scale per row.
            scale: "absmax" covers every weight; "mse" minimises the squared rounding error; "curvature" minimises it weighted by the pivots
                of A, the coefficients of each entry in the loss identity; "diagonal" weighted by the diagonal of A; "quadratic" lowers
                the row's whole `e A e^T`, group by group, from there. The last three need `kron`.
            symmetric: No zero points.
            kron: Damped Hessian.
            bits: Instead of levels: levels = 2**bits.
            dtype: Dtype in which scales are stored; default: W's, or float32 where W is float64.
            scale_format: "float" (in `dtype`), or "float7", "int6" or "int8": what GGUF's types hold, see `bakron.grids.scales.snapper`; the
                fit compares only scales that the format holds.

        Raises:
            RecipeError: Levels or bits out of range or both given, unknown scale rule or format, group size that does not divide n, a rule
                that needs kron without it, or that does not know the format.
            ShapeError: W is not a finite matrix, or kron is of another width.
        """
        low, high = code_range(levels, bits, symmetric)
        rows, weights = prepare(W, group_size, scale, kron)
        dtype = dtype or (torch.float32 if W.dtype == torch.float64 else W.dtype)
        zero = None
        top, bottom = rows.amax(-1, keepdim=True), rows.amin(-1, keepdim=True)
        widest = torch.maximum(top / max(high, 1), bottom / low).clamp_min(0) if symmetric else top - bottom
        snap = snapper(scale_format, dtype, widest, rows.shape[2])
        if scale_format not in ("float", "float7") and (scale == "quadratic" or not symmetric):
            raise RecipeError(f"scale format {scale_format} with {'asymmetric levels' if not symmetric else 'scale quadratic'}", "float")
        if symmetric:
            fitted = fit_scale(rows, weights, widest, lambda x: x.round_().clamp_(low, high), snap, scale != "absmax", (low, high))
        else:
            fitted, zero = _fit_asymmetric(rows, weights, low, high, snap, scale != "absmax")
        if scale == "quadratic" and kron is not None:

            def rounding(x: Tensor, zero: Tensor | None) -> Tensor:
                return x.round_().clamp_(low, high) if zero is None else x.round_().add_(zero).clamp_(low, high) - zero

            shift = None if zero is None else zero.float()[..., None]
            fitted = fit_quadratic(rows, kron.A.H.to(W.device), fitted, shift, rounding, snap)
        return cls(fitted.to(dtype), zero, low, high, group_size)


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


def _fit_asymmetric(W: Tensor, weights: Tensor, low: int, high: int, snap: Snap, search: bool) -> tuple[Tensor, Tensor]:
    """Scale and integer zero per group of `W [m, G, g]`; the range always contains 0, so that zero is a code."""
    top, bottom = W.amax(-1, keepdim=True).clamp_min(0), W.amin(-1, keepdim=True).clamp_max(0)
    span = torch.where(top > bottom, top - bottom, torch.ones_like(top))

    def zero_of(scale: Tensor, shift: float) -> Tensor:
        return (-bottom / scale * shift).round().clamp(low, high)

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        codes = ((W / scale).round() + zero).clamp_(low, high)
        return (weights * ((codes - zero) * scale - W).div_(span).square_()).sum(-1, keepdim=True)

    scale = snap(span / (high - low))
    zero = zero_of(scale, 1.0)
    if search:
        best = error(scale, zero)
        for k in range(SHRINKS):
            shrink = 1 - (1 - SMALLEST) * k / SHRINKS
            candidate = snap(span / (high - low) * shrink)
            middle = zero_of(candidate, shrink)  # clips both ends alike
            for shifted in (middle - 1, middle, middle + 1):
                shifted = shifted.clamp(low, high)
                err = error(candidate, shifted)
                better = err < best
                best = torch.where(better, err, best)
                scale, zero = torch.where(better, candidate, scale), torch.where(better, shifted, zero)
    return scale[..., 0], zero[..., 0].to(torch.int32)
