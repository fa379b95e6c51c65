"""In which order rows and columns are rounded. What comes first is corrected by everything after it, so large pivots should come first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bakron.errors import RecipeError
from bakron.grids import Grid
from bakron.kron import Factor, Kron

ORDERS = ("natural", "diagonal", "min-pivot", "reversed")


def pair(order: str | tuple[str, str]) -> tuple[str, str]:
    """The orders of A (columns) and of B (rows).

    Raises:
        RecipeError: Unknown order.
    """
    both = (order, order) if isinstance(order, str) else tuple(order)
    if len(both) != 2 or any(name not in ORDERS for name in both):
        raise RecipeError(f"order {order!r}", f"one of {', '.join(ORDERS)}, or a pair of them: (columns, rows)")
    return both[0], both[1]


def arrange(factor: Factor | None, order: str, size: int) -> Tensor:
    """The indices of a factor in the order of rounding, `[size]`; heads stay together.

    "diagonal" takes the largest diagonal entries first (GPTQ's act-order). "min-pivot" builds the order from its end: of what is left,
    the index with the smallest pivot comes last (Chen et al. 2025), which keeps the sum of pivots small. "reversed" goes from the last index to
    the first, as Tseng et al. 2025 do.
    """
    if factor is None or order == "natural":
        return torch.arange(size)
    parts, start = [], 0
    for head in factor.heads:
        parts.append(_ARRANGE[order](head.H).cpu() + start)
        start += head.size
    return torch.cat(parts)


def _min_pivot(H: Tensor) -> Tensor:
    """Cholesky with the smallest remaining pivot taken next; k products of a matrix with a vector."""
    k = H.shape[0]
    H = H.double()
    L = torch.zeros(k, k, dtype=torch.float64, device=H.device)
    left = H.diagonal().clone()
    taken = torch.zeros(k, dtype=torch.bool, device=H.device)
    order = []
    for step in range(k):
        j = int(torch.where(taken, torch.inf, left).argmin())
        order.append(j)
        taken[j] = True
        pivot = float(left[j])
        if pivot > 0:
            L[:, step] = (H[:, j] - L[:, :step] @ L[j, :step]) / pivot**0.5
            left -= L[:, step].square()
    return torch.tensor(order[::-1])


_ARRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda H: H.diagonal().argsort(descending=True, stable=True),
    "min-pivot": _min_pivot,
    "reversed": lambda H: torch.arange(len(H)).flip(0),
}


def reorder(W: Tensor, kron: Kron, grid: Grid, order: str | tuple[str, str]) -> tuple[Tensor, Kron, Grid, Tensor, Tensor]:
    """The same problem with rows and columns in the order of rounding, and that order: W, kron, grid, rows, columns."""
    a, b = pair(order)
    if (a, b) == ("natural", "natural"):
        return W, kron, grid, torch.arange(W.shape[0]), torch.arange(W.shape[1])
    columns = arrange(kron.A, a, W.shape[1]).to(W.device)
    rows = arrange(kron.B, b, W.shape[0]).to(W.device)
    A = kron.A if a == "natural" else kron.A.permuted(columns)
    B = kron.B if b == "natural" or kron.B is None else kron.B.permuted(rows)
    return W[rows][:, columns].contiguous(), Kron(A, B), grid.reorder(rows, columns), rows, columns
