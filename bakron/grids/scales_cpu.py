"""The CPU kernel of the scale fits of uniform grids without zero points. Compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})  # so that sums become vectors
def keep_best(W, weights, unit, candidates, low, high, best, scale):  # type: ignore[no-untyped-def]  # noqa: D417
    """Take, group by group, the first of the candidate scales whose weighted squared error is below the best so far.

    Args:
        W: Weights, `[m, G, g]` float32.
        weights: Of squared errors, `[1 or m, 1 or G, 1 or g]`.
        unit: In which errors are measured, `[m, G]`.
        candidates: `[K, m, G]`, positive.
        low, high: Range of the codes.
        best: Least error so far, `[m, G]`; updated.
        scale: Its scale, `[m, G]`; updated.
    """
    rows, groups, size = W.shape
    w, weight = np.empty(size, W.dtype), np.empty(size, W.dtype)
    for i in range(rows):
        for g in range(groups):
            w[:] = W[i, g] / unit[i, g]  # in units, so that squares of tiny weights do not vanish
            weight[:] = weights[i % weights.shape[0], g % weights.shape[1]]
            for k in range(candidates.shape[0]):
                s = candidates[k, i, g] / unit[i, g]
                inverse = np.float32(1) / s
                error = np.float32(0)
                for j in range(size):
                    x = w[j] * inverse
                    x = x if x < high else high  # written so that the loop becomes vector instructions
                    x = x if x > low else low
                    residual = np.rint(x) * s - w[j]
                    error += weight[j] * (residual * residual)
                if error < best[i, g]:
                    best[i, g], scale[i, g] = error, candidates[k, i, g]
