"""Every schedule on every grid; heads; orders; shapes and values that hypothesis thinks of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import GRIDS, SCALAR_GRIDS, problem, spd

from bakron.errors import FactorError, MethodError, RecipeError, ShapeError
from bakron.grids import E8Grid, UniformGrid
from bakron.kron import Factor, HeadFactor, Kron
from bakron.solver import METHODS, ORDERS, certify, solve, tiled, wavefront

FAST = [name for name in METHODS if name not in ("auto", "naive")]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weight(m, n, seed=0):
    return torch.randn(m, n, generator=generator(seed), dtype=torch.float64)


def heads(h, k, seed=0):
    g = generator(seed)
    return torch.stack([spd(k, g) * (1 + number) for number in range(h)])


@pytest.mark.parametrize("shape", [(7, 16), (1, 48), (17, 32)], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("method", FAST)
def test_every_method_on_every_grid_equals_the_definition(method, grid, shape):
    W, fitted = weight(*shape), GRIDS[grid](weight(*shape))
    kron = Kron(spd(shape[1], generator(1)), spd(shape[0], generator(2)))
    if method == "tiled" and grid == "e8":
        with pytest.raises(MethodError, match=r"'tiled' on a E8Grid.*scalar grid.*'bakron'"):
            solve(W, kron, fitted, method=method)
        return
    exact = solve(W, kron, fitted, method="naive")
    found = solve(W, kron, fitted, method=method)
    assert torch.equal(found.codes, exact.codes) and torch.equal(found.values, exact.values)
    assert found.loss == pytest.approx(exact.loss, rel=1e-9) == pytest.approx(kron.loss(exact.values - W), rel=1e-9)
    assert certify(found.values, W, kron, fitted).violations == 0


@pytest.mark.parametrize("leaf", [1, 2, 5, 64])
@pytest.mark.parametrize("shape", [(12, 40), (40, 16), (33, 24)], ids=str)
@pytest.mark.parametrize("grid", ["uniform", "e8"])
def test_the_paper_s_schedule_does_not_depend_on_its_leaf(leaf, shape, grid):
    W, fitted = weight(*shape), GRIDS[grid](weight(*shape))
    kron = Kron(spd(shape[1], generator(1)), spd(shape[0], generator(2)))
    exact = solve(W, kron, fitted, method="naive").codes
    assert torch.equal(wavefront.bakron(W, kron, fitted, leaf=leaf).codes, exact)


def test_auto_picks_what_can_serve_the_grid_and_says_so():
    W = weight(6, 16)
    kron = Kron(spd(16, generator()))
    assert solve(W, kron, UniformGrid.fit(W, 7)).method == "tiled"
    assert solve(W, kron, E8Grid.fit(W)).method == "bakron"


@pytest.mark.parametrize("grid", GRIDS)
def test_a_corrupted_code_is_caught_on_every_grid(grid):
    W, fitted = weight(9, 32), GRIDS[grid](weight(9, 32))
    kron = Kron(spd(32, generator(1)), spd(9, generator(2)))
    codes = solve(W, kron, fitted).codes
    wrong = codes.clone()
    wrong[4, 1] += 256 if grid == "e8" else -1 if codes[4, 1] > 0 else 1
    assert certify(fitted.values(wrong, torch.float64), W, kron, fitted).violations >= 1


@pytest.mark.parametrize("k", [1, 5, 16, 40])
@pytest.mark.parametrize("method", FAST)
def test_heads_are_independent_problems(method, k):
    h, n = 3, 24
    W, B, A = weight(h * k, n), heads(h, k), spd(n, generator(1))
    grid = UniformGrid.fit(W, 7, 8)
    found = solve(W, Kron(A, B), grid, method=method)
    dense = solve(W, Kron(A, torch.block_diag(*B)), grid, method="naive" if h * k * n <= 4096 else "tiled")
    assert torch.equal(found.codes, dense.codes) and found.loss == pytest.approx(dense.loss, rel=1e-9)
    for number in range(h):
        own = slice(number * k, (number + 1) * k)
        alone = UniformGrid(grid.scale[own], None, grid.low, grid.high, 8)
        assert torch.equal(found.codes[own], solve(W[own], Kron(A, B[number]), alone, method=method).codes)


@pytest.mark.parametrize("tiles", [(1, 1, 1), (16, 32, 3), (256, 256, 2)], ids=str)
def test_heads_in_panels_on_threads(tiles):
    W, kron = weight(4 * 37, 70), Kron(spd(70, generator(1)), heads(4, 37))
    grid = UniformGrid.fit(W, 7)
    found = tiled.sweep(W, kron, grid, panel=tiles[0], block=tiles[1], threads=tiles[2])
    assert torch.equal(found.codes, solve(W, kron, grid, method="bakron").codes)


def test_a_factor_by_heads_is_the_block_diagonal_one():
    B, E = heads(3, 4), weight(12, 5)
    dense, by_head = Kron(torch.eye(5), torch.block_diag(*B)), Kron(torch.eye(5), B)
    assert isinstance(by_head.B, HeadFactor) and by_head.B.size == 12
    assert by_head.loss(E) == pytest.approx(dense.loss(E), rel=1e-12)
    torch.testing.assert_close(by_head.B.unit, dense.B.unit)
    torch.testing.assert_close(by_head.B.pivots, dense.B.pivots)
    torch.testing.assert_close(torch.block_diag(*by_head.damp(0.1, 0.5).B.H), dense.damp(0.1, 0.5).B.H)
    own = by_head.damp(0.1, 0.5, "mean").B.H
    mean = B.diagonal(dim1=1, dim2=2).mean()
    for number in range(3):
        torch.testing.assert_close(own[number], (B[number] + 0.5 * B[number].diagonal().mean() * torch.eye(4, dtype=torch.float64)) / mean)
    assert by_head.damp(0.1, 0.5).B is by_head.damp(0.2, 0.5).B and by_head.damp(0.1, 0.5).damping["b"] == ((0.5, "diagonal"),)


def test_a_bad_head_is_named():
    B = heads(3, 4)
    B[1] = torch.ones(4, 4)
    with pytest.raises(FactorError, match=r"head 1: .*not positive definite.*Damp it by at least"):
        Kron(torch.eye(2), B).factor()
    with pytest.raises(ShapeError, match=r"\[3, 4, 5\].*\[h, k, k\]"):
        Kron(torch.eye(2), torch.ones(3, 4, 5))
    assert Kron(torch.eye(2), B).B.smallest_damping() > 0


@pytest.mark.parametrize("order", [*ORDERS, ("diagonal", "natural"), ("natural", "min-pivot")], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_orders_permute_inside_and_restore(method, order):
    p = problem(11, 24, group_size=6, symmetric=False)
    found = solve(p.W, p.kron, p.grid, method=method, order=order)
    assert found.order == ((order, order) if isinstance(order, str) else order)
    assert torch.equal(found.codes, solve(p.W, p.kron, p.grid, method="naive", order=order).codes)
    assert torch.equal(found.values, p.grid.values(found.codes, torch.float64))
    assert found.loss == pytest.approx(p.kron.loss(found.values - p.W), rel=1e-9)
    assert certify(found.values, p.W, p.kron, p.grid, order=order).violations == 0
    if order != "natural":
        assert certify(found.values, p.W, p.kron, p.grid).violations > 0


def test_orders_are_what_they_say():
    g = generator()
    H = spd(30, g)
    H = H * torch.outer(*(2 * [torch.exp(torch.randn(30, generator=g, dtype=torch.float64))]))
    factor = Factor(H)
    from bakron.solver.orders import arrange

    diagonal, least = arrange(factor, "diagonal", 30), arrange(factor, "min-pivot", 30)
    assert torch.equal(H.diagonal()[diagonal], H.diagonal().sort(descending=True).values)
    assert sorted(least.tolist()) == list(range(30)) and int(least[-1]) == int(H.diagonal().argmin())
    sums = [float(factor.permuted(order).pivots.sum()) for order in (torch.arange(30), diagonal, least)]
    assert sums[2] <= sums[1] < sums[0]


def test_ordering_pays_on_outlier_channels():
    W = weight(24, 48)
    size = torch.exp(1.5 * torch.randn(48, generator=generator(3), dtype=torch.float64))
    kron = Kron(spd(48, generator(1), decay=2) * torch.outer(size, size), spd(24, generator(2)))
    grid = UniformGrid(torch.full((24, 1), 0.4), None, -(2**20), 2**20)  # unclipped: the loss follows the sum of the pivots
    natural, diagonal, least = (solve(W, kron, grid, order=(order, "natural")).loss for order in ("natural", "diagonal", "min-pivot"))
    assert diagonal < 0.9 * natural and least < 0.9 * natural


def test_orders_keep_heads_together_and_units_whole():
    W, B = weight(12, 16), heads(3, 4)
    kron = Kron(spd(16, generator(1)), B)
    grid = UniformGrid.fit(W, 7)
    assert torch.equal(solve(W, kron, grid, order="diagonal").codes, solve(W, kron, grid, order="diagonal", method="naive").codes)
    vectors = E8Grid.fit(W)
    with pytest.raises(RecipeError, match="1x8 units"):
        solve(W, kron, vectors, order="diagonal")
    found = solve(W, kron, vectors, order=("natural", "diagonal"))
    assert certify(found.values, W, kron, vectors, order=("natural", "diagonal")).violations == 0
    with pytest.raises(RecipeError, match=r"'best'.*natural, diagonal, min-pivot"):
        solve(W, kron, grid, order="best")


def test_vector_grids_need_a_width_of_whole_units():
    W = weight(4, 16)
    grid = E8Grid.fit(W)
    with pytest.raises(ShapeError, match="multiple of 8"):
        grid.check(W[:, :12])
    with pytest.raises(ShapeError, match="unit 8"):
        Factor(spd(12, generator())).block_unit(8)


def test_block_factors_rebuild_the_matrix():
    H = spd(24, generator())
    H[5] = H[:, 5] = 0
    N, D = Factor(H).block_unit(8)
    torch.testing.assert_close(N.T @ torch.block_diag(*D) @ N, H, rtol=1e-10, atol=1e-12)
    for i in range(0, 24, 8):
        torch.testing.assert_close(N[i : i + 8, i : i + 8], torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)
        assert not N[i : i + 8, i + 8 :].any()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    seed=st.integers(0, 2**31 - 1),
    levels=st.integers(2, 17),
    symmetric=st.booleans(),
    b=st.sampled_from(["dense", "identity", "diagonal"]),
    clipped=st.booleans(),
    panel=st.sampled_from([1, 16, 48]),
    size=st.floats(1e-6, 1e6),
)
def test_any_shape_and_any_values(m, n, seed, levels, symmetric, b, clipped, panel, size):
    p = problem(m, n, seed=seed, levels=levels, symmetric=symmetric, b=b, clipped=clipped)
    grid = UniformGrid((p.grid.scale.double() * size).float(), p.grid.zero, p.grid.low, p.grid.high)
    W = p.W * size
    exact = solve(W, p.kron, grid, method="naive").codes if m * n <= 1024 else solve(W, p.kron, grid, method="antidiagonal").codes
    assert torch.equal(tiled.sweep(W, p.kron, grid, panel=panel, block=32, threads=1).codes, exact)
    assert torch.equal(wavefront.bakron(W, p.kron, grid, leaf=panel).codes, exact)


@pytest.mark.parametrize("grid", SCALAR_GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_rounds_ties_and_edges_as_the_grid_does(grid, dtype):
    """A = B = I: every target is the weight itself, placed on, next to and beyond every threshold."""
    fitted = GRIDS[grid](weight(3, 16))
    levels = fitted.table if fitted.table is not None else torch.arange(fitted.low, fitted.high + 1, dtype=torch.float64)
    middle = ((levels[1:] + levels[:-1]) / 2).to(dtype)
    x = torch.cat([middle, *(torch.nextafter(middle, middle.new_tensor(to)) for to in (-1e9, 1e9)), levels.to(dtype), levels.to(dtype) * 3])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).repeat(3, 1)
    grid16 = type(fitted)(
        **{
            **vars(fitted),
            "scale": torch.full((3, 1), 0.25),
            "group_size": None,
            "zero": None if fitted.zero is None else fitted.zero[:, :1],
        }
    )
    W = x * 0.25
    found = solve(W, Kron(torch.eye(x.shape[1]), torch.eye(3)), grid16, method="tiled")
    codes, values = grid16.project(W)
    assert torch.equal(found.codes, codes) and torch.equal(found.values, values)
