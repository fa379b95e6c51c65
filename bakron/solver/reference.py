"""The definition, and the best schedule known before: both written to be read.

`naive` is GPTQ on `vec(W)`, O(m^2 n^2) work in m n / unit steps. `antidiagonal` rounds all entries of an anti-diagonal at once and propagates
their errors to the whole weight by one dense product: still O(m^2 n^2) work, but only m + n - 1 steps; the schedule of YAQA (Tseng et al.
2025), walked from the other corner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.errors import MethodError
from bakron.grids import Grid
from bakron.kron import Kron
from bakron.solver.schedule import Swept, finish

LARGEST = 4096  # entries of W: the dense factor holds LARGEST^2 float64


def naive(W: Tensor, kron: Kron, grid: Grid) -> Swept:
    """Round one entry (or unit) after the other, column by column, against the dense `A (x) B`, in float64.

    Args:
        W: `[m, n]`.
        kron: Hessian.
        grid: Fitted for W.

    Returns:
        Codes and loss.

    Raises:
        MethodError: W has too many entries for the dense Hessian.
    """
    m, n = W.shape
    unit = grid.unit
    if m * n > LARGEST:
        raise MethodError(f"naive on a weight [{m}, {n}]", f"at most {LARGEST} entries", "Use method='auto'")
    N_A, D_A = kron.A.block_unit(unit)
    N_B = torch.eye(m, dtype=torch.float64) if kron.B is None else kron.B.unit.cpu()
    pivots_B = torch.ones(m, dtype=torch.float64) if kron.B is None else kron.B.pivots.cpu()
    N = torch.kron(N_A.cpu(), N_B)  # the unit reverse Cholesky factor of A (x) B
    w, error = W.double().cpu().T.flatten(), torch.zeros(m * n, dtype=torch.float64)  # column-major vec
    codes, loss = torch.empty(m, n // unit, dtype=torch.int32), 0.0
    for j in range(n // unit):
        for i in range(m):
            at = torch.arange(j * unit, (j + 1) * unit) * m + i
            target = w[at] - N[at] @ error  # what is not rounded yet has no error
            code, value = grid.nearest(target[None].to(W.device), _one(i, W), _one(j, W))
            codes[i, j], error[at] = code[0], value[0].cpu() - w[at]
            residual = value[0].cpu() - target
            loss += float(pivots_B[i] * (residual @ D_A[j].cpu() @ residual))
    return Swept(codes.to(W.device), loss)


def antidiagonal(W: Tensor, kron: Kron, grid: Grid) -> Swept:
    """Round anti-diagonal after anti-diagonal, and push the errors of each to the whole weight by one dense product.

    Args:
        W: `[m, n]`, float32 or float64, on any device.
        kron: Hessian.
        grid: Fitted for W.

    Returns:
        Codes and loss.
    """
    m, n = W.shape
    unit = grid.unit
    N_A = kron.A.block_unit(unit)[0].to(W)
    N_B = torch.eye(m).to(W) if kron.B is None else kron.B.unit_as(W.dtype, W.device)
    target, columns = W.clone(), n // unit
    codes = torch.empty(m, columns, dtype=torch.int32, device=W.device)
    within = torch.arange(unit, device=W.device)
    for d in range(m + columns - 1):
        rows = torch.arange(max(0, d - columns + 1), min(m, d + 1), device=W.device)
        units = d - rows
        entries = units[:, None] * unit + within
        codes[rows, units], values = grid.nearest(target[rows[:, None], entries], rows, units)
        error = values - W[rows[:, None], entries]
        pushed = torch.einsum("ku,kun->kn", error, N_A.T[entries])
        target.addmm_(N_B[:, rows], pushed, alpha=-1)
    return finish(codes, W, kron, grid)


def _one(i: int, W: Tensor) -> Tensor:
    return torch.tensor([i], device=W.device)
