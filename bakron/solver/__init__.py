"""Two-sided rounding: `solve` a weight against a Kronecker-factored Hessian, `certify` any result. Knows grids and Krons, never a model.

Every method in `METHODS` returns the same answer: nearest-plane rounding on `A (x) B`, that is, with N the unit factors of `bakron.kron`,

    t_ij = W_ij - sum over (i' <= i, j' <= j), not (i, j), of  N_B[i, i'] E_i'j' N_A[j, j']          V_ij = grid(t_ij)          E = V - W

(Birnick and Saab 2026, Thm. 3.2). They differ in schedule, that is in speed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import MethodError, ShapeError
from bakron.grids import Grid, ScalarGrid
from bakron.kron import Kron
from bakron.solver import reference, tiled, wavefront
from bakron.solver.orders import ORDERS, pair, reorder
from bakron.solver.schedule import Sweep, identity_loss, targets


def _auto(W: Tensor, grid: Grid) -> str:
    """The method that `auto` stands for: the compiled kernel where it can serve, else the paper's schedule."""
    return "tiled" if W.device.type == "cpu" and isinstance(grid, ScalarGrid) else "bakron"


__all__ = ["METHODS", "ORDERS", "Certificate", "Solution", "certify", "identity_loss", "solve", "targets"]

METHODS: dict[str, Sweep | None] = {
    "auto": None,
    "naive": reference.naive,
    "antidiagonal": reference.antidiagonal,
    "recursive": wavefront.recursive,
    "bakron": wavefront.bakron,
    "tiled": tiled.sweep,
}


@dataclass(frozen=True)
class Solution:
    """What a solve found.

    Attributes:
        values: Rounded weight `[m, n]`, float32 (float64 for float64 weights), on W's device.
        codes: Integer codes `[m, n]` (`[m, n / unit]` of a vector grid) int32; `grid.values(codes)` equals `values`.
        loss: `tr(B E A E^T)` of `E = values - W` under the Kron that was solved against, damping included.
        method: The schedule used; what "auto" picked.
        damping: Amounts in the Kron's factors, as recorded by `Kron.damp`.
        dead: Number of inputs and outputs without curvature: `{"a": ..., "b": ...}`.
        seconds: Wall time of the sweep alone; factors are computed before it, and once a Kron.
        order: In which order columns (A) and rows (B) were rounded.
    """

    values: Tensor
    codes: Tensor
    loss: float
    method: str
    damping: dict[str, tuple[tuple[float, str], ...]]
    dead: dict[str, int]
    seconds: float
    order: tuple[str, str] = ("natural", "natural")


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


def solve(W: Tensor, kron: Kron, grid: Grid, *, method: str = "auto", order: str | tuple[str, str] = "natural") -> Solution:
    """Round `W` to `grid` against `kron`.

    Args:
        W: Weight `[m, n]`; float64 is swept in float64, every other floating dtype in float32. Never modified.
        kron: Hessian; with B = None this is GPTQ with static scales.
        grid: Fitted for W.
        method: A name in `METHODS`.
        order: In which order columns and rows are rounded, a name in `ORDERS` for both or a pair (columns, rows): "natural", "diagonal"
            (largest diagonal entry first) or "min-pivot" (smallest remaining pivot last). The result comes back in its own order; groups are
            those of the natural order.

    Returns:
        The solution, on W's device.

    Raises:
        MethodError: Unknown method, or one that cannot serve this grid or device.
        RecipeError: Unknown order, or one that the grid's units forbid.
        ShapeError: W does not fit kron or grid, or holds NaN or Inf.
        FactorError: A factor of kron is not positive definite.
    """
    if method not in METHODS:
        raise MethodError(f"solver method {method!r}", f"one of {', '.join(METHODS)}")
    kron.check(W)
    grid.check(W)
    if not W.is_floating_point() or not bool(torch.isfinite(W).all()):
        raise ShapeError(
            f"a weight of dtype {W.dtype} with {int((~torch.isfinite(W)).sum())} non-finite entries", "finite floating point weights"
        )
    work = W.detach().to(torch.float64 if W.dtype == torch.float64 else torch.float32).contiguous()
    method = _auto(work, grid) if method == "auto" else method
    sweep = METHODS[method]
    assert sweep is not None
    ordered, ordered_kron, ordered_grid, rows, columns = reorder(work, kron, grid, order)
    ordered_kron.factor()
    start = time.perf_counter()
    codes, loss = sweep(ordered, ordered_kron, ordered_grid)
    seconds = time.perf_counter() - start
    if ordered is not work:
        found, codes = codes, torch.empty_like(codes)
        codes[rows[:, None], columns if grid.unit == 1 else torch.arange(codes.shape[1], device=codes.device)] = found
    values = grid.values(codes, work.dtype)
    dead = {"a": len(kron.A.dead), "b": 0 if kron.B is None else len(kron.B.dead)}
    return Solution(values, codes, loss, method, kron.damping, dead, seconds, pair(order))


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
