"""After the sweep: better scales for the codes that were found (`refit`), better codes for the scales (`polish`). Neither raises the loss."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from bakron.errors import MethodError
from bakron.grids import E8Grid, OffsetGrid, ScalarGrid
from bakron.grids.scales import snapper
from bakron.kron import Kron
from bakron.solver.solution import Solution, solve
from bakron.solver.tiled import kernel_grid

ScaledGrid = TypeVar("ScaledGrid", ScalarGrid, E8Grid)
ITERATIONS = 24  # of conjugate gradients; each costs two products
PANEL = BLOCK = 64  # rows and columns that `polish` takes between two products


def refit_scales(codes: Tensor, W: Tensor, kron: Kron, grid: ScaledGrid) -> ScaledGrid:
    """The scales of least loss for given codes, as far as the format can hold them.

    The loss is quadratic in the scales `s` (`V = s C` with levels C), so conjugate gradients on `C . (B (s C) A) = C . (B W A)`, summed over
    each scale's entries, lower it with every iteration. For one scale a row this is the closed form `(B . (C A C^T)) s = diag(B W A C^T)`.

    Args:
        codes: `[m, n / unit]`.
        W: Weight `[m, n]`.
        kron: Hessian.
        grid: Whose scales to start from.

    Returns:
        A grid with new scales; the same grid if no better ones can be stored.
    """
    if isinstance(grid, OffsetGrid):  # offsets stay what they are
        base = grid.base
        moved = refit_scales(codes, W - grid.shift(W.shape[1], W.dtype), kron, base)
        return grid if moved is base else replace(grid, scale=moved.scale)
    work = W.detach().to(torch.float64 if W.dtype == torch.float64 else torch.float32)
    values, spread = grid.values(codes, work.dtype), grid.spread(W.shape[1], work.dtype)
    levels = values / spread
    A = kron.A.H.to(work)
    B = None if kron.B is None else [head.H.to(work) for head in kron.B.heads]
    groups, scale = grid.groups(W.shape[1]), grid.scale.to(work.dtype).clone()

    def curve(E: Tensor) -> Tensor:
        right = E @ A
        if B is not None:
            right = torch.cat([block @ part for block, part in zip(B, right.split([len(block) for block in B]))])  # type: ignore[no-untyped-call]
        return torch.zeros_like(scale).index_add_(1, groups, levels * right)

    diagonal = levels.square() * A.diagonal()
    if kron.B is not None:
        diagonal = diagonal * torch.cat([head.H.diagonal() for head in kron.B.heads]).to(work)[:, None]
    curvature = torch.zeros_like(scale).index_add_(1, groups, diagonal)
    curvature = torch.where(curvature > 0, curvature, torch.ones_like(curvature))
    residual = -curve(values - work)
    step = residual / curvature
    power = float((residual * step).sum())
    for _ in range(ITERATIONS):
        pushed = curve(step[:, groups] * levels)
        along = float((step * pushed).sum())
        if along <= 0 or power <= 0:
            break
        scale += power / along * step
        residual -= power / along * pushed
        before, power = power, float((residual * residual / curvature).sum())
        step = residual / curvature + power / before * step
    form = getattr(grid, "scale_format", "float")
    scale = torch.where(scale > 0, scale, grid.scale.to(scale.dtype))
    stored = (snapper(form, grid.scale.dtype, scale)(scale.float()) if form != "float" else scale).to(grid.scale.dtype)
    refitted = replace(grid, scale=stored)
    better = kron.loss(refitted.values(codes, torch.float64) - W.double()) < kron.loss(grid.values(codes, torch.float64) - W.double())
    return refitted if better else grid


def refit(found: Solution, W: Tensor, kron: Kron, grid: ScaledGrid, *, reround: bool = False) -> tuple[Solution, ScaledGrid]:
    """Refit the scales to the codes; optionally round again on the new scales, and keep what is best.

    Args:
        found: What `solve` returned for these.
        W: Weight `[m, n]`.
        kron: Hessian.
        grid: The grid of `found`.
        reround: Solve once more on the new scales, with the same method and order; kept only if its loss is lower.

    Returns:
        The solution and the grid that its codes belong to; its loss is never higher than before.
    """
    start = time.perf_counter()
    better = refit_scales(found.codes, W, kron, grid)
    if better is grid:
        return found, grid
    values = better.values(found.codes, found.values.dtype)
    loss = kron.loss(values.double() - W.double())
    if loss >= found.loss:
        return found, grid
    best = replace(found, values=values, loss=loss, seconds=found.seconds + time.perf_counter() - start)
    if reround:
        again = solve(W, kron, better, method=found.method, order=found.order)
        if again.loss < best.loss:
            best = replace(again, seconds=best.seconds + again.seconds)
    return best, better


def polish(found: Solution, W: Tensor, kron: Kron, grid: ScalarGrid, *, sweeps: int = 1) -> Solution:
    """Coordinate descent on the same grid: each entry moves to its best value while all others stay.

    Nearest-plane rounding decides every entry once, before it knows what comes later; this looks at all of them again. The result is no
    nearest-plane rounding any more, so `certify` does not apply to it. Tiled as the sweep is: within a tile the gradient is kept up to date
    entry by entry, between tiles by products.

    Args:
        found: What `solve` returned for these.
        W: Weight `[m, n]`, on the CPU.
        kron: Hessian.
        grid: The grid of `found`, scalar.
        sweeps: How often every entry is looked at.

    Returns:
        A solution whose loss is never higher than before.

    Raises:
        MethodError: The weight is not on the CPU, or the grid is not scalar.
    """
    if W.device.type != "cpu" or not isinstance(grid, ScalarGrid):
        raise MethodError(f"polish of a {type(grid).__name__} on device {W.device}", "a scalar grid, and a weight on the CPU")
    if isinstance(grid, OffsetGrid):
        shift = grid.shift(W.shape[1], found.values.dtype)
        better = polish(replace(found, values=found.values - shift), W - shift, kron, grid.base, sweeps=sweeps)
        values = grid.values(better.codes, found.values.dtype)
        loss = kron.loss(values.double() - W.double())
        return replace(better, values=values, loss=loss) if loss < found.loss else found
    start = time.perf_counter()
    work = W.detach().to(torch.float64 if W.dtype == torch.float64 else torch.float32)
    values, codes = found.values.to(work.dtype).clone(), found.codes.clone()
    A = kron.A.H.to(work)
    heads = [torch.eye(1).to(work)] * len(work) if kron.B is None else [head.H.to(work) for head in kron.B.heads]
    first = 0
    if kron.B is None:  # rows are independent: any number of them makes a block with B = I
        heads = [torch.eye(min(PANEL, len(work) - top)).to(work) for top in range(0, len(work), PANEL)]
    constants = kernel_grid(grid, work.shape[1], work.dtype)
    for B in heads:
        rows = slice(first, first + len(B))
        _polish_head(values[rows], codes[rows], work[rows], A, B, constants, rows, sweeps)
        first += len(B)
    loss = kron.loss(values.double() - W.double())
    if not loss < found.loss:
        return found
    return replace(found, values=values, codes=codes, loss=loss, seconds=found.seconds + time.perf_counter() - start)


def _polish_head(values: Tensor, codes: Tensor, W: Tensor, A: Tensor, B: Tensor, constants: tuple, rows: slice, sweeps: int) -> None:
    """Sweep over one head; `values` and `codes` are updated in place.

    The gradient `G = B E A` changes by `B D A` where D is what was added to the values. `Q = D A` of the finished panels is kept, so each
    panel asks for one product with the rows of B above it, and after a sweep G takes the rest.
    """
    from bakron.solver.polish_cpu import polish_tile

    m, n = W.shape
    scale, zero, group_of, low, high, levels, thresholds = constants
    scale, zero = scale[rows], zero[rows]
    G = B @ ((values - W) @ A)
    Q, change = torch.zeros_like(W), torch.zeros_like(W)
    for sweep in range(sweeps):
        for top in range(0, m, PANEL):
            own = slice(top, min(top + PANEL, m))
            corner = B[own, own].contiguous()
            if top:
                G[own] += B[own, :top] @ Q[:top]
            for left in range(0, n, BLOCK):
                columns = slice(left, min(left + BLOCK, n))
                gradient = G[own, columns] + corner @ (change[own, :left] @ A[:left, columns]) if left else G[own, columns].clone()
                V, found, moved = values[own, columns].contiguous(), codes[own, columns].contiguous(), torch.empty_like(gradient)
                polish_tile(
                    V.numpy(), gradient.numpy(), corner.numpy(), A[columns, columns].contiguous().numpy(), scale[own], zero[own],
                    group_of[columns], low, high, levels, thresholds, found.numpy(), moved.numpy(),
                )  # fmt: skip
                values[own, columns], codes[own, columns], change[own, columns] = V, found, moved
            Q[own] = change[own] @ A
        if sweep + 1 < sweeps:
            for top in range(0, m, PANEL):  # what came at or below each panel; what came above is in already
                own = slice(top, min(top + PANEL, m))
                G[own] += B[own, top:] @ Q[top:]
