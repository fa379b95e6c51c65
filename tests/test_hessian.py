import copy
from functools import partial

import pytest
import torch
from tiny import KINDS, OTHERS, tiny_model

from bakron.errors import FactorError, ModelError, OutputError, RecipeError
from bakron.hessian import ESTIMATORS, FACTORS, BackpropEstimator, InputEstimator, backprop, gradients
from bakron.hessian.factor import LEAF, Gram, pack, unpack
from bakron.models.layout import LAYOUTS
from bakron.models.walk import Walk as AnyWalk

Walk = partial(AnyWalk, precision="float32")  # bfloat16 products, where the processor has them, are not what is compared with

SEED = 5
SMALL = dict(vocab_size=8, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
# The definition of each factorisation: weights a_t and b_t of a token from |x_t|^2 and |g_t|^2.
WEIGHTS = {"kfac": lambda x, g: (1 + 0 * x, 1 + 0 * g), "shampoo": lambda x, g: (g, x), "mixed": lambda x, g: (g, 1 + 0 * x)}


def tokens(sequences, length, vocabulary=64):
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1))


def inputs_of_blocks(walk, ids):
    hidden = [walk.embed(ids)]
    for i in range(len(walk) - 1):
        hidden.append(walk.apply(i, hidden[-1]))
    return hidden


def sampled_labels(logits, seed):
    """As `head_gradient` draws them: one generator, chunks of HEAD_TOKENS tokens."""
    generator = torch.Generator().manual_seed(seed)
    chunks = torch.softmax(logits.flatten(0, -2).float(), -1).split(gradients.HEAD_TOKENS)
    return torch.cat([gradients.sample(chunk, generator) for chunk in chunks])


def autograd(model, ids, seed):
    """Input and output gradient of every linear by one plain backward pass in float64, `{linear: (x [t, n], g [t, m])}`."""
    model = copy.deepcopy(model).double().requires_grad_()
    seen = {}

    def keep(name):
        def hook(_module, arguments, output):
            output.retain_grad()
            seen[name] = (arguments[0], output)

        return hook

    for name, module in model.named_modules():
        if (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D") and name != "lm_head":
            module.register_forward_hook(keep(name))
    logits = model(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), sampled_labels(logits.detach(), seed), reduction="sum").backward()
    return {name: (x.detach().flatten(0, -2), y.grad.flatten(0, -2)) for name, (x, y) in seen.items()}, model


def second_moment(z, weight):
    return torch.einsum("t,ti,tj->ij", weight, z, z)


def assert_near(actual, expected, rtol=1e-4):
    """Entries below the size of float32 noise of the matrix count as equal."""
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()) / 10)


# --- against plain autograd ------------------------------------------------------------------------------------------------------------


def test_every_layout_has_a_tiny_model():
    assert {tiny_model(kind).config.model_type for kind in (*KINDS, *OTHERS)} == set(LAYOUTS)


@pytest.mark.parametrize("factor", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_backprop_factors_are_those_of_plain_autograd(kind, factor, tmp_path):
    model, ids = tiny_model(kind), tokens(3, 50)
    assert ids.numel() > gradients.HEAD_TOKENS
    walk = Walk(model, 50, batch=2)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor=factor, seed=SEED)
    expected, _ = autograd(model, ids, SEED)
    compared = set()
    for i, hidden in enumerate(inputs_of_blocks(walk, ids)):
        krons = estimator.block(i, hidden)
        assert estimator.tokens == dict.fromkeys(walk.linears(i), 150)
        for name, kron in krons.items():
            x, g = expected[f"{walk.prefix(i)}.{name}"]
            a, b = WEIGHTS[factor](x.square().sum(-1), g.square().sum(-1))
            assert_near(kron.A.H, second_moment(x, a))
            assert_near(kron.B.H, second_moment(g, b))
            compared.add(f"{walk.prefix(i)}.{name}")
    assert compared == set(expected) and len(compared) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_input_factors_are_second_moments_of_the_inputs(kind):
    model, ids = tiny_model(kind), tokens(3, 20)
    walk = Walk(model, 20, batch=2)
    estimator = InputEstimator(walk)
    expected, _ = autograd(model, ids, SEED)
    for i, hidden in enumerate(inputs_of_blocks(walk, ids)):
        for name, kron in estimator.block(i, hidden).items():
            x, _ = expected[f"{walk.prefix(i)}.{name}"]
            assert kron.B is None
            assert_near(kron.A.H, x.T @ x)
        assert estimator.tokens == dict.fromkeys(walk.linears(i), 60)


def test_a_comes_from_the_inputs_given_and_b_from_the_original_model(tmp_path):
    model, ids = tiny_model("llama"), tokens(2, 16)
    walk = Walk(model, 16)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor="kfac", seed=SEED)
    hidden = walk.embed(ids)
    original, moved = estimator.block(0, hidden), estimator.block(0, 2 * hidden + 1)
    for name in walk.linears(0):
        assert torch.equal(original[name].B.H, moved[name].B.H)
        assert not torch.allclose(original[name].A.H, moved[name].A.H)


@pytest.mark.parametrize("batch", [1, 4])
def test_batch_changes_nothing_but_rounding(batch, tmp_path):
    ids = tokens(4, 16)
    reference = Walk(tiny_model("mistral"), 16, batch=3)
    walk = Walk(tiny_model("mistral"), 16, batch=batch)
    expected = BackpropEstimator(reference, ids, tmp_path / "a").block(0, reference.embed(ids))
    found = BackpropEstimator(walk, ids, tmp_path / "b").block(0, walk.embed(ids))
    for name, kron in expected.items():
        assert_near(found[name].A.H, kron.A.H.double())
        assert_near(found[name].B.H, kron.B.H.double())


@pytest.mark.parametrize("factor", FACTORS)
def test_every_factorisation_is_exact_on_one_token(factor, tmp_path):
    """A (x) B is the outer product of the weight's gradient, up to the constant that changes no rounding."""
    model, ids = tiny_model("llama", **SMALL), torch.tensor([[3]])
    walk = Walk(model, 1)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor=factor, seed=SEED)
    _, differentiated = autograd(model, ids, SEED)
    for i, hidden in enumerate(inputs_of_blocks(walk, ids)):
        krons = estimator.block(i, hidden)
        for name, kron in krons.items():
            G = differentiated.get_submodule(f"{walk.prefix(i)}.{name}").weight.grad
            of_v = differentiated.get_submodule(f"{walk.prefix(i)}.self_attn.v_proj").weight.grad
            if float(G.norm()) < 1e-9 * float(of_v.norm()):  # q and k: one token attends to itself whatever they are
                assert name in ("self_attn.q_proj", "self_attn.k_proj")
                assert float(kron.B.H.abs().max()) < 1e-9 * float(krons["self_attn.v_proj"].B.H.abs().max())  # rounding, on some processors
                continue
            vec = G.T.reshape(-1)  # column-major
            exact = torch.outer(vec, vec)
            H = torch.kron(kron.A.H.double(), kron.B.H.double())
            assert_near(H / H.trace(), exact / exact.trace())


# --- sampled labels ---------------------------------------------------------------------------------------------------------------------


def test_sample_follows_the_probabilities():
    p = torch.tensor([0.0, 0.05, 0.3, 0.0, 0.45, 0.2, 0.0])
    draws = 50_000
    found = torch.bincount(gradients.sample(p.expand(draws, -1), torch.Generator().manual_seed(0)), minlength=7)
    assert found[p == 0].sum() == 0
    expected = draws * p[p > 0]
    chi_square = float(((found[p > 0] - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 99.9 % quantile at 3 degrees of freedom


def test_each_row_is_sampled_from_its_own_distribution():
    p = torch.eye(6).repeat(20, 1)
    assert torch.equal(gradients.sample(p, torch.Generator().manual_seed(3)), torch.arange(6).repeat(20))


def test_large_vocabulary_of_equal_probabilities_is_covered_to_its_ends():
    size = 50_000
    found = gradients.sample(torch.full((200, size), 1 / size), torch.Generator().manual_seed(0))
    assert found.min() < 0.02 * size and found.max() > 0.98 * size and len(found.unique()) > 195


def test_seeds_draw_different_labels():
    p = torch.full((64, 16), 1 / 16)
    first, again, other = (gradients.sample(p, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and (first != other).float().mean() > 0.8


def exact_fisher(model, ids, linear):
    """Sum over tokens of E[g_t g_t^T] at a linear's output, labels independent from token to token: sum_ts J_st^T (diag p_s - p_s p_s^T) J_st."""
    model = copy.deepcopy(model).double().requires_grad_()
    seen = []
    model.get_submodule(linear).register_forward_hook(lambda _m, _a, output: seen.append(output))
    logits = model(input_ids=ids, use_cache=False).logits[0]
    (y,) = seen
    J = torch.stack(
        [torch.stack([torch.autograd.grad(entry, y, retain_graph=True)[0][0] for entry in row]) for row in logits]
    )  # [s, v, t, m]
    p = torch.softmax(logits.detach(), -1)
    F = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("svtm,svw,swtn->mn", J, F, J)


@pytest.mark.parametrize("linear", ["mlp.down_proj", "self_attn.v_proj"])
def test_sampled_factor_converges_to_the_exact_fisher(linear):
    """`down_proj` of the last block sees its own token's label; `v_proj` of the first one also those of all later tokens."""
    model, ids = tiny_model("llama", **SMALL | {"initializer_range": 0.4}), tokens(1, 5, vocabulary=8)
    walk = Walk(model, 5)
    hidden = inputs_of_blocks(walk, ids)
    last = walk.apply(1, hidden[1])
    i = 1 if linear == "mlp.down_proj" else 0
    exact = exact_fisher(model, ids, f"{walk.prefix(i)}.{linear}")
    total, error = torch.zeros_like(exact), {}
    for seed in range(300):
        gradient = gradients.head_gradient(walk, last, seed, lambda *_: None)
        for j in range(1, i - 1, -1):
            moments, gradient = gradients.block_moments(walk, j, hidden[j], gradient, FACTORS["kfac"])
        total += unpack(moments[f"{linear}.B"], len(exact))
        error[seed + 1] = float((total / (seed + 1) - exact).norm() / exact.norm())
    assert error[300] < 0.1
    assert error[300] < 0.5 * error[10]


def test_callers_random_state_and_precision_stay(tmp_path):
    walk, ids = Walk(tiny_model("llama"), 8), tokens(2, 8)
    settings = (torch.get_default_dtype, torch.is_grad_enabled, torch.get_num_threads, torch.get_float32_matmul_precision)
    random, before = torch.get_rng_state(), [setting() for setting in settings]
    BackpropEstimator(walk, ids, tmp_path).block(0, walk.embed(ids))
    assert torch.equal(random, torch.get_rng_state()) and before == [setting() for setting in settings]
    assert all(parameter.grad is None for parameter in walk.model.parameters())


def test_default_dtype_of_the_caller_does_not_matter(tmp_path):
    ids = tokens(2, 8)
    results = []
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        walk = Walk(tiny_model("llama"), 8)
        torch.set_default_dtype(dtype)
        try:
            results.append(BackpropEstimator(walk, ids, tmp_path / name, factor="shampoo").block(0, walk.embed(ids)))
        finally:
            torch.set_default_dtype(torch.float32)
    for name, kron in results[0].items():
        assert results[1][name].A.H.dtype == torch.float32
        assert torch.equal(kron.A.H, results[1][name].A.H) and torch.equal(kron.B.H, results[1][name].B.H)


# --- sums and triangles -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1, 7, LEAF, LEAF + 1, 2 * LEAF + 91])
def test_gram_is_the_whole_weighted_product(size, weighted):
    g = torch.Generator().manual_seed(size)
    Z, weight = torch.randn(3, 10, size, generator=g), torch.rand(3, 10, generator=g)
    weight[1, 4] = 0.0
    gram = Gram(size)
    for z, w in ((Z[:2], weight[:2]), (Z[2:], weight[2:])):
        gram.add(z, w if weighted else None)
    flat = Z.reshape(30, size).double()
    expected = torch.einsum("t,ti,tj->ij", (weight if weighted else torch.ones(3, 10)).reshape(30).double(), flat, flat)
    assert gram.tokens == 30 - weighted  # one weighs nothing
    assert torch.equal(gram.value(), gram.value().T)
    torch.testing.assert_close(gram.value().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gram_of_half_precision_is_summed_in_float32(dtype):
    Z = (20 * torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))).to(dtype)
    gram = Gram(32)
    gram.add(Z)
    assert float(gram.value().max()) > torch.finfo(torch.float16).max  # where sums in half precision overflow
    torch.testing.assert_close(gram.value().double(), Z.double().T @ Z.double(), rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("n", [1, 2, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 1, 4 * LEAF + 7])
def test_packed_triangle_comes_back(n):
    H = torch.randn(n, n, generator=torch.Generator().manual_seed(n))
    H = H + H.T
    packed = pack(H)
    assert torch.equal(unpack(packed, n), H)
    assert packed.numel() <= n * (n + 1) / 2 + n * LEAF / 2
    if n > LEAF:
        with pytest.raises(ValueError, match=f"{packed.numel() + 1} packed entries are not a symmetric matrix \\[{n}, {n}\\]"):
            unpack(torch.cat([packed, packed[:1]]), n)


# --- what is shared, kept and refused ---------------------------------------------------------------------------------------------------


def factors_of(name, factor, walk, ids, store):
    estimator = ESTIMATORS[name](walk, ids, store, factor=factor) if name == "backprop" else ESTIMATORS[name](walk)
    return estimator.block(0, walk.embed(ids))


@pytest.mark.parametrize("name, factor", [("input", None), *[("backprop", factor) for factor in FACTORS]])
def test_linears_that_see_one_input_share_its_factor_and_never_b(name, factor, tmp_path):
    walk = Walk(tiny_model("qwen3"), 8)
    krons = factors_of(name, factor, walk, tokens(2, 8), tmp_path)
    by_gradient = name == "backprop" and FACTORS[factor].a_by_gradient
    distinct = {id(kron.A) for kron in krons.values()}
    assert len(distinct) == (7 if by_gradient else 4)
    if not by_gradient:
        for names in walk.layout.shared_inputs:
            assert len({id(krons[one].A) for one in names}) == 1
    if name == "backprop":
        assert len({id(kron.B) for kron in krons.values()}) == 7


def test_gradient_pass_is_kept_and_reused(tmp_path, monkeypatch):
    walk, ids = Walk(tiny_model("llama"), 8), tokens(2, 8)
    first = BackpropEstimator(walk, ids, tmp_path, factor="mixed", seed=3, fingerprint="f").block(1, walk.embed(ids))

    def fail(*_, **__):
        raise AssertionError("a second gradient pass")

    monkeypatch.setattr(backprop, "gradient_pass", fail)
    again = BackpropEstimator(walk, ids, tmp_path, factor="mixed", seed=3, fingerprint="f").block(1, walk.embed(ids))
    for name, kron in first.items():
        assert torch.equal(kron.A.H, again[name].A.H) and torch.equal(kron.B.H, again[name].B.H)
    BackpropEstimator(walk, ids, tmp_path, factor="kfac", seed=3, fingerprint="f")  # weighs B alike
    (tmp_path / backprop.MANIFEST).unlink()
    with pytest.raises(AssertionError, match="a second gradient pass"):  # an unfinished pass is none
        BackpropEstimator(walk, ids, tmp_path, factor="mixed", seed=3, fingerprint="f")


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(seed=1), "seed (0 there, 1 here)"),
        (dict(fingerprint="other"), "model (f there, other here)"),
        (dict(factor="shampoo"), "b_by_input (False there, True here)"),
        (dict(ids=tokens(2, 8) + 1), "tokens ("),
        (dict(ids=tokens(4, 8)), "shape ([2, 8] there, [4, 8] here)"),
    ],
)
def test_gradients_of_another_run_are_refused_with_the_difference(change, named, tmp_path):
    walk = Walk(tiny_model("llama"), 8)
    options = dict(ids=tokens(2, 8), factor="mixed", seed=0, fingerprint="f")
    BackpropEstimator(walk, store=tmp_path, **options)
    with pytest.raises(RecipeError) as caught:
        BackpropEstimator(walk, store=tmp_path, **options | change)
    assert str(tmp_path) in str(caught.value) and named in str(caught.value)
    assert "Choose another directory" in str(caught.value)


def test_damaged_gradients_name_their_file(tmp_path):
    walk, ids = Walk(tiny_model("llama"), 8), tokens(2, 8)
    estimator = BackpropEstimator(walk, ids, tmp_path)
    file = tmp_path / "block_0001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(OutputError) as caught:
        estimator.block(1, walk.embed(ids))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.o_proj"])
def test_inputs_that_are_not_finite_name_the_linear(name, tmp_path):
    model, ids = tiny_model("llama"), tokens(2, 8)
    with torch.no_grad():
        if name == "mlp.down_proj":
            model.model.layers[1].mlp.up_proj.weight *= 1e25
            model.model.layers[1].mlp.gate_proj.weight *= 1e20
        else:
            model.model.layers[1].self_attn.v_proj.weight *= 1e25  # finite, but not its square
    walk = Walk(model, 8)
    hidden = inputs_of_blocks(walk, ids)[1]
    with pytest.raises(FactorError) as caught:
        InputEstimator(walk).block(1, hidden)
    assert f"inputs of model.layers.1.{name}: a Hessian factor with inf at" in str(caught.value)
    if name == "mlp.down_proj":
        with pytest.raises(ModelError) as caught:
            BackpropEstimator(walk, ids, tmp_path)
        assert "activations are not finite, first at model.layers.1.mlp.down_proj in sequence 0" in str(caught.value)


def test_gradients_that_are_not_finite_name_the_linear(tmp_path):
    model, ids = tiny_model("llama"), tokens(2, 8)
    with torch.no_grad():
        model.model.norm.weight *= 1e20
        model.lm_head.weight *= 1e30
    with pytest.raises(ModelError) as caught:
        BackpropEstimator(Walk(model, 8), ids, tmp_path)
    assert "gradients are not finite, first at model.layers.1." in str(caught.value) and " in sequence " in str(caught.value)
    assert not (tmp_path / backprop.MANIFEST).exists()


def test_progress_covers_the_whole_pass(tmp_path):
    told = []
    walk, ids = Walk(tiny_model("llama"), 8), tokens(2, 8)
    BackpropEstimator(walk, ids, tmp_path, progress=lambda *step: told.append(step))
    assert told == [("forward", 1, 2), ("forward", 2, 2), ("head", 16, 16), ("backward", 1, 2), ("backward", 2, 2)]
