"""The production schedule on a CPU: every far update is a matrix product, rounding happens in small tiles in a compiled kernel.

Rows go in panels, top to bottom. With `P = E N_A^T` kept for all finished rows, the feedback they give to panel I is one product,
`N_B[I, <I] P[<I, :]`. Inside the panel columns go in blocks, left to right; the feedback of earlier columns of the same rows is one
product a block,
`E[I, <J] N_A[J, <J]^T`, and a narrow one a tile within the block. Each product covers exactly the finished triangle, so the work is mn(m +
n) flops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.errors import MethodError
from bakron.grids import UniformGrid
from bakron.kron import Kron

PANEL, BLOCK, TILE = 64, 256, 32  # rows a panel, columns a block, columns a tile; the result does not depend on them


def sweep(W: Tensor, kron: Kron, grid: UniformGrid, *, panel: int = PANEL, block: int = BLOCK, tile: int = TILE) -> Tensor:
    """Round W in panels, blocks and tiles.

    Args:
        W: `[m, n]`, float32 or float64, contiguous, on the CPU.
        kron: Hessian.
        grid: Fitted for W.
        panel: Rows rounded between two products with N_B.
        block: Columns rounded between two products with N_A.
        tile: Columns a kernel call rounds.

    Returns:
        Codes `[m, n]` int32.

    Raises:
        MethodError: W is not on the CPU.
    """
    from bakron.solver.tile_cpu import round_tile  # numba takes a second to import

    if W.device.type != "cpu":
        raise MethodError(f"method 'tiled' on device {W.device}", "a weight on the CPU", "Move the weight to the CPU")
    m, n = W.shape
    N_A_T = kron.A.unit_as(W.dtype, W.device).T.contiguous()
    N_B = None if kron.B is None else kron.B.unit_as(W.dtype, W.device)
    scale = grid.scale.to(W.dtype).contiguous()
    zero = torch.zeros_like(scale) if grid.zero is None else grid.zero.to(W.dtype)
    E, codes = torch.empty_like(W), torch.empty(m, n, dtype=torch.int32)
    P = torch.empty_like(W) if N_B is not None else torch.empty(panel, n, dtype=W.dtype)
    within = torch.eye(panel, dtype=W.dtype)  # N_B[I, I]
    for top in range(0, m, panel):
        rows = slice(top, min(top + panel, m))
        height = rows.stop - top
        above = torch.zeros(height, n, dtype=W.dtype)
        if N_B is not None:
            within = N_B[rows, rows].contiguous()
            if top:
                torch.mm(N_B[rows, :top], P[:top], out=above)
        P_rows = P[rows] if N_B is not None else P[:height]
        left = torch.zeros(height, n, dtype=W.dtype)
        for start in range(0, n, block):
            stop = min(start + block, n)
            if start:
                left[:, start:stop] = E[rows, :start] @ N_A_T[:start, start:stop]
            for first in range(start, stop, tile):
                last = min(first + tile, stop)
                round_tile(
                    W[rows].numpy(), above.numpy(), left.numpy(), within.numpy(), N_A_T.numpy(), scale[rows].numpy(), zero[rows].numpy(),
                    n // scale.shape[1], grid.low, grid.high, N_B is not None, first, last, E[rows].numpy(), P_rows.numpy(),
                    codes[rows].numpy(),
                )  # fmt: skip
                if last < stop:
                    left[:, last:stop].addmm_(E[rows, first:last], N_A_T[first:last, last:stop])
    return codes
