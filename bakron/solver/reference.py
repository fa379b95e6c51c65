"""The definition, written to be read: GPTQ on `vec(W)`. Used by tests; O(m^2 n^2) work, m n steps."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.errors import MethodError
from bakron.grids import UniformGrid
from bakron.kron import Kron
from bakron.solver.schedule import Swept

LARGEST = 4096  # entries of W: the dense factor holds LARGEST^2 float64


def naive(W: Tensor, kron: Kron, grid: UniformGrid) -> Swept:
    """Round one entry after the other, column by column, against the dense `A (x) B`, in float64.

    Args:
        W: `[m, n]`.
        kron: Hessian.
        grid: Fitted for W.

    Returns:
        Codes `[m, n]` int32 and the loss.

    Raises:
        MethodError: W has too many entries for the dense Hessian.
    """
    m, n = W.shape
    if m * n > LARGEST:
        raise MethodError(f"naive on a weight [{m}, {n}]", f"at most {LARGEST} entries", "Use method='auto'")
    N_B = torch.eye(m, dtype=torch.float64) if kron.B is None else kron.B.unit.cpu()
    N = torch.kron(kron.A.unit.cpu(), N_B)  # the unit reverse Cholesky factor of A (x) B
    w, error = W.double().cpu().T.flatten(), torch.zeros(m * n, dtype=torch.float64)  # column-major vec
    codes = torch.empty(m, n, dtype=torch.int32)
    pivots = torch.kron(kron.A.pivots.cpu(), torch.ones(m, dtype=torch.float64) if kron.B is None else kron.B.pivots.cpu())
    loss = 0.0
    for k in range(m * n):
        i, j = k % m, k // m
        target = w[k] - N[k, :k] @ error[:k]
        code, value = grid.project(target.reshape(1, 1), slice(i, i + 1), slice(j, j + 1), n)
        codes[i, j], error[k] = code, value - w[k]
        loss += float(pivots[k] * (value - target) ** 2)
    return Swept(codes.to(W.device), loss)
