"""The paper's schedules: divide and conquer over anti-diagonals, in batched torch, for any grid and any device.

Entry (i, j) lies on anti-diagonal i + j (j counts units of the grid) and only needs what lies above and left of it. To round the anti-diagonals
`[lo, hi)`: round the first half, propagate its errors to the second half, round that (Birnick and Saab 2026, section 4). `bakron` rounds bands of
`LEAF` anti-diagonals with a running `R = E N_A^T`, an anti-diagonal at a time; `recursive` goes down to single anti-diagonals and rounds one
entry after the other.

Propagation is local: an error in a band of w anti-diagonals reaches at most w rows and columns far within it. The weight is kept with its columns
reversed, so that anti-diagonals become diagonals and a band falls into tiles that one strided view holds as a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.grids import Grid
from bakron.kron import Kron
from bakron.solver.schedule import Swept, finish

LEAF = 16  # anti-diagonals that `bakron` rounds between two propagations


def bakron(W: Tensor, kron: Kron, grid: Grid, *, leaf: int = LEAF) -> Swept:
    """Round anti-diagonals in parallel, propagating by recursive halving: O(mn(m + n)) work in m + n - 1 steps.

    Args:
        W: `[m, n]`, float32 or float64, on any device.
        kron: Hessian.
        grid: Fitted for W.
        leaf: Anti-diagonals rounded between two propagations; the result does not depend on it.

    Returns:
        Codes and loss.
    """
    return _Bands(W, kron, grid, leaf).solve()


def recursive(W: Tensor, kron: Kron, grid: Grid) -> Swept:
    """Divide and conquer down to single anti-diagonals, rounded one entry at a time: O(mn(m + n)) work, mn steps."""
    return _Bands(W, kron, grid, 1, one_by_one=True).solve()


class _Bands:
    """One sweep: targets and errors in reversed columns, padded so that every tile of a band lies inside.

    Attributes:
        T: Targets as far as feedback has reached them, `[m + pad, (pad + columns + pad) * unit]`.
        E: Errors, alike; zeros where nothing is rounded yet.
    """

    def __init__(self, W: Tensor, kron: Kron, grid: Grid, leaf: int, one_by_one: bool = False) -> None:
        self.W, self.kron, self.grid, self.leaf, self.one_by_one = W, kron, grid, leaf, one_by_one
        m, n = W.shape
        self.u = u = grid.unit
        self.m, self.columns = m, n // u
        self.widest = max(leaf, max(m, self.columns) // 2)  # wider bands are propagated by dense products
        self.pad = pad = 2 * self.widest + 1
        N_A = kron.A.block_unit(u)[0].to(W)
        N_B = torch.eye(m).to(W) if kron.B is None else kron.B.unit_as(W.dtype, W.device)
        self.N_A = torch.nn.functional.pad(N_A.flip(0, 1), (pad * u,) * 4)
        self.N_B = torch.nn.functional.pad(N_B, (0, pad, 0, pad))
        self.T = torch.nn.functional.pad(W.flip(1), (pad * u, pad * u, 0, pad))
        self.weight, self.E = self.T.clone(), torch.zeros_like(self.T)
        self.codes = torch.empty(m, self.columns, dtype=torch.int32, device=W.device)
        self.near_A, self.near_B = self._diagonals()

    def solve(self) -> Swept:
        self._band(0, self.m + self.columns - 1)
        return finish(self.codes, self.W, self.kron, self.grid)

    def _band(self, lo: int, hi: int) -> None:
        if hi - lo <= self.leaf:
            self._round(lo, hi)
            return
        middle = (lo + hi) // 2
        self._band(lo, middle)
        if hi - lo > self.widest:
            self._propagate_dense(lo, middle, hi)
        else:
            self._propagate_tiles(lo, middle, hi)
        self._band(middle, hi)

    def _diagonals(self) -> tuple[Tensor, Tensor]:
        """Near the diagonals: `near_A[b, J]` = block (j + b, j) of N_A for reversed unit J, `near_B[a, i]` = N_B[i, i - a]; a, b < leaf."""
        u, pad, columns, leaf = self.u, self.pad, self.columns, self.leaf
        near_A = self.W.new_zeros(leaf, columns, u, u)
        near_B = self.W.new_zeros(leaf, self.m)
        for k in range(min(leaf, max(columns, self.m))):
            near_B[k, k:] = self.N_B.diagonal(-k)[: max(0, self.m - k)] if k < self.m else 0
            if k < columns:  # reversed: block (J - k, J)
                start = pad * u
                for J in range(k, columns):
                    at, to = start + J * u, start + (J - k) * u
                    near_A[k, J] = self.N_A[to : to + u, at : at + u]
        return near_A, near_B

    def _diagonal(self, X: Tensor, d: int) -> tuple[Tensor, int, int]:
        """Anti-diagonal d of a padded array as a view `[rows, unit]`, with its first row and the one after its last."""
        first, last = max(0, d - self.columns + 1), min(self.m, d + 1)
        ld = X.stride(0)
        offset = first * ld + (self.pad + first + self.columns - 1 - d) * self.u
        return X.as_strided((last - first, self.u), (ld + self.u, 1), offset), first, last

    def _round(self, lo: int, hi: int) -> None:
        """Round a narrow band; R holds `E N_A^T` of it, `R[q, leaf + i]` at row i of anti-diagonal lo + q."""
        height = self.leaf + self.m
        R = self.W.new_zeros(hi - lo, height, self.u)
        for d in range(lo, hi):
            q = d - lo
            target, first, last = self._diagonal(self.T, d)
            rows = torch.arange(first, last, device=self.W.device)
            t = target - R[q, self.leaf + first : self.leaf + last]
            if q:  # rows a = q..1 above, each on the anti-diagonal a before
                above = R.as_strided((q, last - first, self.u), ((height + 1) * self.u, self.u, 1), (self.leaf + first - q) * self.u)
                t = t - (self.near_B[1 : q + 1, first:last].flip(0)[..., None] * above).sum(0)
            weight, _, _ = self._diagonal(self.weight, d)
            step = 1 if self.one_by_one else max(1, len(rows))
            for part in torch.split(torch.arange(len(rows), device=self.W.device), step):
                codes, values = self.grid.nearest(t[part].flip(1), rows[part], d - rows[part])
                self.codes[rows[part], d - rows[part]] = codes
                t[part] = values.flip(1) - weight[part]
            self._diagonal(self.E, d)[0].copy_(t)
            reversed_units = slice(first + self.columns - 1 - d, last + self.columns - 1 - d)
            near = self.near_A[: hi - d, reversed_units]
            R[q:, self.leaf + first : self.leaf + last] += (near * t[:, None, :]).sum(-1)

    def _propagate_dense(self, lo: int, middle: int, hi: int) -> None:
        """Take the feedback of `[lo, middle)` from all targets of `[middle, hi)` by two dense products."""
        u, own = self.u, slice(self.pad * self.u, (self.pad + self.columns) * self.u)
        number = torch.arange(self.m, device=self.W.device)[:, None] + torch.arange(self.columns - 1, -1, -1, device=self.W.device)
        number = number.repeat_interleave(u, 1)
        E = self.E[: self.m, own] * ((number >= lo) & (number < middle))
        P = self.N_B[: self.m, : self.m] @ (E @ self.N_A[own, own].T)
        self.T[: self.m, own] -= P * ((number >= middle) & (number < hi))

    def _propagate_tiles(self, lo: int, middle: int, hi: int) -> None:
        """The same for a narrow band, tile by tile.

        Tile k holds rows `[k b, (k + 1) b)` and the reversed units from `k b + columns - hi` on: going down b rows, a band moves b units.
        Within a tile, row r and unit c lie on anti-diagonal `r + hi - 1 - c`.
        """
        u, width = self.u, hi - lo
        b = width // 2
        first = max(0, (lo - self.columns + 1) // b)
        last = min(-(-self.m // b), -(-hi // b))
        if first >= last:
            return
        across, reach = width + b - 1, hi - middle + b - 1  # units of a tile: of the band, of its second half
        r, c = torch.arange(b, device=self.W.device)[:, None], torch.arange(across, device=self.W.device)
        number = (r + hi - 1 - c).repeat_interleave(u, 1)
        place = (self.pad + first * b + self.columns - hi) * u  # of the first tile's first unit
        ld, ld_A = self.E.stride(0), self.N_A.stride(0)
        count = last - first
        tiles = (count, b, across * u), (b * (ld + u), ld, 1), first * b * ld + place
        R = self.E.as_strided(*tiles) * ((number >= lo) & (number < middle))
        corner = (count, across * u, across * u), (b * u * (ld_A + 1), ld_A, 1), place * (ld_A + 1)
        R = R @ self.N_A.as_strided(*corner).mT
        P = R.new_zeros(count, b, reach * u)
        for s in range(min(count, (width - 2) // b + 2)):  # rows s tiles further up, where the same units stand s * b further right
            ld_B = self.N_B.stride(0)
            offset = (first + s) * b * ld_B + first * b
            N_B = self.N_B.as_strided((count - s, b, b), (b * (ld_B + 1), ld_B, 1), offset)
            shifted = R[: count - s, :, s * b * u : (s * b + reach) * u]
            P[s:, :, : shifted.shape[2]] += N_B @ shifted
        P *= number[:, : reach * u] < hi
        self.T.as_strided((count, b, reach * u), tiles[1], tiles[2]).sub_(P)
