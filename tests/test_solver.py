"""The solver: every method against the definition, the definition against a textbook GPTQ, and the theorems."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import CASES, Problem, dyadic, problem, spd

from bakron.errors import FactorError, MethodError, ShapeError
from bakron.grids import UniformGrid
from bakron.kron import Factor, Kron
from bakron.solver import METHODS, certify, solve, targets, tiled

FAST = [name for name in METHODS if name not in ("auto", "naive")]
TILES = [(1, 1, 1), (1, 1, 3), (16, 32, 2), (32, 64, 1), (256, 256, 2)]  # rows a panel, columns a block, threads


@pytest.fixture
def poison(monkeypatch):
    """Fill fresh memory with NaN, so that a schedule which reads what it never wrote is caught."""

    def poisoned(make):
        return lambda *shape, **how: (x := make(*shape, **how)).fill_(torch.nan if x.is_floating_point() else 2**30)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(tiled, "empty", lambda shape, dtype: np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 2**30, dtype))


def textbook_gptq(W, A, B, grid):
    """GPTQ as its paper has it, on vec(W): invert the dense Hessian, Cholesky of the inverse, round, push the error to the rest."""
    m, n = W.shape
    H = torch.kron(A, torch.eye(m, dtype=torch.float64) if B is None else B)
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    w, codes = W.double().T.flatten(), torch.empty(m * n, dtype=torch.int32)
    scale, zero = (x.T.flatten() for x in grid.expand(n, torch.float64))
    for k in range(m * n):
        codes[k] = min(max(round(float(w[k] / scale[k])) + int(zero[k]), grid.low), grid.high)  # Python rounds half to even
        w[k:] -= (w[k] - (codes[k] - zero[k]) * scale[k]) / U[k, k] * U[k, k:]
    return codes.reshape(n, m).T


def one_sided_gptq(W, A, grid):
    """GPTQ of every row on its own."""
    return torch.cat([textbook_gptq(W[i : i + 1], A, None, row_of(grid, i)) for i in range(len(W))])


def row_of(grid, i):
    return UniformGrid(grid.scale[i : i + 1], None if grid.zero is None else grid.zero[i : i + 1], grid.low, grid.high, grid.group_size)


def perturbed(codes, grid, i, j):
    wrong = codes.clone()
    wrong[i, j] += 1 if wrong[i, j] < grid.high else -1
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_the_definition_is_textbook_gptq_on_the_dense_kronecker_product(case):
    p = problem(**CASES[case])
    B = None if p.kron.B is None else p.kron.B.H
    assert torch.equal(solve(p.W, p.kron, p.grid, method="naive").codes, textbook_gptq(p.W, p.kron.A.H, B, p.grid))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", FAST)
def test_every_method_equals_the_definition(method, case, poison):
    p = problem(**CASES[case])
    found = solve(p.W, p.kron, p.grid, method=method)
    assert torch.equal(found.codes, solve(p.W, p.kron, p.grid, method="naive").codes)
    assert found.values.dtype == torch.float64 and found.codes.dtype == torch.int32 and found.method == method
    assert torch.equal(found.values, p.grid.values(found.codes, torch.float64))


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_panels_and_blocks_of_every_size_on_any_threads_give_the_same_codes(case, tiles, poison):
    p = problem(**CASES[case])
    panel, block, threads = tiles
    found = tiled.sweep(p.W, p.kron, p.grid, panel=panel, block=block, threads=threads)
    assert torch.equal(found.codes, solve(p.W, p.kron, p.grid, method="naive").codes)


@pytest.mark.parametrize("shape", [(9, 14), (40, 33), (65, 70), (1, 20), (20, 1)], ids=str)
@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("seed", [0, 1])
def test_float32_is_bit_identical_where_float32_is_exact(method, shape, seed):
    shape = (min(shape[0], 20), min(shape[1], 20)) if method == "recursive" else shape  # one entry at a time is slow
    p = dyadic(*shape, seed=seed)
    exact = solve(p.W.double(), p.kron, p.grid, method="naive" if shape[0] * shape[1] <= 2048 else "tiled")
    found = solve(p.W, p.kron, p.grid, method=method)
    assert torch.equal(found.codes, exact.codes) and torch.equal(found.values.double(), exact.values)
    T = targets(exact.values, p.W.double(), p.kron) / p.grid.scale.double()
    if min(shape) > 1:
        assert int(((T - T.floor()) == 0.5).sum()) > 0, "the problem was meant to hold exact ties"
        assert int((T.abs() > 3.5).sum()) > 0, "the problem was meant to leave the code range"


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_float32_tiles_are_bit_identical_where_float32_is_exact(tiles):
    p = dyadic(37, 100, seed=3)
    exact = solve(p.W.double(), p.kron, p.grid, method="naive").codes
    assert torch.equal(tiled.sweep(p.W, p.kron, p.grid, panel=tiles[0], block=tiles[1], threads=tiles[2]).codes, exact)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_ties_and_values_at_and_beyond_the_edge(method, dtype):
    """A = B = I, so that each entry's target is the weight itself."""
    W = torch.tensor([[-9.0, -3.5, -3.0, -2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0, 3.5, 9.0]], dtype=dtype).repeat(5, 1)
    symmetric = UniformGrid(torch.ones(5, 1), None, -3, 3)
    asymmetric = UniformGrid(torch.ones(5, 1), torch.full((5, 1), 4, dtype=torch.int32), 0, 7)
    kron = Kron(torch.eye(13), torch.eye(5))
    assert solve(W, kron, symmetric, method=method).codes[2].tolist() == [-3, -3, -3, -2, -2, 0, 0, 0, 2, 2, 3, 3, 3]
    assert solve(W, kron, asymmetric, method=method).codes[4].tolist() == [0, 0, 1, 2, 2, 4, 4, 4, 6, 6, 7, 7, 7]


@pytest.mark.parametrize("b", ["identity", "diagonal"])
@pytest.mark.parametrize("method", METHODS)
def test_without_correlated_outputs_it_is_gptq(method, b):
    p = problem(8, 21, b=b, group_size=7)
    assert torch.equal(solve(p.W, p.kron, p.grid, method=method).codes, one_sided_gptq(p.W, p.kron.A.H, p.grid))


@pytest.mark.parametrize("method", METHODS)
def test_without_any_correlation_it_is_nearest_rounding(method):
    p = problem(12, 20, symmetric=False, levels=8)
    nearest, _ = p.grid.project(p.W)
    assert torch.equal(solve(p.W, Kron(torch.eye(20), torch.eye(12)), p.grid, method=method).codes, nearest)


@pytest.mark.parametrize("method", METHODS)
def test_scaling_a_factor_changes_nothing(method):
    p = problem(11, 18)
    scaled = Kron(p.kron.A.H * 64, p.kron.B.H / 1024)
    assert torch.equal(solve(p.W, scaled, p.grid, method=method).codes, solve(p.W, p.kron, p.grid, method=method).codes)


@pytest.mark.parametrize("method", METHODS)
def test_the_transposed_problem_has_the_transposed_answer(method):
    p = problem(12, 19)
    grid = UniformGrid(torch.full((12, 1), 0.4), None, -3, 3)
    turned = UniformGrid(torch.full((19, 1), 0.4), None, -3, 3)
    codes = solve(p.W, p.kron, grid, method=method).codes
    assert torch.equal(solve(p.W.T, Kron(p.kron.B, p.kron.A), turned, method=method).codes.T, codes)


@pytest.mark.parametrize("case", CASES)
def test_loss_identity_and_certificate(case):
    p = problem(**CASES[case])
    found = solve(p.W, p.kron, p.grid)
    proof = certify(found.values, p.W, p.kron, p.grid)
    assert proof.violations == 0 and proof.max_gap <= 1e-9
    assert proof.loss == pytest.approx(found.loss, rel=1e-9) and found.loss == pytest.approx(p.kron.loss(found.values - p.W), rel=1e-12)


@pytest.mark.parametrize("b", ["dense", "identity", "diagonal"])
def test_no_clip_bound(b):
    p = problem(14, 25, b=b)
    step = 0.3
    grid = UniformGrid(torch.full((14, 1), step), None, -(2**20), 2**20)
    bound = p.kron.bound(step, 14)
    assert 0 < solve(p.W, p.kron, grid).loss <= bound
    B = torch.eye(14) if p.kron.B is None else p.kron.B.H
    assert bound <= step**2 / 4 * float(torch.trace(p.kron.A.H) * torch.trace(B)) * (1 + 1e-12)


def test_feedback_between_rows_pays():
    p = problem(32, 48)
    two = solve(p.W, p.kron, p.grid).values
    one = solve(p.W, Kron(p.kron.A), p.grid).values
    assert p.kron.loss(two - p.W) < 0.9 * p.kron.loss(one - p.W) < p.kron.loss(p.grid.project(p.W)[1] - p.W)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certificate_at_size_and_a_corrupted_code_is_caught(dtype):
    p = problem(150, 333, group_size=37, dtype=dtype)
    found = solve(p.W, p.kron, p.grid)
    proof = certify(found.values, p.W, p.kron, p.grid)
    assert proof.violations == 0 and proof.max_gap < (1e-3 if dtype == torch.float32 else 1e-9)
    for i, j in [(0, 0), (149, 332), (77, 100)]:
        wrong = p.grid.values(perturbed(found.codes, p.grid, i, j), dtype)
        assert certify(wrong, p.W, p.kron, p.grid).violations >= 1
    off = found.values.clone()
    off[3, 3] += 0.01 * float(p.grid.scale[3, 0])
    assert certify(off, p.W, p.kron, p.grid).violations >= 1
    off[3, 3] = float("nan")
    assert certify(off, p.W, p.kron, p.grid).violations >= 1


def test_float32_and_float64_sweeps_agree_in_loss():
    p = problem(200, 300)
    double, single = solve(p.W, p.kron, p.grid), solve(p.W.float(), p.kron, p.grid)
    assert single.values.dtype == torch.float32
    assert single.loss == pytest.approx(double.loss, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_weights_are_swept_in_float32(method, dtype):
    p = problem(12, 24, dtype=dtype, group_size=6)
    found = solve(p.W, p.kron, p.grid, method=method)
    assert found.values.dtype == torch.float32 and p.grid.scale.dtype == dtype
    assert torch.equal(found.codes, solve(p.W.double(), p.kron, p.grid, method="naive").codes)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_never_modified(method):
    p = problem(10, 16, group_size=4, symmetric=False)
    held = [p.W, p.kron.A.H, p.kron.B.H, p.grid.scale, p.grid.zero]
    p.kron.factor()
    held += [p.kron.A.unit, p.kron.B.unit, p.kron.A.pivots]
    before = [x.clone() for x in held]
    solve(p.W, p.kron, p.grid, method=method)
    assert all(torch.equal(x, y) for x, y in zip(held, before))


def test_non_contiguous_and_expanded_weights():
    p = problem(10, 16)
    exact = solve(p.W, p.kron, p.grid).codes
    assert torch.equal(solve(p.W.T.contiguous().T, p.kron, p.grid).codes, exact)
    wide = torch.zeros(10, 32, dtype=torch.float64)
    wide[:, ::2] = p.W
    assert torch.equal(solve(wide[:, ::2], p.kron, p.grid).codes, exact)


@pytest.mark.parametrize("method", METHODS)
def test_dead_inputs_and_outputs_are_rounded_to_nearest_and_counted(method):
    g = torch.Generator().manual_seed(0)
    X, G = torch.randn(256, 24, generator=g), torch.randn(256, 10, generator=g)
    X[:, 7], G[:, [2, 9]] = 0, 0
    W = torch.randn(10, 24, generator=g, dtype=torch.float64)
    grid = UniformGrid.fit(W, 7)
    kron = Kron(X.T @ X, G.T @ G)
    found = solve(W, kron, grid, method=method)
    assert found.dead == {"a": 1, "b": 2}
    assert torch.equal(found.codes, solve(W, kron, grid, method="naive").codes)
    nearest, _ = grid.project(W)
    assert torch.equal(found.codes[:, 7], nearest[:, 7])
    assert certify(found.values, W, kron, grid).violations == 0


def test_a_layer_shares_its_input_factor(monkeypatch):
    tiled.ready(torch.float32)
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a, **k: calls.append(1) or cholesky(*a, **k))
    g = torch.Generator().manual_seed(0)
    A = Factor(spd(16, g))
    for m in (12, 4, 4):  # q, k, v
        W = torch.randn(m, 16, generator=g)
        solve(W, Kron(A, spd(m, g)), UniformGrid.fit(W, 7))
    assert len(calls) == 1 + 3


def test_solution_says_what_was_done():
    p = problem(6, 9)
    kron = p.kron.damp(0.1, 1.0)
    found = solve(p.W, kron, p.grid)
    assert found.method in METHODS and found.method != "auto"
    assert found.damping == {"a": ((0.1, "diagonal"),), "b": ((1.0, "diagonal"),)}
    assert found.dead == {"a": 0, "b": 0} and found.seconds > 0


def test_what_cannot_be_solved_is_refused_in_words():
    p = problem(6, 9)
    with pytest.raises(MethodError, match=r"'fast'.*naive.*tiled"):
        solve(p.W, p.kron, p.grid, method="fast")
    with pytest.raises(ShapeError, match=r"\[9, 6\].*\[6, 9\]"):
        solve(p.W.T, p.kron, p.grid)
    with pytest.raises(ShapeError, match=r"\[6, 9\].*\[5, n\]"):
        solve(p.W, p.kron, UniformGrid.fit(p.W[:5], 7))
    bad = p.W.clone()
    bad[2, 3] = float("nan")
    with pytest.raises(ShapeError, match="1 non-finite"):
        solve(bad, p.kron, p.grid)
    with pytest.raises(ShapeError, match="int64"):
        solve(p.W.long(), p.kron, p.grid)
    with pytest.raises(ShapeError, match=r"\[6, 8\].*\[6, 9\]"):
        certify(p.W[:, :8], p.W, p.kron, p.grid)
    with pytest.raises(MethodError, match=r"at most 4096 entries.*method='auto'"):
        big = problem(65, 64)
        solve(big.W, big.kron, big.grid, method="naive")


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_rank_deficient_factors_are_refused_until_damped(side):
    g = torch.Generator().manual_seed(0)
    X, G = torch.randn(5, 64, generator=g), torch.randn(1, 32, generator=g)
    A = X.T @ X if side != "b" else torch.eye(64)
    B = G.T @ G if side != "a" else torch.eye(32)
    W = torch.randn(32, 64, generator=g)
    grid = UniformGrid.fit(W, 7)
    with pytest.raises(FactorError, match="Damp it by at least"):
        solve(W, Kron(A, B), grid)
    found = solve(W, Kron(A, B).damp(0.01, 0.01, "mean"), grid)
    assert torch.isfinite(found.values).all()
    assert certify(found.values, W, Kron(A, B).damp(0.01, 0.01, "mean"), grid).violations == 0


def test_problem_is_a_plain_record():
    assert isinstance(problem(2, 2), Problem)
