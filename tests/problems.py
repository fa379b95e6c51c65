"""One factory of rounding problems, shared by tests and benchmarks: seeded, and named by what is special about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bakron.grids import CodebookGrid, E8Grid, Grid, OffsetGrid, UniformGrid
from bakron.kron import Kron


@dataclass(frozen=True)
class Problem:
    """A weight, its Hessian and a grid."""

    W: Tensor
    kron: Kron
    grid: UniformGrid


def spd(
    size: int, generator: torch.Generator, *, decay: float = 1.0, tokens: int | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A covariance with a power-law spectrum in a random basis, as activations have: `[size, size]`, mean diagonal about 1."""
    tokens = tokens or 4 * size + 8
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    spectrum = torch.arange(1, size + 1, dtype=torch.float64) ** (-decay / 2)
    X = torch.randn(tokens, size, generator=generator, dtype=torch.float64) * spectrum @ basis.T
    return ((X.T @ X) / X.square().sum(-1).mean() * size / tokens * 1.0 + 1e-3 * torch.eye(size, dtype=torch.float64)).to(dtype)


def problem(
    m: int,
    n: int,
    *,
    seed: int = 0,
    levels: int = 7,
    group_size: int | None = None,
    symmetric: bool = True,
    clipped: bool = True,
    b: str = "dense",
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """A random problem.

    Args:
        m: Rows.
        n: Columns.
        seed: Of all its randomness.
        levels: Of the grid.
        group_size: Of the grid.
        symmetric: Grid without zero points.
        clipped: False widens the scale until no target leaves the code range (levels is then 255).
        b: "dense", "identity" or "diagonal".
        dtype: Of W.
    """
    g = torch.Generator().manual_seed(seed * 7919 + m * 101 + n)
    W = torch.randn(m, n, generator=g, dtype=torch.float64).to(dtype)
    A = spd(n, g)
    B = {
        "dense": lambda: spd(m, g),
        "identity": lambda: None,
        "diagonal": lambda: torch.diag(torch.rand(m, generator=g, dtype=torch.float64) + 0.1),
    }[b]()
    if clipped:
        grid = UniformGrid.fit(W, levels, group_size, "mse", symmetric)
    else:
        groups = 1 if group_size is None else n // group_size
        step = 0.25 + 0.5 * torch.rand(m, groups, generator=g, dtype=torch.float64)
        zero = None if symmetric else torch.randint(100, 150, (m, groups), generator=g, dtype=torch.int32)
        low, high = (-(2**20), 2**20)
        grid = UniformGrid(step.to(torch.float32), zero, low, high, group_size)
    return Problem(W, Kron(A, B), grid)


# Shapes with one row, one column, primes and non-multiples of every tile; every kind of grid and of B.
CASES: dict[str, dict[str, Any]] = {
    "square": {"m": 16, "n": 16},
    "wide": {"m": 5, "n": 40},
    "tall": {"m": 37, "n": 6},
    "prime": {"m": 23, "n": 31, "seed": 1},
    "one-row": {"m": 1, "n": 17},
    "one-column": {"m": 19, "n": 1},
    "one-entry": {"m": 1, "n": 1},
    "unclipped": {"m": 13, "n": 22, "clipped": False},
    "grouped": {"m": 11, "n": 36, "group_size": 12},
    "grouped-narrow": {"m": 9, "n": 24, "group_size": 3, "seed": 2},
    "asymmetric": {"m": 14, "n": 18, "symmetric": False, "levels": 4},
    "asymmetric-grouped": {"m": 10, "n": 33, "group_size": 11, "symmetric": False, "levels": 8},
    "asymmetric-unclipped": {"m": 7, "n": 20, "group_size": 5, "symmetric": False, "clipped": False},
    "two-levels": {"m": 12, "n": 15, "levels": 2},
    "identity": {"m": 12, "n": 29, "b": "identity"},
    "identity-grouped": {"m": 8, "n": 32, "group_size": 8, "b": "identity", "symmetric": False, "levels": 16},
    "diagonal": {"m": 15, "n": 26, "b": "diagonal"},
}


def dyadic(m: int, n: int, *, seed: int = 0, low: int = -3, high: int = 3, density: float = 0.3) -> Problem:
    """A problem whose every intermediate is a small multiple of 1/128, so that float32 is exact and the summation order does not matter.

    Unit factors hold 0, ±1/4 and ±1/2, weights multiples of 1/8, scales powers of two. Exact ties are common.
    """
    g = torch.Generator().manual_seed(seed)

    def factor(k: int) -> Tensor:
        entries = torch.tensor([-0.5, -0.25, 0.25, 0.5], dtype=torch.float64)[torch.randint(4, (k, k), generator=g)]
        lower = torch.tril(entries * (torch.rand(k, k, generator=g) < min(density, 4 / k)), -1)
        L = (lower + torch.eye(k, dtype=torch.float64)) * 2.0 ** torch.randint(-1, 2, (k, 1), generator=g)
        return L.T @ L

    W = torch.randint(-24, 25, (m, n), generator=g) / 8
    scale = 2.0 ** torch.randint(-2, 1, (m, 1), generator=g)
    return Problem(W.float(), Kron(factor(n), factor(m)), UniformGrid(scale.float(), None, low, high))


def offset_grid(W: Tensor, levels: int = 7, group_size: int = 8) -> OffsetGrid:
    """From the smallest to the largest weight of each group."""
    groups = W.float().unflatten(1, (-1, group_size))
    least = groups.amin(2)
    return OffsetGrid((groups.amax(2) - least) / (levels - 1), None, 0, levels - 1, group_size, None, least)


# Every kind of grid, fitted to a weight whose width 8 and 16 divide.
GRIDS: dict[str, Callable[[Tensor], Grid]] = {
    "uniform": lambda W: UniformGrid.fit(W, 7),
    "uniform-asymmetric-grouped": lambda W: UniformGrid.fit(W, bits=3, group_size=8, symmetric=False),
    "offset": offset_grid,
    "nf4": lambda W: CodebookGrid.fit(W, "nf4", 16),
    "mxfp4": lambda W: CodebookGrid.fit(W, "e2m1", 16, scale_format="e8m0"),
    "nvfp4": lambda W: CodebookGrid.fit(W, "e2m1", 16, scale_format="e4m3"),
    "iq4_nl": lambda W: CodebookGrid.fit(W, "iq4_nl", 8),
    "lloyd-max-7": lambda W: CodebookGrid.fit(W, "lloyd-max-7"),
    "own-table": lambda W: CodebookGrid.fit(W, torch.tensor([-2.0, -0.5, 0.25, 3.0]), 16),
    "e8": lambda W: E8Grid.fit(W),
}
SCALAR_GRIDS = [name for name in GRIDS if name != "e8"]
