"""Two-sided rounding: `solve` a weight against a Kronecker-factored Hessian, `certify` any result. Knows grids and Krons, never a model.

Every method in `METHODS` returns the same answer: nearest-plane rounding on `A (x) B`, that is, with N the unit factors of `bakron.kron`,

    t_ij = W_ij - sum over (i' <= i, j' <= j), not (i, j), of  N_B[i, i'] E_i'j' N_A[j, j']          V_ij = grid(t_ij)          E = V - W

(Birnick and Saab 2026, Thm. 3.2). They differ in schedule, that is in speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import MethodError, ShapeError
from bakron.grids import UniformGrid
from bakron.kron import Kron
from bakron.solver import reference, tiled

Sweep = Callable[[Tensor, Kron, UniformGrid], Tensor]


def _auto(W: Tensor, kron: Kron, grid: UniformGrid) -> tuple[str, Sweep]:
    """The method that `auto` stands for here: the only production schedule so far is the one for CPUs."""
    return "tiled", tiled.sweep


METHODS: dict[str, Sweep | None] = {"auto": None, "naive": reference.naive, "tiled": tiled.sweep}


@dataclass(frozen=True)
class Solution:
    """What a solve found.

    Attributes:
        values: Rounded weight `[m, n]`, float32 (float64 for float64 weights), on W's device.
        codes: Integer codes `[m, n]` int32; `grid.values(codes)` equals `values`.
        loss: `tr(B E A E^T)` of `E = values - W` under the Kron that was solved against, damping included.
        method: The schedule used; what "auto" picked.
        damping: Amounts in the Kron's factors, as recorded by `Kron.damp`.
        dead: Number of inputs and outputs without curvature: `{"a": ..., "b": ...}`.
        seconds: Wall time of the sweep alone; factors are computed before it, and once a Kron.
    """

    values: Tensor
    codes: Tensor
    loss: float
    method: str
    damping: dict[str, tuple[tuple[float, str], ...]]
    dead: dict[str, int]
    seconds: float


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


def solve(W: Tensor, kron: Kron, grid: UniformGrid, *, method: str = "auto") -> Solution:
    """Round `W` to `grid` against `kron`.

    Args:
        W: Weight `[m, n]`; float64 is swept in float64, every other floating dtype in float32. Never modified.
        kron: Hessian; with B = None this is GPTQ with static scales.
        grid: Fitted for W.
        method: A name in `METHODS`.

    Returns:
        The solution, on W's device.

    Raises:
        MethodError: Unknown method.
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
    sweep = METHODS[method]
    if sweep is None:
        method, sweep = _auto(work, kron, grid)
    kron.factor()
    start = time.perf_counter()
    codes = sweep(work, kron, grid)
    seconds = time.perf_counter() - start
    values = grid.values(codes, work.dtype)
    dead = {"a": len(kron.A.dead), "b": 0 if kron.B is None else len(kron.B.dead)}
    return Solution(values, codes, kron.loss(values - work), method, kron.damping, dead, seconds)


def targets(values: Tensor, W: Tensor, kron: Kron) -> Tensor:
    """Every entry's target, float64 `[m, n]`, from the values alone: two triangular products, no order, O(mn(m + n))."""
    E = values.double() - W.double()
    feedback = E @ kron.A.unit_as(torch.float64, E.device).T
    if kron.B is not None:
        feedback = kron.B.unit_as(torch.float64, E.device) @ feedback
    return values.double() - feedback


def certify(values: Tensor, W: Tensor, kron: Kron, grid: UniformGrid, *, tolerance: float = 1e-3) -> Certificate:
    """Check that every value is the grid point nearest to its own target; needs no reference run and accepts anybody's result.

    Args:
        values: Rounded weight `[m, n]`.
        W: Original weight `[m, n]`.
        kron: The Hessian it was rounded against.
        grid: The grid it was rounded to.
        tolerance: Excess distance that still counts as nearest, in units of the entry's scale: what float32 sums may cost at a decision boundary.

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
    T = targets(values, W, kron)
    scale, _ = grid.expand(W.shape[1], torch.float64)
    _, nearest = grid.project(T)
    _, onto = grid.project(values.double())
    gap = ((values.double() - T).abs() - (nearest - T).abs()) / scale
    off_grid = (onto - values.double()).abs() > 1e-5 * scale
    bad = (gap > tolerance) | off_grid | ~torch.isfinite(values)
    residual = (values.double() - T).square()
    rows = residual @ kron.A.pivots.to(T.device)
    loss = rows.sum() if kron.B is None else (rows * kron.B.pivots.to(T.device)).sum()
    return Certificate(int(bad.sum()), float(gap.max()), float(loss))
