"""Kron and Factor: the factorisation, damping, losses, and what happens to factors that are not factors."""

from __future__ import annotations

import pytest
import torch
from problems import problem, spd

from bakron.errors import FactorError, ShapeError
from bakron.kron import Factor, Kron


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 129])
def test_unit_factor_and_pivots_rebuild_the_matrix(size):
    H = spd(size, generator(size))
    factor = Factor(H)
    N = factor.unit
    torch.testing.assert_close(N.T @ torch.diag(factor.pivots) @ N, H, rtol=1e-12, atol=1e-13)
    assert torch.equal(N, torch.tril(N)) and torch.equal(N.diagonal(), torch.ones(size, dtype=torch.float64))


def test_reverse_cholesky_is_the_inverse_transpose_of_the_factor_of_gptq():
    H = spd(12, generator())
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)  # H^-1 = U^T U, as GPTQ has it
    L = Factor(H).unit * Factor(H).pivots.sqrt()[:, None]
    torch.testing.assert_close(L, torch.linalg.inv(U).T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype_is_taken_and_factored_in_float64(dtype):
    H = (spd(9, generator()) + 0.3 * torch.eye(9, dtype=torch.float64)).to(dtype)
    H = (H + H.T) / 2
    before = H.clone()
    factor = Factor(H)
    assert factor.unit.dtype == factor.pivots.dtype == torch.float64
    assert torch.equal(H, before)


def test_loss_is_the_dense_quadratic_form_and_scales():
    p = problem(5, 7)
    E = torch.randn(5, 7, generator=generator(), dtype=torch.float64)
    vec = E.T.flatten()  # column-major
    dense = torch.kron(p.kron.A.H, p.kron.B.H)
    assert p.kron.loss(E) == pytest.approx(float(vec @ dense @ vec), rel=1e-12)
    assert Kron(3 * p.kron.A.H, 2 * p.kron.B.H).loss(E) == pytest.approx(6 * p.kron.loss(E), rel=1e-12)
    assert Kron(p.kron.A.H).loss(E) == pytest.approx(float(torch.trace(E @ p.kron.A.H @ E.T)), rel=1e-12)


@pytest.mark.parametrize("rule", ["diagonal", "mean"])
def test_damping_normalises_then_adds_and_is_recorded(rule):
    H = 5 * spd(10, generator())
    kron = Kron(H, 3 * spd(4, generator(1)))
    damped = kron.damp(0.2, 0.7, rule)
    normal = H / H.diagonal().mean()
    added = torch.diag(normal.diagonal()) if rule == "diagonal" else torch.eye(10, dtype=torch.float64)
    torch.testing.assert_close(damped.A.H, normal + 0.2 * added)
    assert damped.damping == {"a": ((0.2, rule),), "b": ((0.7, rule),)}
    assert kron.damping == {"a": (), "b": ()} and torch.equal(kron.A.H, H)


def test_a_factor_shared_by_q_k_and_v_is_damped_and_factored_once(monkeypatch):
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a, **k: calls.append(1) or cholesky(*a, **k))
    A = Factor(spd(8, generator()))
    krons = [Kron(A, spd(m, generator(m))).damp(0.1, 1.0) for m in (6, 3, 3)]
    for kron in krons:
        kron.factor()
        kron.factor()
    assert krons[0].A is krons[1].A is krons[2].A
    assert len(calls) == 1 + 3
    assert krons[0].A.unit_as(torch.float32, torch.device("cpu")) is krons[1].A.unit_as(torch.float32, torch.device("cpu"))


def test_dead_rows_decouple_and_have_no_pivot():
    X = torch.randn(512, 64, generator=generator(), dtype=torch.float64)
    X[:, 7] = 0
    factor = Factor(X.T @ X)
    assert factor.dead.tolist() == [7]
    assert factor.pivots[7] == 0 and (factor.pivots[torch.arange(64) != 7] > 0).all()
    assert factor.unit[7].count_nonzero() == 1 and factor.unit[:, 7].count_nonzero() == 1
    damped = factor.damp(0.1)
    assert damped.dead.tolist() == [7]  # a share of nothing is nothing
    assert factor.damp(0.1, "mean").dead.tolist() == []
    assert torch.isfinite(Factor(torch.zeros(3, 3)).damp(0.1).unit).all()


def test_rho_is_one_without_correlation_and_smaller_with():
    assert Factor(torch.diag(torch.rand(6, generator=generator()) + 0.1)).rho == pytest.approx(1)
    assert 0 < Factor(spd(6, generator(), decay=2)).rho < 0.9


@pytest.mark.parametrize("kind", ["five tokens", "rank one", "indefinite"])
def test_a_factor_that_is_not_positive_definite_names_the_damping_that_cures_it(kind):
    if kind == "five tokens":
        X = torch.randn(5, 256, generator=generator())
        H = X.T @ X
    elif kind == "rank one":
        X = torch.randn(1, 32, generator=generator())
        H = X.T @ X
    else:
        H = 1.3 * torch.eye(16) - 0.3
    factor = Factor(H)
    with pytest.raises(FactorError) as caught:
        _ = factor.unit
    text = str(caught.value)
    assert "not positive definite" in text and "Damp it by at least" in text and "more tokens" in text
    assert caught.value.index is not None and caught.value.damping > 0
    cured = factor.damp(1.05 * caught.value.damping, "mean")
    assert torch.isfinite(cured.unit).all()


def test_numerically_singular_pivots_are_refused_not_divided_by():
    x = torch.arange(1, 9, dtype=torch.float64) / 7
    H = torch.outer(x, x)
    H[:] = H + 1e-17 * torch.eye(8, dtype=torch.float64)  # lost in rounding: pivots are noise, of either sign
    with pytest.raises(FactorError, match="not positive definite"):
        _ = Factor(H).unit


BAD = {
    "mis-shaped": (torch.ones(3, 4), ShapeError, ["[3, 4]", "square"]),
    "a vector": (torch.ones(3), ShapeError, ["[3]", "square"]),
    "empty": (torch.ones(0, 0), ShapeError, ["[0, 0]", "square"]),
    "integers": (torch.ones(3, 3, dtype=torch.int64), FactorError, ["int64", "floating"]),
    "nan": (torch.diag(torch.tensor([1.0, float("nan"), 1.0])), FactorError, ["nan", "[1, 1]", "overflow"]),
    "infinite": (torch.diag(torch.tensor([1.0, 1.0, float("inf")])), FactorError, ["inf", "[2, 2]", "Damping cannot cure"]),
    "negative": (torch.diag(torch.tensor([1.0, -2.0])), FactorError, ["-2", "index 1", "diagonal >= 0"]),
    "asymmetric": (torch.tensor([[2.0, 0.5], [0.1, 2.0]]), FactorError, ["not symmetric", "0.5", "0.1", "(H + H.T) / 2"]),
    "zero diagonal": (torch.tensor([[1.0, 0.5], [0.5, 0.0]]), FactorError, ["zero diagonal", "index 1", "semi-definite"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_a_factor_is_refused_in_words(kind):
    H, error, words = BAD[kind]
    with pytest.raises(error) as caught:
        Kron(H)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("amount", "rule", "word"), [(-0.1, "mean", ">= 0"), (float("nan"), "mean", "finite"), (0.1, "max", "'diagonal' or 'mean'")]
)
def test_damping_that_cannot_be_meant_is_refused(amount, rule, word):
    with pytest.raises(FactorError, match=word):
        Kron(torch.eye(2)).damp(amount, 0.0, rule)


def test_weights_and_errors_of_another_shape_are_refused():
    kron = Kron(torch.eye(4), torch.eye(3))
    with pytest.raises(ShapeError, match=r"\[4, 3\].*\[3, 4\]"):
        kron.check(torch.zeros(4, 3))
    with pytest.raises(ShapeError, match=r"\[3, 5\].*\[3, 4\]"):
        kron.loss(torch.zeros(3, 5))
    with pytest.raises(ShapeError, match=r"\[m, 4\]"):
        Kron(torch.eye(4)).check(torch.zeros(3, 5))
    with pytest.raises(ShapeError, match="number of rows m"):
        Kron(torch.eye(4)).bound(1.0)


def test_repr_says_sizes_and_damping():
    assert (
        "A=[4, 4]" in repr(Kron(torch.eye(4)).damp(0.1))
        and "0.1" in repr(Kron(torch.eye(4)).damp(0.1))
        and "B=I" in repr(Kron(torch.eye(4)))
    )
    assert "B=[3, 3]" in repr(Kron(torch.eye(4), torch.eye(3)))


def test_diagnostics_of_a_block_diagonal_factor_are_those_of_the_dense_one():
    g = torch.Generator().manual_seed(0)
    blocks = torch.stack([spd(4, g) for _ in range(3)])
    heads, dense = Kron(torch.eye(2), blocks).B, Kron(torch.eye(2), torch.block_diag(*blocks)).B
    assert heads.rho == pytest.approx(dense.rho) and 0 < heads.rho <= 1
    assert heads.top_share(0.1) == pytest.approx(dense.top_share(0.1))
