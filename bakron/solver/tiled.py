"""The production schedule on a CPU: panels of rows, pipelined over threads; inside a panel, blocks and tiles of columns.

With `P = E N_A^T` kept for all finished rows, the feedback they give to panel I is one product, `N_B[I, <I] P[<I, :]`; the feedback of
the finished columns of the panel's own rows is another, `E[I, <J] N_A[J, <J]^T`. Each covers exactly the finished triangle, so the work is
mn(m + n) flops, all of it in one product kernel, and rounding happens in small tiles (`tile_cpu`). Panel I may round block J as soon as
panel I - 1 has: threads take panels in turn and follow each other at a distance of one block.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bakron.errors import MethodError
from bakron.grids import Grid, ScalarGrid, UniformGrid
from bakron.kron import Factor, Kron
from bakron.solver.schedule import Swept

PANEL, BLOCK = 256, 256  # at most this many rows a panel, columns a block; the result does not depend on them


class Panel(NamedTuple):
    """Rows that are rounded together: `top : top + height` of W, from `at` on in P, from `local` on within their head."""

    top: int
    height: int
    at: int
    local: int


def sweep(W: Tensor, kron: Kron, grid: Grid, *, panel: int | None = None, block: int = BLOCK, threads: int | None = None) -> Swept:
    """Round W in panels, blocks and tiles.

    Args:
        W: `[m, n]`, float32 or float64, contiguous, on the CPU.
        kron: Hessian.
        grid: Fitted for W.
        panel: Rows rounded between two products with N_B; rounded up to a multiple of the vector length.
        block: Columns rounded between two products with N_A; rounded up to a multiple of the tile.
        threads: Panels rounded at once; default: as many threads as torch uses.

    Returns:
        Codes `[m, n]` int32 and the loss.

    Raises:
        MethodError: W is not on the CPU, or the grid is not scalar.
    """
    from bakron.solver.tile_cpu import TILE  # numba takes a second to import
    from bakron.solver.vectors import LANES

    if W.device.type != "cpu":
        raise MethodError(f"method 'tiled' on device {W.device}", "a weight on the CPU", "Use method 'bakron' there")
    if not isinstance(grid, ScalarGrid):
        raise MethodError(f"method 'tiled' on a {type(grid).__name__}", "a scalar grid", "Use method 'bakron' or 'antidiagonal'")
    m = W.shape[0]
    threads = threads or torch.get_num_threads()
    head = m if kron.B is None else kron.B.heads[0].size
    if panel is None:  # short weights: enough panels to keep every thread busy while the first and last wait
        panel = min(PANEL, max(2 * LANES, -(-m // (4 * threads))))
    panels = _panels(m, head, -(-panel // LANES) * LANES, LANES)
    work = _Work(W, kron, grid, panels, -(-block // TILE), TILE, LANES)
    work.run(min(threads, len(panels)))
    losses = torch.from_numpy(work.losses)
    return Swept(torch.from_numpy(work.codes), float(losses.sum() if kron.B is None else losses @ kron.B.pivots))


@cache
def ready(dtype: torch.dtype) -> None:
    """Import and compile the kernels for a dtype, once a process, so that no sweep's time holds it."""
    one = torch.ones(1, 1)
    sweep(one.to(dtype), Kron(one, one), UniformGrid(one, None, -1, 1), threads=1)


def _panels(m: int, head: int, panel: int, lanes: int) -> list[Panel]:
    panels, at = [], 0
    for start in range(0, m, head):
        for local in range(0, head, panel):
            height = min(panel, head - local)
            panels.append(Panel(start + local, height, at, local))
            at += -(-height // lanes) * lanes
    return panels


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Fresh memory. From numpy, which asks for huge pages: with small ones, first touches would take a tenth of the sweep."""
    return np.empty(shape, dtype)


def _numpy(dtype: torch.dtype) -> Any:
    return {torch.float32: np.float32, torch.float64: np.float64}[dtype]


def _pack_columns(factor: Factor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The unit factor of A as the kernels want it; see `tile_cpu.pack_columns`."""
    from bakron.solver.tile_cpu import TILE, pack_columns
    from bakron.solver.vectors import LANES

    count = -(-factor.size // TILE)
    tiles = empty((count, factor.size, TILE), _numpy(dtype))
    skewed = np.zeros((count, TILE, TILE + 2 * LANES), _numpy(dtype))
    pack_columns(factor.unit.cpu().numpy(), factor.pivots.cpu().numpy(), tiles, skewed)
    return tiles, skewed


def _pack_rows(factor: Factor, dtype: torch.dtype, panel: int) -> np.ndarray:
    """The unit factor of B, head under head, in slabs of `panel` columns, with a vector's worth of zero rows below for the last panel to run over."""
    from bakron.solver.vectors import LANES

    head = factor.heads[0].size
    slabs = empty((-(-head // panel), factor.size + LANES, panel), _numpy(dtype))
    for number, block in enumerate(factor.heads):
        unit = block.unit.cpu().numpy()
        for slab, first in zip(slabs, range(0, head, panel)):  # above the diagonal nothing is read
            columns = unit[first:, first : first + panel]
            slab[number * head + first : (number + 1) * head, : columns.shape[1]] = columns
    slabs[:, -LANES:] = 0
    return slabs


@dataclass
class _Scratch:
    """One thread's scratch memory."""

    E: np.ndarray
    F: np.ndarray
    L: np.ndarray
    work: tuple[np.ndarray, np.ndarray]


class _Work:
    """The arrays of one sweep, and how far each panel has come."""

    def __init__(self, W: Tensor, kron: Kron, grid: ScalarGrid, panels: list[Panel], per_block: int, tile: int, lanes: int) -> None:
        m, n = W.shape
        self.W, self.panels, self.per_block, self.tile = W.numpy(), panels, per_block, tile
        self.count = -(-n // tile)  # tile columns
        self.two_sided = kron.B is not None
        self.tiles, self.skewed = kron.A.memo(("columns", W.dtype), lambda: _pack_columns(kron.A, W.dtype))
        self.tallest = max(-(-p.height // lanes) * lanes for p in panels)
        self.N_B = np.zeros((1, 0, 0), self.W.dtype)
        if kron.B is not None:
            B, tallest = kron.B, self.tallest
            self.N_B = B.memo(("rows", W.dtype, tallest), lambda: _pack_rows(B, W.dtype, tallest))
        self.P = empty((self.count, panels[-1].at + self.tallest if self.two_sided else 0, tile), self.W.dtype)
        self.codes = empty((m, n), np.int32)
        self.losses = np.zeros(m)
        self.grid = kernel_grid(grid, n, W.dtype)
        self.done = [0] * len(panels)
        self.turn, self.step, self.failed = itertools.count(), threading.Condition(), False

    def run(self, threads: int) -> None:
        if threads == 1:
            self._follow()
            return
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(self._follow) for _ in range(threads - 1)]
            self._follow()
        for other in others:
            other.result()

    def _scratch(self) -> _Scratch:
        per_block = min(self.per_block, self.count)
        shape, dtype = (per_block, self.tallest, self.tile), self.W.dtype
        E = empty((-(-self.count // per_block), self.tallest, per_block * self.tile), dtype)
        return _Scratch(E, empty(shape, dtype), empty(shape, dtype), (empty(shape, dtype), empty(shape, np.int32)))

    def _follow(self) -> None:
        """Take the next panel in turn, until there is none."""
        try:
            scratch = self._scratch()
            while (index := next(self.turn)) < len(self.panels) and not self.failed:
                self._panel(index, scratch)
        except BaseException:
            with self.step:
                self.failed = True
                self.step.notify_all()
            raise

    def _panel(self, index: int, scratch: _Scratch) -> None:
        from bakron.solver.tile_cpu import product, round_block

        panel = self.panels[index]
        above = panel.local if self.two_sided else 0  # rows
        padded = -(-panel.height // 4) * 4  # the product kernel takes four rows at a time
        own = self.N_B[panel.local // self.tallest if self.two_sided else 0]
        E, F, L = scratch.E, scratch.F, scratch.L
        for number, first in enumerate(range(0, self.count, self.per_block)):
            if above:
                with self.step:
                    self.step.wait_for(lambda: self.failed or self.done[index - 1] > number)  # noqa: B023
            if self.failed:
                return
            count = min(self.per_block, self.count - first)
            product(F, padded, self.N_B, panel.top, above, self.P, first, panel.at - above, count)
            product(L, padded, E, 0, first * self.tile, self.tiles, first, 0, count)
            round_block(
                self.W, (panel.top, panel.height, panel.at), E[number], self.P, F, L, scratch.work, own, self.tiles, self.skewed,
                (first, count), self.grid, self.two_sided, self.codes, self.losses,
            )  # fmt: skip
            with self.step:
                self.done[index] = number + 1
                self.step.notify_all()


def kernel_grid(grid: ScalarGrid, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The grid as plain arrays and numbers of the sweep's dtype; see `tile_cpu.round_block`."""
    number = _numpy(dtype)
    scale = grid.scale.to(dtype).contiguous()
    zero = torch.zeros_like(scale) if grid.zero is None else grid.zero.to(dtype).contiguous()
    levels = thresholds = np.zeros(0, number)
    if grid.table is not None:
        levels, thresholds = grid.table.to(dtype).cpu().numpy(), grid.thresholds(dtype).cpu().numpy()
    return scale.numpy(), zero.numpy(), grid.groups(n).numpy(), number(grid.low), number(grid.high), levels, thresholds
