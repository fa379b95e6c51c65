"""Factorisations of an expected Hessian: what each is exact for, and what each converges to, in float64."""

import itertools

import pytest
import torch
from test_hessian import SEED, SMALL, assert_near, autograd, inputs_of_blocks, tokens
from tiny import KINDS, tiny_model

from bakron import config, recipes
from bakron.errors import RecipeError
from bakron.hessian import FACTORS, BackpropEstimator
from bakron.hessian.factor import Step, weighting
from bakron.models.walk import Walk as AnyWalk

M, N, T = 4, 5, 4000


def Walk(model, length, **options):
    return AnyWalk(model, length, precision="float32", **options)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated_tokens():
    """Inputs and gradients whose sizes depend on each other, `[1, T, N]` and `[1, T, M]`, so that no factorisation is exact."""
    kind = random(T, 1, seed=1) > 0
    x = torch.where(kind, random(T, N, seed=2) @ random(N, N, seed=3), random(T, N, seed=4))
    g = torch.where(kind, random(T, M, seed=5), random(T, M, seed=6) @ random(M, M, seed=7))
    return x[None], g[None]


def factorise(x, g, name):
    """A and B of a stream given in two batches, as the gradient pass makes them: A with the last step's weights."""
    chosen, step = weighting(name), None
    for _ in range(chosen.steps):
        step = Step((g.shape[-1], x.shape[-1]), chosen, step, dtype=torch.float64)
        for rows in (slice(0, 1000), slice(1000, None)):
            step.add(x[:, rows], g[:, rows]) if not chosen.by_sequence else step.add(x[rows], g[rows])
    return step.A.value(), step.B.value()


def dense(x, g):
    """`sum_t vec(g x^T) vec(g x^T)^T`, column-major vec."""
    V = torch.einsum("ti,tj->tji", g.flatten(0, -2), x.flatten(0, -2)).flatten(1)
    return V.T @ V


def rearranged(H, m, n):
    """Van Loan and Pitsianis' R(H): row (j, j'), column (i, i'); a Kronecker product becomes the rank-one vec(A) vec(B)^T."""
    return H.reshape(n, m, n, m).permute(0, 2, 1, 3).reshape(n * n, m * m)


def unit(H):
    return H / H.norm()


def cosine(H, A, B):
    return float((unit(H) * unit(torch.kron(A, B))).sum())


# --- what they converge to ---------------------------------------------------------------------------------------------------------------


def test_shampoo_steps_converge_to_the_nearest_kronecker_product():
    x, g = correlated_tokens()
    H = dense(x, g)
    U, S, Vh = torch.linalg.svd(rearranged(H, M, N))
    best = (U[:, 0].reshape(N, N).abs(), Vh[0].reshape(M, M).abs())  # signs: compared through absolute values
    found = [cosine(H, *factorise(x, g, "shampoo" if k == 1 else f"shampoo:{k}")) for k in (1, 2, 3, 40)]
    optimum = float(S[0] / S.norm())
    assert optimum < 0.99  # the problem is no Kronecker product
    assert found[0] < found[1] < found[2] < optimum + 1e-12 and found[3] == pytest.approx(optimum, abs=1e-12)
    A, B = factorise(x, g, "shampoo:60")
    torch.testing.assert_close(unit(A).abs(), best[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(unit(B).abs(), best[1], rtol=1e-8, atol=1e-8)


def divergence(H, A, B):
    """Log-determinant (Bregman) divergence of the best multiple of A (x) B from H, up to what depends on H alone."""
    K = torch.kron(A, B)
    K = K * torch.trace(torch.linalg.solve(K, H)) / len(H)
    return float(torch.logdet(K))


def test_kl_steps_converge_to_the_least_bregman_divergence():
    x, g = correlated_tokens()
    H = dense(x, g)
    found = [divergence(H, *factorise(x, g, name)) for name in ("shampoo", "kl:2", "kl", "kl:30")]
    assert found[0] > found[1] > found[2] > found[3]
    assert found[3] < min(divergence(H, *factorise(x, g, name)) for name in ("kfac", "mixed", "shampoo:9")) - 0.01
    A, B = factorise(x, g, "kl:30")
    P = torch.linalg.inv(B + 0.01 * torch.diag(B.diagonal()))  # the flip-flop equation at its fixed point, as damped
    again = torch.einsum("ti,ij,tj,ta,tb->ab", g[0], P, g[0], x[0], x[0])
    torch.testing.assert_close(unit(again), unit(A), rtol=1e-3, atol=1e-5)


# --- what they are exact for -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shampoo", "shampoo:4", "kl", "kl:2"])
def test_exact_where_the_expected_hessian_is_a_kronecker_product(name):
    """All pairs of a few inputs and a few gradients: the sum over tokens is (sum x x^T) (x) (sum g g^T)."""
    x, g = random(7, N), random(6, M, seed=1)
    x, g = x.repeat_interleave(6, 0)[None], g.repeat(7, 1)[None]
    assert cosine(dense(x, g), *factorise(x, g, name)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", [*FACTORS, "shampoo:3", "kl:5"])
def test_exact_on_a_single_datum(name):
    x, g = random(1, 1, N), random(1, 1, M, seed=1)
    assert cosine(dense(x, g), *factorise(x, g, name)) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_kfac_is_exact_on_deep_linear_nets(layer):
    """Squared error: the loss's Hessian is the identity, so a token's gradients are the columns of the transposed Jacobian, whatever the token."""
    widths = [5, 4, 6, 3]
    layers = [random(out, into, seed=k) for k, (into, out) in enumerate(itertools.pairwise(widths))]
    data = random(9, widths[0], seed=9)

    def net(weight, x):
        for k, W in enumerate(layers):
            x = x @ (weight if k == layer else W).T
        return x

    W = layers[layer]
    exact = torch.autograd.functional.hessian(
        lambda w: 0.5 * (net(w, data) - 1).square().sum(), W
    )  # linear in W: the Hessian is the Gauss-Newton matrix
    exact = exact.permute(1, 0, 3, 2).reshape(W.numel(), W.numel())  # to column-major vec
    x, J = data, torch.eye(widths[layer + 1], dtype=torch.float64)
    for W in layers[:layer]:
        x = x @ W.T
    for W in layers[layer + 1 :]:
        J = W @ J
    x, g = x.repeat_interleave(len(J), 0)[None], J.repeat(len(data), 1)[None]
    assert cosine(exact, *factorise(x, g, "kfac")) == pytest.approx(1, abs=1e-12)


def test_sequence_is_exact_where_sequences_are_and_tokens_are_not():
    """Two tokens a sequence with one gradient: the sequence's gradient has rank one, made of the sum of its inputs."""
    x, g = random(1, 2, N), random(1, 1, M, seed=1).expand(1, 2, M)
    G = (g.mT @ x)[0]
    exact = torch.outer(G.T.reshape(-1), G.T.reshape(-1))
    assert cosine(exact, *factorise(x, g, "sequence")) == pytest.approx(1, abs=1e-12)
    assert cosine(exact, *factorise(x, g, "shampoo")) < 0.99


# --- through the model -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_is_that_of_plain_autograd_a_sequence_at_a_time(kind, tmp_path):
    model, ids = tiny_model(kind), tokens(5, 12)
    walk = Walk(model, 12, batch=2)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor="sequence", seed=SEED)
    expected, _ = autograd(model, ids, SEED)
    for i in range(len(walk)):
        krons = estimator.block(i, torch.zeros(5, 12, 64))  # A too is of the original model's inputs
        assert estimator.tokens == dict.fromkeys(walk.linears(i), 60)
        for name, kron in krons.items():
            x, g = (part.reshape(5, 12, -1) for part in expected[f"{walk.prefix(i)}.{name}"])
            G = torch.stack([one.T @ two for one, two in zip(g, x)])  # d loss_s / d W
            assert_near(kron.A.H, torch.einsum("sij,sik->jk", G, G))
            assert_near(kron.B.H, torch.einsum("sij,skj->ik", G, G))


@pytest.mark.parametrize("name", ["shampoo:2", "shampoo:3", "kl"])
def test_steps_through_the_model_are_those_on_its_tokens(name, tmp_path):
    model, ids = tiny_model("qwen3").double(), tokens(3, 20)
    walk = Walk(model, 20, batch=2)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor=name, seed=SEED)
    expected, _ = autograd(model, ids, SEED)
    for i, hidden in enumerate(inputs_of_blocks(walk, ids)):
        for linear, kron in estimator.block(i, hidden).items():
            A, B = factorise(*(part[None] for part in expected[f"{walk.prefix(i)}.{linear}"]), name)
            torch.testing.assert_close(unit(kron.A.H), unit(A), rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(unit(kron.B.H), unit(B), rtol=1e-6, atol=1e-9)


def test_a_later_step_keeps_the_weights_and_takes_the_inputs_given(tmp_path):
    walk, ids = Walk(tiny_model("llama"), 16), tokens(2, 16)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor="shampoo:2", seed=SEED)
    hidden = walk.embed(ids)
    for one, two in zip(estimator.block(0, hidden).values(), estimator.block(0, 2 * hidden + 1).values()):
        assert torch.equal(one.B.H, two.B.H) and not torch.allclose(one.A.H, two.A.H)


def test_dead_outputs_are_no_obstacle(tmp_path):
    model, ids = tiny_model("llama", **SMALL), tokens(2, 8, vocabulary=8)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()  # no gradient at q, k and v
    walk = Walk(model, 8)
    for name in ("shampoo:3", "kl"):
        krons = BackpropEstimator(walk, ids, tmp_path / name.replace(":", ""), factor=name).block(0, walk.embed(ids))
        assert len(krons["self_attn.q_proj"].B.dead) == 16 and bool(torch.isfinite(krons["mlp.up_proj"].A.H).all())


# --- names -------------------------------------------------------------------------------------------------------------------------------


def test_recipe_and_table_know_the_same_names():
    assert set(FACTORS) == {form for form in config.FACTOR_FORMS if ":" not in form}
    assert weighting("shampoo:1") == FACTORS["shampoo"] and weighting("kl:3") == FACTORS["kl"]
    for name in [*FACTORS, "shampoo:7", "kl:99"]:
        weighting(name)
        assert recipes.from_dict({"factor": name}).resolve().factor == name


@pytest.mark.parametrize("name", ["shampoo:0", "shampoo:", "kfac:2", "mixed:2", "kl:100", "shampoo:-1", "", "Shampoo"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="shampoo:K and kl:K"):
        weighting(name)
    with pytest.raises(RecipeError) as caught:
        recipes.from_dict({"factor": name})
    assert "kfac, shampoo, shampoo:K, mixed, sequence, kl or kl:K (K = 1 to 99 steps)" in str(caught.value)


def test_sequence_goes_with_original_inputs():
    assert recipes.from_dict({"factor": "sequence"}).resolve().inputs == "original"
    with pytest.raises(RecipeError, match="factor sequence takes inputs and gradients together, both of the original model"):
        recipes.from_dict({"factor": "sequence", "inputs": "quantized"}).resolve()


@pytest.mark.parametrize("other", ["shampoo:2", "sequence", "kl"])
def test_gradient_pass_of_another_factorisation_is_refused(other, tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8), tokens(1, 8, vocabulary=8)
    BackpropEstimator(walk, ids, tmp_path, factor="shampoo")
    with pytest.raises(RecipeError, match="holds the gradients of another run: "):
        BackpropEstimator(walk, ids, tmp_path, factor=other)
