"""What every schedule has in common: its signature, and what it hands back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bakron.grids import UniformGrid
from bakron.kron import Kron


class Swept(NamedTuple):
    """Codes `[m, n]` int32, and the loss by the exact identity `sum d^B_i d^A_j (V_ij - T_ij)^2`."""

    codes: Tensor
    loss: float


class Sweep(Protocol):
    """A schedule: rounds a contiguous float32 or float64 `W [m, n]` to the grid against the Kron."""

    def __call__(self, W: Tensor, kron: Kron, grid: UniformGrid) -> Swept:
        """Round W."""
        ...


def targets(values: Tensor, W: Tensor, kron: Kron) -> Tensor:
    """Every entry's target, float64 `[m, n]`, from the values alone: two triangular products, no order, O(mn(m + n))."""
    E = values.double() - W.double()
    feedback = E @ kron.A.unit_as(torch.float64, E.device).T
    if kron.B is not None:
        feedback = kron.B.unit_as(torch.float64, E.device) @ feedback
    return values.double() - feedback


def identity_loss(values: Tensor, T: Tensor, kron: Kron) -> float:
    """`sum d^B_i d^A_j (V_ij - T_ij)^2`, which is `tr(B E A E^T)` (Birnick and Saab 2026, Prop. 3.1)."""
    rows = (values.double() - T).square() @ kron.A.pivots.to(T.device)
    return float(rows.sum() if kron.B is None else rows @ kron.B.pivots.to(T.device))
