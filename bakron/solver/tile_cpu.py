"""The CPU kernels: exact two-sided rounding of a panel's rows over a block of columns, and the products that feed it. Compiled by numba.

Matrices that are multiplied from the right are held in tile columns, `X_t[j, k, c] = X[k, TILE * j + c]`, so that the inner loop of a
product reads memory in order. One product kernel, `accumulate`, serves every feedback that crosses a tile; inside a tile of `LANES` rows
and `TILE` columns, entries of one anti-diagonal are independent and are rounded together, one row a lane.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from bakron.solver.vectors import LANES, add, clamp, div, fma, load, mul, rint, shift, splat, store, sub, where_above

TILE = 32  # columns a tile; a multiple of 2 * LANES
STEPS = TILE + LANES - 1  # anti-diagonals of a tile


@njit(nogil=True, cache=True, error_model="numpy")
def accumulate(C, row, height, A, a_row, a_col, depth, B, b_row):  # type: ignore[no-untyped-def]
    """`C[row : row + height] += A[a_row : a_row + height, a_col : a_col + depth] @ B[b_row : b_row + depth]`, C and B TILE wide.

    `height` is a multiple of 4. Four rows by two vectors of sums stay in registers.
    """
    for c in range(0, TILE, 2 * LANES):
        d = c + LANES
        for i in range(0, height, 4):
            r, s = row + i, a_row + i
            c00, c01, c10, c11 = load(C, r, c), load(C, r, d), load(C, r + 1, c), load(C, r + 1, d)
            c20, c21, c30, c31 = load(C, r + 2, c), load(C, r + 2, d), load(C, r + 3, c), load(C, r + 3, d)
            for k in range(depth):
                b0, b1 = load(B, b_row + k, c), load(B, b_row + k, d)
                a = splat(A[s, a_col + k])
                c00, c01 = fma(a, b0, c00), fma(a, b1, c01)
                a = splat(A[s + 1, a_col + k])
                c10, c11 = fma(a, b0, c10), fma(a, b1, c11)
                a = splat(A[s + 2, a_col + k])
                c20, c21 = fma(a, b0, c20), fma(a, b1, c21)
                a = splat(A[s + 3, a_col + k])
                c30, c31 = fma(a, b0, c30), fma(a, b1, c31)
            store(C, r, c, c00)
            store(C, r, d, c01)
            store(C, r + 1, c, c10)
            store(C, r + 1, d, c11)
            store(C, r + 2, c, c20)
            store(C, r + 2, d, c21)
            store(C, r + 3, c, c30)
            store(C, r + 3, d, c31)


@njit(nogil=True, cache=True, error_model="numpy")
def product(C, height, A, a_row, depth, B, b_tile, b_row, tiles):  # type: ignore[no-untyped-def]
    """`C[j, :height] = A[a_row : a_row + height, :depth] @ B[b_tile + j, b_row : b_row + depth]` for `tiles` tile columns j.

    A comes in slabs of columns, `[slabs, rows, columns a slab]`, so that neither factor's rows collide in the caches.
    """
    C[:tiles, :height] = 0
    for slab in range(-(-depth // A.shape[2])):
        k = slab * A.shape[2]
        for j in range(tiles):
            accumulate(C[j], 0, height, A[slab], a_row, 0, min(A.shape[2], depth - k), B[b_tile + j], b_row + k)


@njit(nogil=True, cache=True, error_model="numpy")
def pack_columns(N, pivots, tiles, skewed):  # type: ignore[no-untyped-def]
    """Lay the unit factor of A out for the kernels.

    Args:
        N: Unit lower triangular, `[n, n]` float64.
        pivots: `[n]` float64.
        tiles: Written: `N^T` in tile columns, `[ceil(n / TILE), n, TILE]`, as far as it lies left of the tile.
        skewed: Written: `[ceil(n / TILE), TILE, TILE + 2 * LANES]`, zeros before. For k > 0, row k of tile J holds `N[j, j - k]` at
            TILE + LANES - 2 - j (j counted within the tile), so that the lanes of an anti-diagonal, whose columns fall by one from lane to
            lane, load in order; it stays 0 where j - k lies outside the tile. Row 0 holds the pivots.
    """
    for J in range(tiles.shape[0]):
        start = J * TILE
        width = min(TILE, N.shape[0] - start)
        for k in range(start):
            for j in range(width):
                tiles[J, k, j] = N[start + j, k]
            for j in range(width, TILE):
                tiles[J, k, j] = 0
        for j in range(width):
            skewed[J, 0, TILE + LANES - 2 - j] = pivots[start + j]
            for k in range(1, j + 1):
                skewed[J, k, TILE + LANES - 2 - j] = N[start + j, start + j - k]


@njit(nogil=True, cache=True, error_model="numpy")
def _nearest(t, s, z, low, high, levels, thresholds):  # type: ignore[no-untyped-def]
    """Code and value of the grid point nearest to each lane of t; without levels the grid is uniform."""
    x = div(t, s)
    if levels.size == 0:
        code = clamp(add(rint(x), z), low, high)
        return code, mul(sub(code, z), s)
    code, value = sub(x, x), splat(levels[0])
    for k in range(thresholds.size):
        threshold = splat(thresholds[k])
        code = where_above(x, threshold, splat(levels.dtype.type(k + 1)), code)
        value = where_above(x, threshold, splat(levels[k + 1]), value)
    return code, mul(value, s)


@njit(nogil=True, cache=True, error_model="numpy")
def _sweep_tile(near, skewed, S, low, high, levels, thresholds, one_scale, two_sided):  # type: ignore[no-untyped-def]  # noqa: D417
    """Round one tile, anti-diagonal by anti-diagonal; entry (i, j) is lane i of anti-diagonal i + j.

    Args:
        near: `near[k, i] = N_B[i, i - k]` of the tile's rows, `[LANES, LANES]`; 0 where i < k.
        skewed: The tile's rows of `pack_columns`' skewed.
        S: Skewed in- and outputs, `[9, STEPS + 1, 2 * LANES]`: weight, target without the feedback of this tile, feedback of the columns
            left of it, scale, zero; error, `E N_A^T` (in the upper lanes; the lower ones are zeros), code, and in row 0 the sum of
            `d^A_j r_ij^2`. The last row of the error and of `E N_A^T` is zeros.
        low, high: Code range.
        levels, thresholds: Of a codebook, or empty.
        one_scale: Scale and zero are those of step 0 all along.
        two_sided: False skips the feedback between rows.
    """
    W, X, left_of, scale, zero, E, P, code, loss = S[0], S[1], S[2], S[3], S[4], S[5], S[6], S[7], S[8]
    vlow, vhigh = splat(low), splat(high)
    s, z = load(scale, 0, 0), load(zero, 0, 0)
    e = sub(s, s)
    p, total = e, e
    for d in range(STEPS):
        x = TILE + LANES - 2 - d
        left, left2 = sub(s, s), sub(s, s)
        up, up2 = left, left
        for k in range(2, min(d + 1, TILE), 2):  # in pairs, to keep two sums in flight
            left = fma(load(E, d - k, 0), load(skewed, k, x), left)
            left2 = fma(load(E, d - k - 1 if k < d else STEPS, 0), load(skewed, k + 1, x), left2)
        if two_sided:
            for k in range(2, min(d + 1, LANES), 2):
                up = fma(load(P, d - k, LANES - k), load(near, k, 0), up)
                up2 = fma(load(P, d - k - 1 if k < d else STEPS, LANES - k - 1), load(near, k + 1, 0), up2)
            up = fma(shift(p), load(near, 1, 0), add(up, up2))
        left = fma(e, load(skewed, 1, x), add(left, left2))
        t = sub(sub(load(X, d, 0), up), left)
        if not one_scale:
            s, z = load(scale, d, 0), load(zero, d, 0)
        q, v = _nearest(t, s, z, vlow, vhigh, levels, thresholds)
        e = sub(v, load(W, d, 0))
        p = add(e, add(left, load(left_of, d, 0)))
        r = sub(v, t)
        total = fma(mul(r, r), load(skewed, 0, x), total)
        store(E, d, 0, e)
        store(P, d, LANES, p)
        store(code, d, 0, q)
    store(loss, 0, 0, total)


@njit(nogil=True, cache=True, error_model="numpy")
def _skew(S, W, F, L, r, rows, width):  # type: ignore[no-untyped-def]
    """Lay a tile's weights, and its targets as far as they are known, along its anti-diagonals."""
    for i in range(rows):
        for c in range(width):
            w, left = W[r + i, c], L[r + i, c]
            S[0, i + c, i], S[1, i + c, i], S[2, i + c, i] = w, w - F[r + i, c] - left, left


@njit(nogil=True, cache=True, error_model="numpy")
def _unskew(S, E, P, codes, r, column, at, two_sided):  # type: ignore[no-untyped-def]
    """Lay a tile's results out in rows again."""
    for i in range(LANES):
        for c in range(TILE):
            E[r + i, column + c] = S[5, i + c, i]
            codes[r + i, c] = np.int32(S[7, i + c, i])
        if two_sided:
            for c in range(TILE):
                P[at + r + i, c] = S[6, i + c, LANES + i]


@njit(nogil=True, cache=True, error_model="numpy")
def _nearby(N_B, top, height, two_sided):  # type: ignore[no-untyped-def]
    """`near[s, k, i] = N_B[i, i - k]` of each strip s of LANES rows of a panel; `N_B[i, k]` with i a row of W, k a column of the panel."""
    near = np.zeros((-(-height // LANES), LANES, LANES), N_B.dtype)
    if two_sided:
        for i in range(height):
            for k in range(1, i % LANES + 1):
                near[i // LANES, k, i % LANES] = N_B[top + i, i - k]
    return near


@njit(nogil=True, cache=True, error_model="numpy")
def round_block(W, panel, E, P, F, L, work, N_B, tiles, skewed, block, grid, two_sided, codes, losses):  # type: ignore[no-untyped-def]  # noqa: D417
    """Round a block of tile columns of a panel of rows. All floating arrays are of one dtype.

    Args:
        W: Weight, `[m, n]`.
        panel: `(top, height, at)`: the panel's first row in W, its rows, and its first row in P, which pads panels to multiples of LANES.
        E: `V - W` of the panel in this block, `[rows, columns a block]`; written.
        P: `E N_A^T` of all rows, in tile columns `[.., rows, TILE]`; written.
        F: Feedback of the rows above the panel, `[tiles a block, rows, TILE]`; used up.
        L: Feedback of the columns left of the block, alike; used up.
        work: Scratch for weights and codes, `(floats, int32)` of F's shape.
        N_B: Unit factor of B, the slab of columns that belongs to the panel's rows, `[m + LANES, panel]`.
        tiles, skewed: From `pack_columns`.
        block: `(first, count)`: tile columns.
        grid: `(scale, zero, group_of, low, high, levels, thresholds)`: scale and zero `[m, G]`, group_of `[n]` the scale of each column.
        two_sided: False skips the feedback between rows (B = I).
        codes: `[m, n]` int32; written.
        losses: `[m]` float64; the row's `sum_j d^A_j r_ij^2` is added.
    """
    top, height, at = panel
    first, count = block
    scale, zero, group_of, low, high, levels, thresholds = grid
    weights, found = work
    start, stop = first * TILE, min((first + count) * TILE, W.shape[1])
    padded = -(-height // LANES) * LANES
    near = _nearby(N_B, top, height, two_sided)
    S = np.zeros((9, STEPS + 1, 2 * LANES), W.dtype)
    S[3] = 1
    for i in range(height):
        for c in range(start, stop):
            weights[(c - start) // TILE, i, (c - start) % TILE] = W[top + i, c]
    for j in range(count):
        J, column = first + j, start + j * TILE
        width = min(TILE, W.shape[1] - column)
        accumulate(L[j], 0, padded, E, 0, 0, j * TILE, tiles[J], start)
        one_scale = True
        for c in range(1, width):
            one_scale = one_scale and group_of[column + c] == group_of[column]
        for r in range(0, padded, LANES):
            rows = min(LANES, height - r)
            if two_sided and r:
                accumulate(F[j], r, LANES, N_B, top + r, 0, r, P[J], at)
            _skew(S, weights[j], F[j], L[j], r, rows, width)
            for i in range(rows):
                for c in range(1 if one_scale else width):
                    place = 0 if one_scale else i + c
                    S[3, place, i] = scale[top + r + i, group_of[column + c]]
                    S[4, place, i] = zero[top + r + i, group_of[column + c]]
            _sweep_tile(near[r // LANES], skewed[J], S, low, high, levels, thresholds, one_scale, two_sided)
            _unskew(S, E, P[J], found[j], r, j * TILE, at, two_sided)
            for i in range(rows):
                losses[top + r + i] += S[8, 0, i]
    for i in range(height):
        for c in range(start, stop):
            codes[top + i, c] = found[(c - start) // TILE, i, (c - start) % TILE]
