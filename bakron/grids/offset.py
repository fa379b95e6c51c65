"""Equally spaced levels that start at a number of each group's own: what GGUF's types with a minimum hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bakron.errors import RecipeError
from bakron.grids.scales import SHRINKS, SMALLEST, SUPER, in_units, prepare
from bakron.grids.uniform import UniformGrid, code_range

if TYPE_CHECKING:
    from bakron.kron import Kron

NEAR = 2  # steps of a quantized scale that are tried on either side
STEPS = 3  # of least squares per candidate


@dataclass(frozen=True)
class OffsetGrid(UniformGrid):
    """Levels `code * scale + offset`, codes from 0. A solve on it is one of `W - offset` on `base`: errors and feedback are the same.

    Attributes:
        offset: `[m, G]` float32, not above 0.
    """

    offset: Tensor | None = None

    @property
    def symmetric(self) -> bool:
        """Never: it has something like a zero point."""
        return False

    @property
    def base(self) -> UniformGrid:
        """The same levels from 0."""
        return UniformGrid(self.scale, None, self.low, self.high, self.group_size, self.index)

    def shift(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Offset of every entry, `[m, n]`."""
        assert self.offset is not None
        return self.offset.to(dtype)[:, self.groups(n)]

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`code * scale + offset` of integer codes `[m, n]`."""
        return self.base.values(codes, dtype) + self.shift(codes.shape[1], dtype)

    def project(self, T: Tensor, rows: slice = slice(None), cols: slice = slice(None), n: int | None = None) -> tuple[Tensor, Tensor]:
        """Nearest grid point of every entry, as `ScalarGrid.project`."""
        shift = self.shift(n or T.shape[1], T.dtype)[rows, cols]
        codes, values = self.base.project(T - shift, rows, cols, n)
        return codes, values + shift

    def nearest(self, T: Tensor, rows: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest grid points of K targets, as `ScalarGrid.nearest`."""
        assert self.offset is not None
        shift = self.offset[rows, self.groups_at(units)].to(T.dtype)[:, None]
        codes, values = self.base.nearest(T - shift, rows, units)
        return codes, values + shift

    def reorder(self, rows: Tensor, columns: Tensor) -> OffsetGrid:
        """The grid of `W[rows][:, columns]`: every weight keeps its own scale and offset."""
        assert self.offset is not None
        return replace(super().reorder(rows, columns), offset=self.offset[rows])

    @classmethod
    def fit_super(cls, W: Tensor, levels: int, group_size: int, scale: str, kron: Kron | None, most: int) -> OffsetGrid:
        """Choose scales and offsets that are whole numbers up to `most` times two float16 numbers of every 256 inputs.

        Args:
            W: Weight `[m, n]`, n a multiple of 256.
            levels: Number of levels.
            group_size: Inputs per scale.
            scale: "absmax" covers every weight; "mse" and "curvature" as for `UniformGrid.fit`.
            kron: Damped Hessian, for "curvature".
            most: 63 (Q4_K) or 15 (Q2_K).

        Raises:
            RecipeError: Another rule, groups that do not fill blocks of 256 inputs, or what `UniformGrid.fit` refuses.
            ShapeError: As there.
        """
        low, high = code_range(levels, None, False)
        rows, weights = prepare(W, group_size, scale, kron)
        if scale not in ("absmax", "mse", "curvature") or W.shape[1] % SUPER or SUPER % group_size:
            raise RecipeError(
                f"scale {scale} and groups of {group_size} in {W.shape[1]} inputs",
                f"absmax, mse or curvature, and groups that fill blocks of {SUPER}",
            )
        step, offset = _free(rows, weights, high, scale != "absmax")
        unit, whole = in_units(step, SUPER // group_size, most)
        least, count = in_units(-offset, SUPER // group_size, most)
        whole, offset = whole.clamp_min(1), -least * count
        if scale != "absmax":
            tried = torch.stack([(whole + k).clamp(1, most) for k in range(-NEAR, NEAR + 1)])
            errors = torch.stack([_error(rows, weights, unit * one, offset, high) for one in tried])
            whole = tried.gather(0, errors.argmin(0, keepdim=True))[0]
        return cls((unit * whole)[..., 0], None, low, high, group_size, None, offset[..., 0])


def _free(W: Tensor, weights: Tensor, high: int, search: bool) -> tuple[Tensor, Tensor]:
    """Step and offset per group of `W [m, G, g]` without regard to how they are stored, `[m, G, 1]` each."""
    top, bottom = W.amax(-1, keepdim=True).clamp_min(0), W.amin(-1, keepdim=True).clamp_max(0)
    step = torch.where(top > bottom, (top - bottom) / high, torch.ones_like(top))
    if not search:
        return step, bottom
    best, found = torch.full_like(step, torch.inf), (step, bottom)
    for k in range(0, SHRINKS, 4):
        shrink = 1 - (1 - SMALLEST) * k / SHRINKS
        s, o = step * shrink, bottom * shrink
        for _ in range(STEPS):
            error = _error(W, weights, s, o, high)
            better = error < best
            best, found = torch.where(better, error, best), (torch.where(better, s, found[0]), torch.where(better, o, found[1]))
            codes = ((W - o) / s).round_().clamp_(0, high)
            total, first, second = ((weights * part).sum(-1, keepdim=True) for part in (torch.ones_like(W), codes, codes.square()))
            cross, plain = (weights * codes * W).sum(-1, keepdim=True), (weights * W).sum(-1, keepdim=True)
            spread = total * second - first * first
            s = torch.where(spread > 0, (total * cross - first * plain) / spread.clamp_min(1e-38), s)
            s = torch.where(s > 0, s, step)
            o = ((plain - s * first) / total).clamp_max(0)
    return found


def _error(W: Tensor, weights: Tensor, step: Tensor, offset: Tensor, high: int) -> Tensor:
    codes = ((W - offset) / step).round_().clamp_(0, high)
    return (weights * (codes * step + offset - W).square()).sum(-1, keepdim=True)
