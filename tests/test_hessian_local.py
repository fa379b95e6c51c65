"""Local Hessians against finite differences of the losses they stand for, in float64, through the models' own attention and MLP."""

import copy
from typing import get_args

import pytest
import torch
from test_hessian import assert_near, inputs_of_blocks, tokens
from tiny import KINDS, tiny_model

from bakron import config, recipes
from bakron.errors import RecipeError
from bakron.grids import UniformGrid
from bakron.hessian import ESTIMATORS, InputEstimator
from bakron.hessian.factor import FACTORS
from bakron.hessian.local import PARTS
from bakron.kron import Kron
from bakron.models.attention import Attention
from bakron.models.layout import Layout
from bakron.models.walk import Walk as AnyWalk
from bakron.solver import solve

Q, K, V, O, GATE, UP, DOWN = Layout().roles.values()  # noqa: E741
T, N = 70, 2  # longer than attention's chunk of positions
LOCAL = {
    "attention-local": (Q, K),
    "value-local": (V,),
    "heads-local": (Q, K, V),
    "mlp-local": (UP, GATE),
    "fully-local": (Q, K, V, UP, GATE),
}
SHAPES = {kind: {} for kind in KINDS} | {"one group": {"num_key_value_heads": 1}, "no groups": {"num_key_value_heads": 4}}


class Case:
    """Block 1 of a tiny model in float64, its inputs, and what flows through its linears."""

    def __init__(self, kind):
        self.model = tiny_model(kind if kind in KINDS else "llama", **SHAPES[kind]).double()
        self.walk = AnyWalk(self.model, T, batch=2, precision="float32")
        self.hidden = inputs_of_blocks(self.walk, tokens(N, T))[1]
        self.block, self.linears = self.walk.blocks[1], self.walk.linears(1)
        self.attention = Attention(self.walk, 1)
        self.seen = self.flow()

    def flow(self, **changes):
        """`{linear: (input, output)}`, `[N, T, .]`, and the outputs of attention and MLP, with weights changed by name."""
        seen = {}
        block = copy.deepcopy(self.block)
        handles = [*self.linears, "self_attn", "mlp"]
        for name in handles:
            module = block.get_submodule(name)
            if name in changes:
                module.weight.data += changes[name]

            def hook(_m, arguments, output, name=name):
                seen[name] = (arguments[0] if arguments else None, output[0] if isinstance(output, tuple) else output)

            module.register_forward_hook(hook)
        with torch.no_grad():
            block(self.hidden, **self.walk.arguments(1))
        return seen

    def error(self, name, seed=0):
        weight = self.linears[name].weight
        return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * weight.std()

    def scores(self, seen):
        """All scores that the causal mask and the window keep, `[heads, kept]`, from the model's own norm and rotation."""
        length = torch.arange(T)
        distance = length[:, None] - length
        kept = (distance >= 0) & (distance < (self.attention.window or T))
        result = []
        for q, k in zip(seen[Q][1], seen[K][1]):
            keys = self.attention.rotated("k", k).repeat_interleave(self.attention.groups, 0)
            result.append((self.attention.rotated("q", q) @ keys.mT)[:, kept])
        return torch.stack(result)

    def token_curvatures(self, name):
        """Tokens x `[t, n]` and curvatures b `[t, m, m]` whose products sum to the Hessian, straight from the formulas."""
        m, heads = self.linears[name].out_features, self.linears[O].weight.unflatten(1, (-1, self.attention.head_dim)).transpose(0, 1)
        xs, bs = [], []
        for s in range(N):
            x, q, k = self.seen[Q][0][s], self.seen[Q][1][s], self.seen[K][1][s]
            rotated_q, rotated_k = self.attention.rotated("q", q), self.attention.rotated("k", k)
            if name in (Q, K):
                z, other, side = (q, rotated_k, "q") if name == Q else (k, rotated_q, "k")
                b = torch.zeros(T, m, m, dtype=torch.float64)
                for positions, blocks in self.attention.score_curvature(side, z, other):
                    for t, one in zip(range(T)[positions], blocks.transpose(0, 1)):
                        b[t] = torch.block_diag(*one)
                xs.append(x), bs.append(b)
            elif name == V:
                d = self.attention.head_dim
                for h, W in enumerate(heads):
                    g = h // self.attention.groups
                    p = self.attention.probabilities(rotated_q[h][None], rotated_k[g])[0]
                    b = torch.zeros(m, m, dtype=torch.float64)
                    b[g * d : (g + 1) * d, g * d : (g + 1) * d] = W.T @ W
                    xs.append(p @ x), bs.append(b.expand(T, m, m))
            else:
                z, up = self.seen[GATE][1][s], self.seen[UP][1][s]
                g = torch.nn.functional.silu(z)
                if name == GATE:
                    sigmoid = torch.sigmoid(z)
                    g = (sigmoid + z * sigmoid * (1 - sigmoid)) * up
                W = self.linears[DOWN].weight
                xs.append(self.seen[UP][0][s]), bs.append(g[:, :, None] * g[:, None, :] * (W.T @ W))
        return torch.cat(xs).detach(), torch.cat(bs).detach()


@pytest.fixture(scope="module", params=SHAPES)
def case(request):
    return Case(request.param)


def quadratic(x, b, E):
    """`vec(E)^T (sum_t x x^T (x) b_t) vec(E)`."""
    y = x @ E.T
    return float(torch.einsum("ti,tij,tj->", y, b, y))


# --- formulas ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [Q, K])
def test_score_curvature_is_that_of_the_models_scores(name, case):
    E, step = case.error(name), 1e-4
    ahead, behind = (case.scores(case.flow(**{name: sign * step * E})) for sign in (1, -1))
    measured = float(((ahead - behind) / (2 * step)).square().sum())
    assert quadratic(*case.token_curvatures(name), E) == pytest.approx(measured, rel=1e-4)  # the models' q/k-norm computes in float32


def test_value_curvature_is_that_of_each_heads_share_of_the_output(case):
    E = case.error(V)
    change = case.flow(**{V: E})[O][0] - case.seen[O][0]
    heads = case.linears[O].weight.unflatten(1, (-1, case.attention.head_dim))
    shares = torch.einsum("nthd,jhd->nthj", change.unflatten(-1, (-1, case.attention.head_dim)), heads.detach())
    measured = float(shares.square().sum())
    assert quadratic(*case.token_curvatures(V), E) == pytest.approx(measured, rel=1e-5)


def test_value_curvature_of_one_head_is_that_of_the_attention_output(case):
    E, d = case.error(V), case.attention.head_dim
    E[d:] = 0
    if case.attention.groups > 1:
        pytest.skip("heads of a group add up in the output: cross terms are left out")
    measured = float((case.flow(**{V: E})["self_attn"][1] - case.seen["self_attn"][1]).square().sum())
    assert quadratic(*case.token_curvatures(V), E) == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("name", [UP, GATE])
def test_mlp_curvature_is_that_of_its_output(name, case):
    E, step = case.error(name), 1e-4
    ahead, behind = (case.flow(**{name: sign * step * E})["mlp"][1] for sign in (1, -1))
    measured = float(((ahead - behind) / (2 * step)).square().sum())
    assert quadratic(*case.token_curvatures(name), E) == pytest.approx(measured, rel=1e-6)


def test_probabilities_are_those_of_the_model(case):
    """Weighted by them, inputs of v become, through W_V, inputs of o."""
    d, bias = case.attention.head_dim, case.linears[V].bias
    for s in range(N):
        q, k = (case.attention.rotated(side, case.seen[name][1][s]) for side, name in (("q", Q), ("k", K)))
        for h in range(len(q)):
            g = h // case.attention.groups
            y = case.attention.probabilities(q[h][None], k[g])[0] @ case.seen[V][0][s] @ case.linears[V].weight[g * d : (g + 1) * d].T
            y = y if bias is None else y + bias[g * d : (g + 1) * d]
            torch.testing.assert_close(case.seen[O][0][s, :, h * d : (h + 1) * d], y, rtol=1e-5, atol=1e-6)


# --- factors -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["kfac", "shampoo", "mixed"])
def test_factors_are_those_of_the_token_curvatures(factor, case):
    krons = ESTIMATORS["fully-local"](case.walk, factor=factor).block(1, case.hidden)
    plain = InputEstimator(case.walk).block(1, case.hidden)
    for name, kron in krons.items():
        if name not in LOCAL["fully-local"]:
            assert kron.B is None and torch.equal(kron.A.H, plain[name].A.H)
            continue
        x, b = case.token_curvatures(name)
        a = b.diagonal(dim1=-2, dim2=-1).sum(-1) if FACTORS[factor].a_by_gradient else torch.ones(len(x), dtype=torch.float64)
        w = x.square().sum(-1) if FACTORS[factor].b_by_input else torch.ones(len(x), dtype=torch.float64)
        A, B = torch.einsum("t,ti,tj->ij", a, x, x), torch.einsum("t,tij->ij", w, b)
        assert_near(kron.A.H / kron.A.H.norm(), A / A.norm(), rtol=1e-5)
        whole = torch.block_diag(*kron.B.H) if kron.B.H.ndim == 3 else kron.B.H
        assert_near(whole / whole.norm(), B / B.norm(), rtol=1e-5)


@pytest.mark.parametrize("name", LOCAL)
def test_each_estimator_has_its_linears_and_the_plain_input_for_the_rest(name):
    walk = AnyWalk(tiny_model("qwen3"), 16, precision="float32")
    hidden = walk.embed(tokens(2, 16))
    estimator, whole = ESTIMATORS[name](walk, factor="mixed"), ESTIMATORS["fully-local"](walk, factor="mixed").block(0, hidden)
    krons = estimator.block(0, hidden)
    assert {one for one, kron in krons.items() if kron.B is not None} == set(LOCAL[name])
    assert estimator.tokens == dict.fromkeys(walk.linears(0), 32)
    for one in LOCAL[name]:
        assert torch.equal(krons[one].A.H, whole[one].A.H) and torch.equal(krons[one].B.H, whole[one].B.H)
    kfac = ESTIMATORS[name](walk, factor="kfac").block(0, hidden)
    assert len({id(kron.A) for kron in kfac.values()}) == 4 + (V in LOCAL[name])  # unweighted A's are shared


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_heads_are_rounded_as_one_block_diagonal_factor_would_be(kind):
    walk = AnyWalk(tiny_model(kind).requires_grad_(False), 16, precision="float32")
    krons = ESTIMATORS["fully-local"](walk, factor="kfac", dtype=torch.float64).block(0, walk.embed(tokens(2, 16)))
    linears = walk.linears(0)
    for name, heads in ((Q, 4), (K, 2), (V, 2)):
        kron = krons[name]
        assert list(kron.B.H.shape) == [heads, linears[name].out_features // heads, linears[name].out_features // heads]
        W = linears[name].weight.double()
        grid = UniformGrid.fit(W, 7, 32, "mse")
        by_head = solve(W, kron.damp(0.1, 0.5), grid)
        whole = solve(W, Kron(kron.A, torch.block_diag(*kron.B.H)).damp(0.1, 0.5), grid)
        assert torch.equal(by_head.codes, whole.codes) and by_head.loss == pytest.approx(whole.loss, rel=1e-9)
        assert not torch.equal(by_head.codes, solve(W, Kron(kron.A).damp(0.1), grid).codes)


def test_hooks_and_graphs_are_gone_afterwards():
    walk = AnyWalk(tiny_model("llama"), 16, precision="float32")
    ESTIMATORS["fully-local"](walk, factor="shampoo").block(0, walk.embed(tokens(2, 16)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in walk.model.modules())
    assert all(parameter.grad is None for parameter in walk.model.parameters())


# --- names and refusals ------------------------------------------------------------------------------------------------------------------


def test_recipe_and_table_know_the_same_estimators():
    assert set(get_args(config.Hessian)) == set(ESTIMATORS) == {"input", "backprop", *LOCAL}
    assert set(LOCAL) == {f"{part}-local" for part in PARTS} | {"heads-local", "fully-local"}


@pytest.mark.parametrize("hessian", LOCAL)
def test_recipe_of_a_local_hessian(hessian):
    recipe = recipes.from_dict({"hessian": hessian}).resolve()
    assert (recipe.factor, recipe.damp_a, recipe.damp_b, recipe.inputs) == ("mixed", 0.1, 1.0, "quantized")
    with pytest.raises(RecipeError) as caught:
        recipes.from_dict({"hessian": hessian, "factor": "sequence"}).resolve()
    assert f"factor sequence with hessian {hessian}; expected kfac, shampoo or mixed" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        recipes.from_dict({"hessian": hessian, "factors": "cache"}).resolve()
    assert f"factors would do nothing with hessian {hessian}, which takes no gradients" in str(caught.value)
    with pytest.raises(RecipeError):
        ESTIMATORS[hessian](AnyWalk(tiny_model("llama"), 4), factor="kl")
