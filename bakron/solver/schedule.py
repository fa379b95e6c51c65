"""What every schedule has in common: its signature, what it hands back, and the exact identities that check it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bakron.grids import Grid
from bakron.kron import Kron


class Swept(NamedTuple):
    """Codes `[m, n / unit]` int32, and the loss by the exact identity (`identity_loss`)."""

    codes: Tensor
    loss: float


class Sweep(Protocol):
    """A schedule: rounds a contiguous float32 or float64 `W [m, n]` to the grid against the Kron."""

    def __call__(self, W: Tensor, kron: Kron, grid: Grid) -> Swept:
        """Round W."""
        ...


def targets(values: Tensor, W: Tensor, kron: Kron, unit: int = 1) -> Tensor:
    """Every entry's target, float64 `[m, n]`, from the values alone: two triangular products, no order, O(mn(m + n)).

    Args:
        values: Rounded weight `[m, n]`.
        W: Weight `[m, n]`.
        kron: Hessian.
        unit: Inputs that were rounded together; they get no feedback from each other.
    """
    E = values.double() - W.double()
    N_A, _ = kron.A.block_unit(unit)
    feedback = E @ N_A.to(E.device).T
    if kron.B is not None:
        feedback = kron.B.unit_as(torch.float64, E.device) @ feedback
    return values.double() - feedback


def identity_loss(values: Tensor, T: Tensor, kron: Kron, unit: int = 1) -> float:
    """`sum_ij d^B_i d^A_j (V_ij - T_ij)^2`, which is `tr(B E A E^T)` (Birnick and Saab 2026, Prop. 3.1); `r D^A_j r^T` for units of several."""
    residual = values.double() - T
    if unit == 1:
        rows = residual.square() @ kron.A.pivots.to(T.device)
    else:
        units = residual.view(len(T), -1, unit)
        rows = torch.einsum("mju,juv,mjv->m", units, kron.A.block_unit(unit)[1].to(T.device), units)
    return float(rows.sum() if kron.B is None else rows @ kron.B.pivots.to(T.device))


def finish(codes: Tensor, W: Tensor, kron: Kron, grid: Grid) -> Swept:
    """Codes with the loss that they have."""
    values = grid.values(codes, W.dtype)
    return Swept(codes, identity_loss(values, targets(values, W, kron, grid.unit), kron, grid.unit))
