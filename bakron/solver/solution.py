"""`solve`: check the arguments, put rows and columns in order, run a schedule, say what was done."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import MethodError, ShapeError
from bakron.grids import Grid, OffsetGrid, ScalarGrid
from bakron.kron import Kron
from bakron.solver import reference, tiled, wavefront
from bakron.solver.orders import pair, reorder
from bakron.solver.schedule import Sweep

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


def _auto(W: Tensor, grid: Grid) -> str:
    """The method that `auto` stands for: the compiled kernel where it can serve, else the paper's schedule."""
    return "tiled" if W.device.type == "cpu" and isinstance(grid, ScalarGrid) else "bakron"


def solve(W: Tensor, kron: Kron, grid: Grid, *, method: str = "auto", order: str | tuple[str, str] = "natural") -> Solution:
    """Round `W` to `grid` against `kron`.

    Args:
        W: Weight `[m, n]`; float64 is swept in float64, every other floating dtype in float32. Never modified.
        kron: Hessian; with B = None this is GPTQ with static scales.
        grid: Fitted for W.
        method: A name in `METHODS`.
        order: In which order columns and rows are rounded, a name in `ORDERS` for both or a pair (columns, rows): "natural", "diagonal"
            (largest diagonal entry first), "min-pivot" (smallest remaining pivot last) or "reversed" (from the last index to the first). The result
            comes back in its own order; groups are those of the natural order.

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
    if isinstance(ordered_grid, OffsetGrid):
        ordered, ordered_grid = ordered - ordered_grid.shift(work.shape[1], work.dtype), ordered_grid.base
    ordered_kron.factor()
    if sweep is tiled.sweep and W.device.type == "cpu":
        tiled.ready(work.dtype)
    start = time.perf_counter()
    codes, loss = sweep(ordered, ordered_kron, ordered_grid)
    seconds = time.perf_counter() - start
    if ordered is not work:
        found, codes = codes, torch.empty_like(codes)
        codes[rows[:, None], columns if grid.unit == 1 else torch.arange(codes.shape[1], device=codes.device)] = found
    values = grid.values(codes, work.dtype)
    dead = {"a": len(kron.A.dead), "b": 0 if kron.B is None else len(kron.B.dead)}
    return Solution(values, codes, loss, method, kron.damping, dead, seconds, pair(order))
