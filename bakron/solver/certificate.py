"""`certify`: is a result a nearest-plane rounding? Recomputed from the values alone, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import ShapeError
from bakron.grids import Grid
from bakron.kron import Kron
from bakron.solver.orders import reorder
from bakron.solver.schedule import identity_loss, targets


@dataclass(frozen=True)
class Certificate:
    """Whether a result is a nearest-plane rounding, recomputed from its values alone.

    Attributes:
        violations: Entries whose value is not the grid point nearest to its target (beyond `tolerance` of a scale).
        max_gap: Largest excess distance over the nearest grid point, in units of the entry's scale.
        loss: `sum d^B_i d^A_j (V_ij - T_ij)^2`, which is the loss by the exact identity.
    """

    violations: int
    max_gap: float
    loss: float


def certify(
    values: Tensor, W: Tensor, kron: Kron, grid: Grid, *, tolerance: float = 1e-3, order: str | tuple[str, str] = "natural"
) -> Certificate:
    """Check that every value is the grid point nearest to its own target; needs no reference run and accepts anybody's result.

    Args:
        values: Rounded weight `[m, n]`.
        W: Original weight `[m, n]`.
        kron: The Hessian it was rounded against.
        grid: The grid it was rounded to.
        order: The order it was rounded in, as for `solve`.
        tolerance: Excess distance that still counts as nearest, in units of the entry's scale: what float32 sums may cost at a decision
            boundary.

    Returns:
        Violations, the largest excess distance, and the loss by the identity (Birnick and Saab 2026, Prop. 3.1).

    Raises:
        ShapeError: Shapes do not fit.
        FactorError: A factor is not positive definite.
    """
    kron.check(W)
    grid.check(W)
    if values.shape != W.shape:
        raise ShapeError(f"values of shape {list(values.shape)}", f"{list(W.shape)}, as the weight")
    W, kron, grid, rows, columns = reorder(W, kron, grid, order)
    V = values.double()[rows][:, columns]
    unit = grid.unit
    T = targets(V, W, kron, unit)
    scale = grid.spread(W.shape[1], torch.float64)
    nearest, onto = _project(T, grid), _project(V, grid)
    excess = _lengths(V - T, unit) - _lengths(nearest - T, unit)
    gap = excess / scale[:, ::unit]
    off_grid = (onto - V).abs() > 1e-5 * scale
    bad = (gap > tolerance) | off_grid.view(len(V), -1, unit).any(2) | ~torch.isfinite(V).view(len(V), -1, unit).all(2)
    return Certificate(int(bad.sum()), float(gap.max()), identity_loss(V, T, kron, unit))


def _project(T: Tensor, grid: Grid) -> Tensor:
    m, n = T.shape
    units = torch.arange(n // grid.unit, device=T.device)
    rows = torch.arange(m, device=T.device).repeat_interleave(len(units))
    return grid.nearest(T.reshape(-1, grid.unit), rows, units.repeat(m))[1].view(m, n)


def _lengths(X: Tensor, unit: int) -> Tensor:
    return X.view(len(X), -1, unit).square().sum(2).sqrt() if unit > 1 else X.abs()
