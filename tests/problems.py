"""One factory of rounding problems, shared by tests and benchmarks: seeded, and named by what is special about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.grids import UniformGrid
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
