"""Labels, clipped weights, first tokens left out, and effective sample sizes."""

import sys
from pathlib import Path

import pytest
import torch
from test_hessian import SEED, SMALL, Walk, assert_near, autograd, exact_fisher, inputs_of_blocks, second_moment, tokens
from tiny import tiny_model

from bakron import recipes
from bakron.errors import ModelError, RecipeError
from bakron.hessian import ESTIMATORS, BackpropEstimator, InputEstimator, gradients
from bakron.hessian.factor import Gram, unpack, weighting
from bakron.kron import Factor

N, T = 5, 12


def case(tmp_path, **options):
    """Estimator, its Krons of block 1, and inputs and gradients of that block's linears `[N, T, .]` from plain autograd."""
    model, ids = tiny_model("qwen3"), tokens(N, T)
    walk = Walk(model, T, batch=2)
    estimator = BackpropEstimator(walk, ids, tmp_path, seed=SEED, **options)
    krons = estimator.block(1, inputs_of_blocks(walk, ids)[1])
    expected, _ = autograd(model, ids, SEED)
    streams = {name: tuple(part.reshape(N, T, -1) for part in expected[f"{walk.prefix(1)}.{name}"]) for name in krons}
    return estimator, krons, streams


def effective(weights):
    return float(weights.sum() ** 2 / weights.square().sum())


# --- labels ------------------------------------------------------------------------------------------------------------------------------


def test_empirical_labels_are_the_next_tokens():
    model, ids = tiny_model("llama", **SMALL), tokens(3, 7, vocabulary=8)
    walk = Walk(model, 7)
    last = walk.apply(1, inputs_of_blocks(walk, ids)[1])
    found = gradients.head_gradient(walk, last, 0, lambda *_: None, ids)
    hidden = last.clone().requires_grad_()
    logits = walk.logits(hidden)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    torch.testing.assert_close(found[0], hidden.grad, rtol=1e-4, atol=1e-6)
    assert not bool(found[:, :, -1].any())  # nothing follows the last token


def test_labels_are_part_of_a_stored_pass(tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8), tokens(2, 8, vocabulary=8)
    sampled = BackpropEstimator(walk, ids, tmp_path / "a", labels="sampled").block(0, walk.embed(ids))
    empirical = BackpropEstimator(walk, ids, tmp_path / "b", labels="empirical").block(0, walk.embed(ids))
    assert not torch.allclose(sampled["mlp.up_proj"].B.H, empirical["mlp.up_proj"].B.H, rtol=0.01)
    with pytest.raises(RecipeError, match="labels"):
        BackpropEstimator(walk, ids, tmp_path / "a", labels="empirical")


# --- clipping ----------------------------------------------------------------------------------------------------------------------------


def test_quantile_is_the_smallest_value_that_enough_do_not_exceed():
    values = torch.tensor([[5.0, 1.0], [3.0, 2.0]])
    assert [gradients.quantile(values, share) for share in (0.01, 0.25, 0.26, 0.5, 0.75, 0.99)] == [1, 1, 2, 2, 3, 5]


@pytest.mark.parametrize("factor", ["shampoo", "mixed"])
def test_weights_of_tokens_are_clipped_in_both_factors(factor, tmp_path):
    estimator, krons, streams = case(tmp_path, factor=factor, clip=0.7)
    for name, (x, g) in streams.items():
        a, b = g.square().sum(-1).flatten(), x.square().sum(-1).flatten()
        a = a.clamp_max(a.sort().values[41])  # 42 of the 60 tokens are 70 %
        b = b.clamp_max(b.sort().values[41]) if factor == "shampoo" else torch.ones_like(b)
        assert_near(krons[name].A.H, second_moment(x.flatten(0, 1), a))
        assert_near(krons[name].B.H, second_moment(g.flatten(0, 1), b))
        assert estimator.effective[name]["a"] == pytest.approx(effective(a), rel=1e-3)
        assert estimator.effective[name]["b"] == pytest.approx(effective(b), rel=1e-3)


def test_gradients_of_sequences_are_clipped(tmp_path):
    estimator, krons, streams = case(tmp_path, factor="sequence", clip=0.6)
    for name, (x, g) in streams.items():
        G = g.mT @ x
        size = G.square().sum((-2, -1))
        kept = size.clamp_max(size.sort().values[2])  # 3 of 5 sequences
        G = G * (kept / size).sqrt()[:, None, None]
        assert_near(krons[name].A.H, torch.einsum("sij,sik->jk", G, G))
        assert_near(krons[name].B.H, torch.einsum("sij,skj->ik", G, G))
        assert estimator.effective[name] == {side: pytest.approx(effective(kept), rel=1e-3) for side in "ab"}


def test_clipping_that_touches_b_is_part_of_a_stored_pass(tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8), tokens(2, 8, vocabulary=8)
    BackpropEstimator(walk, ids, tmp_path / "a", factor="mixed")
    BackpropEstimator(walk, ids, tmp_path / "a", factor="mixed", clip=0.5)  # A alone: the pass is the same
    estimator = BackpropEstimator(walk, ids, tmp_path / "b", factor="shampoo:2", clip=0.5)
    assert estimator.passes["backward"] == 8  # blocks x steps x (limits first, then sums)
    with pytest.raises(RecipeError, match=r"clip \(0.5 there, None here\)"):
        BackpropEstimator(walk, ids, tmp_path / "b", factor="shampoo:2")


def test_clip_needs_weights():
    with pytest.raises(RecipeError, match="clip would do nothing with factor kfac"):
        recipes.from_dict({"factor": "kfac", "clip": 0.9}).resolve()
    for value in (0, 1, -0.5, "much"):
        with pytest.raises(RecipeError, match="a number between 0 and 1"):
            recipes.from_dict({"clip": value})


# --- the first token ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["kfac", "shampoo", "mixed", "sequence"])
def test_the_first_token_counts_in_neither_factor(factor, tmp_path):
    estimator, krons, streams = case(tmp_path, factor=factor, skip=1)
    assert estimator.tokens == dict.fromkeys(krons, N * (T - 1))
    chosen = weighting(factor)
    for name, (x, g) in streams.items():
        x, g = x[:, 1:], g[:, 1:]
        if factor == "sequence":
            G = g.mT @ x
            A, B = torch.einsum("sij,sik->jk", G, G), torch.einsum("sij,skj->ik", G, G)
        else:
            x, g = x.flatten(0, 1), g.flatten(0, 1)
            A = second_moment(x, g.square().sum(-1) ** chosen.a_by_gradient)
            B = second_moment(g, x.square().sum(-1) ** chosen.b_by_input)
        assert_near(krons[name].A.H, A)
        assert_near(krons[name].B.H, B)


def test_the_first_token_does_not_count_in_other_hessians():
    walk, ids = Walk(tiny_model("qwen3"), T), tokens(N, T)
    hidden = walk.embed(ids)
    doubled = hidden.clone()
    doubled[:, 0] *= 2  # of what the first token adds by itself, the norm before each linear leaves no trace: compare with weights instead
    plain = InputEstimator(walk, skip=1)
    x = {name: kron.A.H for name, kron in plain.block(0, hidden).items()}
    again = plain.block(0, doubled)
    assert plain.tokens == dict.fromkeys(walk.linears(0), N * (T - 1)) and plain.effective["mlp.up_proj"] == {"a": N * (T - 1)}
    assert torch.equal(x["self_attn.q_proj"], again["self_attn.q_proj"].A.H)
    for name, estimate in ESTIMATORS.items():
        if not name.endswith("-local"):
            continue
        for factor in ("kfac", "mixed"):
            with_it, without = (estimate(walk, factor=factor, skip=skip) for skip in (0, 1))
            one, two = with_it.block(0, hidden), without.block(0, hidden)
            assert without.tokens == dict.fromkeys(walk.linears(0), N * (T - 1))
            for linear, kron in one.items():
                for side in "AB":
                    H, K = getattr(kron, side), getattr(two[linear], side)
                    if H is None or (linear, side) == ("self_attn.v_proj", "B"):  # W_O^T W_O knows no tokens
                        continue
                    H, K = (torch.block_diag(*one.H) if one.H.ndim == 3 else one.H for one in (H, K))
                    left = H - K  # what one token less takes away is itself positive semi-definite
                    assert float(torch.linalg.eigvalsh(left.double()).min()) > -1e-4 * float(H.diagonal().max())
                    assert float(left.trace()) > 0


# --- sequences held out ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["mixed", "kfac", "shampoo", "sequence"])
def test_sequences_held_out_measure_errors_and_count_only_in_the_factors_that_are_rounded_with(factor, tmp_path):
    model, ids = tiny_model("qwen3"), tokens(N, T)
    walk = Walk(model, T, batch=2)
    assert (N - 2) % 2  # a batch has sequences of both kinds
    estimator = BackpropEstimator(walk, ids, tmp_path / "held", seed=SEED, factor=factor, held=2, gate=True)
    expected, _ = autograd(model, ids, SEED)
    krons = estimator.block(0, walk.embed(ids))
    heldout, tried = estimator.heldout(0), dict(estimator.tried)
    assert estimator.tokens == dict.fromkeys(krons, N * T) and set(tried) == set(krons)
    assert set(estimator.unweighted) == (set() if factor == "kfac" else set(krons))
    plain = BackpropEstimator(walk, ids, tmp_path / "plain", seed=SEED, factor=factor)
    for name, kron in plain.block(0, walk.embed(ids)).items():  # the choice costs no token
        assert_near(krons[name].A.H, kron.A.H.double(), rtol=1e-5)
        assert_near(krons[name].B.H, kron.B.H.double(), rtol=1e-5)
    assert plain.tokens == estimator.tokens and plain.outliers == estimator.outliers and plain.tried == {}
    for name in krons:
        x, g = (part.reshape(N, T, -1) for part in expected[f"{walk.prefix(0)}.{name}"])
        used, held = (x[: N - 2], g[: N - 2]), (x[N - 2 :], g[N - 2 :])
        kron, unweighted = tried[name]
        a, b = used[0].flatten(0, 1), used[1].flatten(0, 1)
        if factor == "sequence":
            G = used[1].mT @ used[0]
            assert_near(kron.A.H, torch.einsum("sij,sik->jk", G, G))
            assert_near(kron.B.H, torch.einsum("sij,skj->ik", G, G))
        else:
            assert_near(kron.A.H, (a * (b.square().sum(1, keepdim=True) if factor != "kfac" else 1)).T @ a)
            assert_near(kron.B.H, (b * (a.square().sum(1, keepdim=True) if factor == "shampoo" else 1)).T @ b)
        if factor == "kfac":
            assert unweighted is None
        else:
            assert_near(unweighted.H, a.T @ a)
            assert_near(estimator.unweighted[name].H, x.flatten(0, 1).T @ x.flatten(0, 1))
        E = torch.randn(kron.B.size, kron.A.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        measured = torch.einsum("nti,ij,ntj->nt", held[1], E, held[0])
        assert_near(heldout.changes(name, E.float())[:, 0], measured, rtol=1e-3)
        assert heldout.error(name, E.float()) == pytest.approx(float(measured.square().sum()), rel=1e-4)


@pytest.mark.parametrize("factor", ["kl:2", "shampoo:2"])
def test_later_steps_without_the_sequences_held_out_never_see_them(factor, tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8, batch=2), tokens(5, 8, vocabulary=8)
    other = torch.cat([ids[:3], tokens(9, 8, vocabulary=8)[7:]])
    found = [BackpropEstimator(walk, some, tmp_path / str(i), seed=SEED, factor=factor, held=2) for i, some in enumerate((ids, other))]
    whole = [one.block(0, walk.embed(some)) for one, some in zip(found, (ids, other))]
    for name, (kron, _) in found[0].tried.items():
        assert torch.equal(kron.A.H, found[1].tried[name][0].A.H) and torch.equal(kron.B.H, found[1].tried[name][0].B.H)
        assert not torch.equal(whole[0][name].B.H, whole[1][name].B.H) and not torch.equal(whole[0][name].B.H, kron.B.H)


def test_number_held_out_is_part_of_a_stored_pass(tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8), tokens(3, 8, vocabulary=8)
    BackpropEstimator(walk, ids, tmp_path)
    with pytest.raises(RecipeError, match=r"held \(0 there, 1 here\)"):
        BackpropEstimator(walk, ids, tmp_path, held=1)


def test_gate_needs_an_output_factor_and_three_sequences():
    for recipe, said in (
        (dict(method="gptq", hessian="backprop"), "gate would do nothing with method gptq"),
        (dict(hessian="mlp-local"), "gate would do nothing with hessian mlp-local"),
        (dict(sequences=2), "at least 3 sequences"),
    ):
        with pytest.raises(RecipeError, match=said):
            recipes.from_dict({"gate": True, **recipe}).resolve()


# --- modules that are used twice ---------------------------------------------------------------------------------------------------------


def test_a_weight_that_two_linears_share_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj is the same weight as model.layers.0.mlp.up_proj"):
        Walk(model, 4)


def test_a_linear_that_runs_twice_in_its_block_is_refused(tmp_path):
    model, ids = tiny_model("llama"), tokens(2, 8)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) + mlp.down_proj(mlp.up_proj(x))
    walk = Walk(model, 8)
    hidden = walk.embed(ids)
    for estimate in (InputEstimator, ESTIMATORS["mlp-local"], lambda walk: BackpropEstimator(walk, ids, tmp_path)):
        with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj runs twice in one pass of its block; expected each linear once"):
            estimate(walk).block(1, hidden)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- effective sample sizes and spectra --------------------------------------------------------------------------------------------------


def test_effective_sample_size():
    gram, Z = Gram(3), torch.ones(2, 4, 3)
    gram.add(Z)
    assert gram.effective == 8
    for weights in (torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]), torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])):
        gram = Gram(3)
        gram.add(Z, weights)
        assert gram.effective == pytest.approx(effective(weights))
    assert Gram(3).effective == 0


def test_share_of_the_trace_in_the_largest_eigenvalues():
    Q, _ = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    values = torch.arange(1.0, 21.0, dtype=torch.float64)
    H = Q @ torch.diag(values) @ Q.T
    factor = Factor((H + H.T) / 2)
    assert factor.top_share(0.1) == pytest.approx(39 / 210) and factor.top_share(0.12) == pytest.approx(57 / 210)
    assert factor.top_share(1.0) == pytest.approx(1)


# --- the study of Hessians ---------------------------------------------------------------------------------------------------------------


def test_the_benchmark_knows_every_hessian_and_every_factorisation():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import hessian
    import quality

    resolved = {name: recipes.from_dict({"levels": 7, **row}).resolve() for name, row in hessian.rows().items()}
    assert {recipe.hessian for recipe in resolved.values()} == set(ESTIMATORS)
    assert {recipe.factor for recipe in resolved.values()} == {None, "kfac", "shampoo", "shampoo:3", "mixed", "sequence", "kl"}
    passes = {}
    for recipe in resolved.values():
        if recipe.hessian == "backprop":
            clip = recipe.clip if weighting(recipe.factor).b_by_input else None
            key = (tuple(weighting(recipe.factor).b_key.values()), recipe.labels, recipe.samples, clip, recipe.skip_first, recipe.chooses)
            assert passes.setdefault(quality._pass_name(recipe), key) == key  # one name, one gradient pass


# --- several labels a token --------------------------------------------------------------------------------------------------------------


def test_labels_of_a_token_are_spread_over_its_distribution(monkeypatch):
    p, drawn = torch.tensor([0.5, 0.25, 0.125, 0.125]), []
    draw = gradients.draw
    monkeypatch.setattr(gradients, "draw", lambda probabilities, u: drawn.append((probabilities, u)) or draw(probabilities, u))
    model = tiny_model("llama", **SMALL)
    walk = Walk(model, 6)
    last = walk.apply(1, inputs_of_blocks(walk, tokens(2, 6, vocabulary=8))[1])
    found = gradients.head_gradient(walk, last, SEED, lambda *_: None, samples=8)
    assert found.shape == (8, *last.shape) and len(drawn) == 8
    assert torch.equal(
        found[:1], gradients.head_gradient(walk, last, SEED, lambda *_: None)
    )  # the first label is the only one of a single draw
    u = torch.stack([one for _, one in drawn[:8]])
    assert bool(((u >= 0) & (u < 1)).all())
    torch.testing.assert_close(
        (8 * u).sort(0).values.floor(), torch.arange(8.0, dtype=torch.float64)[:, None].expand(8, 12)
    )  # one in each eighth
    labels = torch.stack([draw(p.expand(12, -1), one) for one in u])
    assert torch.equal(torch.bincount(labels.flatten(), minlength=4), 12 * torch.tensor([4, 2, 1, 1]))


@pytest.mark.parametrize("factor", ["mixed", "shampoo", "shampoo:2", "sequence"])
def test_samples_are_taken_together(factor, tmp_path):
    """Sums over three labels a token are sums over three runs with the gradients of each."""
    walk, ids = Walk(tiny_model("llama", **SMALL), 8, batch=2), tokens(3, 8, vocabulary=8)
    hidden = walk.embed(ids)
    gradient = gradients.head_gradient(walk, walk.apply(1, walk.apply(0, hidden)), SEED, lambda *_: None, samples=3)
    chosen = weighting(factor)
    moments, at_input = gradients.block_moments(walk, 1, walk.apply(0, hidden), gradient, chosen)
    apart = [gradients.block_moments(walk, 1, walk.apply(0, hidden), gradient[number : number + 1], chosen) for number in range(3)]
    torch.testing.assert_close(at_input, torch.cat([one for _, one in apart]))
    keys = () if factor == "shampoo:2" else ("B", "sizes", "A" if factor == "sequence" else "gradient")
    for name in walk.linears(1):
        for key in keys:
            torch.testing.assert_close(
                moments[f"{name}.{key}"],
                sum(one[f"{name}.{key}"] for one, _ in apart),
                rtol=1e-4,
                atol=1e-4 * float(moments[f"{name}.{key}"].max()),
            )
    if factor == "shampoo:2":  # the second step weighs by the sums of the first
        x, g = [], []

        def collect(_rows, name, inputs, gradients_):
            if name == "mlp.up_proj":
                x.append(inputs.flatten(0, 1)), g.append(gradients_.flatten(0, 1))

        gradients.block_gradients(walk, 1, walk.apply(0, hidden), gradient, collect)
        x, g = torch.cat(x).double(), torch.cat(g).double()
        A = second_moment(x, g.square().sum(-1))
        B = second_moment(g, torch.einsum("ti,ij,tj->t", x, A, x))
        found = unpack(moments["mlp.up_proj.B"], len(B)).double()
        assert_near(found / found.norm(), B / B.norm())


def test_more_samples_are_nearer_to_the_exact_fisher():
    model, ids = tiny_model("llama", **SMALL | {"initializer_range": 0.4}), tokens(1, 5, vocabulary=8)
    walk = Walk(model, 5)
    hidden = inputs_of_blocks(walk, ids)
    last = walk.apply(1, hidden[1])
    exact = exact_fisher(model, ids, "model.layers.1.mlp.down_proj")
    error, mean = {}, {}
    for samples in (1, 4):
        found = []
        for seed in range(80):
            gradient = gradients.head_gradient(walk, last, seed, lambda *_: None, samples=samples)
            moments, _ = gradients.block_moments(walk, 1, hidden[1], gradient, weighting("kfac"))
            found.append(unpack(moments["mlp.down_proj.B"], len(exact)).double() / samples)
        found = torch.stack(found)
        error[samples] = float((found - exact).square().sum((1, 2)).mean().sqrt() / exact.norm())
        mean[samples] = float((found.mean(0) - exact).norm() / exact.norm())
    assert error[4] < 0.6 * error[1] and mean[4] < 0.1  # fair, and with less than a third of the variance


def test_errors_held_out_are_those_of_every_sample(tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 8, batch=2), tokens(5, 8, vocabulary=8)
    estimator = BackpropEstimator(walk, ids, tmp_path, seed=SEED, held=2, samples=3)
    hidden = inputs_of_blocks(walk, ids)
    gradient = gradients.head_gradient(walk, walk.apply(1, hidden[1]), SEED, lambda *_: None, samples=3)
    E = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(5, 3, 8, dtype=torch.float64)
    calls = iter(range(100))

    def collect(rows, name, x, g):
        if name == "mlp.up_proj":
            expected[rows, next(calls) % 3] = torch.einsum("bti,ij,btj->bt", g.double(), E.double(), x.double())

    gradients.block_gradients(walk, 1, hidden[1], gradient, collect)
    heldout = estimator.heldout(1)
    assert_near(heldout.changes("mlp.up_proj", E), expected[3:], rtol=1e-3)
    assert len(heldout.tokens("mlp.up_proj")[0]) == 2 * 3 * 8
    with pytest.raises(RecipeError, match=r"samples \(3 there, 1 here\)"):
        BackpropEstimator(walk, ids, tmp_path, seed=SEED, held=2)


def test_samples_need_sampled_labels_and_room():
    with pytest.raises(RecipeError, match="samples 2 with labels empirical, of which a token has one"):
        recipes.from_dict({"labels": "empirical", "samples": 2}).resolve()
    walk, ids = Walk(tiny_model("llama", **SMALL), 8), tokens(2, 8, vocabulary=8)
    one = gradients.boundary_bytes(walk, ids)
    assert gradients.slots_in(walk, ids, 6 * one) == 3 and gradients.slots_in(walk, ids, 8 * one, samples=3) == 3
    with pytest.raises(RecipeError, match=f"at least {8 * one:,} bytes"):
        gradients.slots_in(walk, ids, 7 * one, samples=3)
