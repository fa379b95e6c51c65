"""The CPU kernel of `polish`: coordinate descent over the entries of a tile. Compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy")
def polish_tile(V, G, B, A, scale, zero, group_of, low, high, levels, thresholds, codes, change):  # type: ignore[no-untyped-def]  # noqa: D417
    """Move each entry of a tile to its best value while all others stay, one after the other, row by row.

    Args:
        V: Values, `[h, w]`; updated.
        G: Gradient over two, `B E A` at the tile, `[h, w]`; kept up to date within it.
        B: The tile's rows of B, `[h, h]`.
        A: The tile's columns of A, `[w, w]`.
        scale, zero: `[h, G]`.
        group_of: Scale of each column, `[w]`.
        low, high, levels, thresholds: The grid; no levels: uniform.
        codes: `[h, w]` int32; updated.
        change: What was added to V, `[h, w]`; written.
    """
    for i in range(V.shape[0]):
        for j in range(V.shape[1]):
            change[i, j] = 0
            curvature = B[i, i] * A[j, j]
            if not curvature > 0:
                continue
            s, z = scale[i, group_of[j]], zero[i, group_of[j]]
            x = (V[i, j] - G[i, j] / curvature) / s
            if levels.size == 0:
                code = min(max(np.rint(x) + z, low), high)
                value = (code - z) * s
            else:
                number = np.searchsorted(thresholds, x)
                code, value = low + number, levels[number] * s
            step = value - V[i, j]
            if step == 0:
                continue
            V[i, j], codes[i, j], change[i, j] = value, np.int32(code), step
            for r in range(V.shape[0]):
                b = B[r, i] * step
                for c in range(V.shape[1]):
                    G[r, c] += b * A[j, c]
