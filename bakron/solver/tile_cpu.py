"""The tile kernel for CPUs: exact two-sided rounding of a panel's rows over a few columns, compiled by numba.

Half-to-even rounding, division by the scale: the one definition of `bakron.grids`.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
def round_tile(
    W: np.ndarray,
    above: np.ndarray,
    left: np.ndarray,
    N_B: np.ndarray,
    N_A_T: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    group: int,
    low: int,
    high: int,
    two_sided: bool,
    first: int,
    last: int,
    E: np.ndarray,
    P: np.ndarray,
    codes: np.ndarray,
) -> None:
    """Round columns `first:last` of all rows of a panel, in place in `E`, `P` and `codes`.

    Args:
        W: Weight of the panel, `[h, n]`, as all `[h, n]` arrays C-contiguous and of one float dtype.
        above: Feedback of the rows above the panel, `[h, n]`.
        left: Feedback of the columns left of the tile, `[h, n]`.
        N_B: Unit factor of B within the panel, `[h, h]`.
        N_A_T: Transposed unit factor of A, `[n, n]`.
        scale: `[h, G]`.
        zero: `[h, G]`.
        group: Columns per scale.
        low: Smallest code.
        high: Largest code.
        two_sided: False skips the feedback between rows (B = I).
        first: First column of the tile.
        last: One past its last column.
        E: `V - W`, written.
        P: `E N_A^T`, written.
        codes: int32, written.
    """
    width = last - first
    target = np.empty(width, W.dtype)
    down = np.empty(width, W.dtype)  # feedback of all rows above
    for i in range(W.shape[0]):
        for j in range(width):
            down[j] = above[i, first + j]
        if two_sided:
            for k in range(i):
                b = N_B[i, k]
                for j in range(width):
                    down[j] += b * P[k, first + j]
        for j in range(width):
            target[j] = W[i, first + j] - down[j] - left[i, first + j]
        for j in range(width):
            column = first + j
            s = scale[i, column // group]
            z = zero[i, column // group]
            code = min(max(np.rint(target[j] / s) + z, low), high)
            value = (code - z) * s
            error = value - W[i, column]
            codes[i, column] = np.int32(code)
            E[i, column] = error
            P[i, column] = value - target[j] - down[j]
            for k in range(j + 1, width):
                target[k] -= error * N_A_T[column, first + k]
