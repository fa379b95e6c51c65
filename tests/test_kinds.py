"""Architectures whose blocks are not Llama's, from gradients to the reloaded checkpoint. That blocks replay the model is in test_models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hessian import assert_near, autograd, inputs_of_blocks, second_moment, tokens
from tiny import MIXTURES, OTHERS, save_tiny, tiny_model
from transformers import AutoModelForCausalLM

import bakron
from bakron import evaluation
from bakron.errors import RecipeError
from bakron.export import FORMATS
from bakron.hessian import ESTIMATORS, BackpropEstimator, InputEstimator
from bakron.models import load
from bakron.models.attention import Attention
from bakron.models.layout import LAYOUTS, check_format
from bakron.models.walk import Walk

SEED = 5
TEXT = "the quick brown fox jumps over the lazy dog; 0123456789.\n" * 60
SHAPES = {kind: (kind, {}) for kind in OTHERS} | {"phi-norm": ("phi", {"qk_layernorm": True})}
ATTENTION = [shape for shape, (kind, _) in SHAPES.items() if kind != "gpt2"]


def having(part):
    return [shape for shape, (kind, changes) in SHAPES.items() if part in LAYOUTS[tiny_model(kind, **changes).config.model_type].local]


def walk_of(shape, length, double=True):
    kind, changes = SHAPES[shape]
    model = tiny_model(kind, **changes)
    return Walk(model.double() if double else model, length, batch=2, precision="float32")


def flow(walk, i, hidden, changes=()):
    """`{linear: (input, output)}` of block i, and the outputs of its parts; some weights changed for the time of it."""
    seen, linears = {}, walk.linears(i)
    modules = {name: walk.blocks[i].get_submodule(name) for name in (*linears, "mlp")}

    def keep(name):
        return lambda _m, arguments, output: seen.update({name: (arguments[0], output)})

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    for name, change in dict(changes).items():
        linears[name].weight.data.add_(change)
    with torch.no_grad():
        walk.run(i, hidden)
    for name, change in dict(changes).items():
        linears[name].weight.data.sub_(change)
    for handle in handles:
        handle.remove()
    return seen


# --- gradients ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OTHERS)
def test_factors_are_those_of_plain_autograd(kind, tmp_path):
    walk, ids = walk_of(kind, 24, double=False), tokens(3, 24)
    expected, _ = autograd(walk.model, ids, SEED)
    backprop, plain = BackpropEstimator(walk, ids, tmp_path, factor="shampoo", seed=SEED), InputEstimator(walk)
    compared = set()
    for i, hidden in enumerate(inputs_of_blocks(walk, ids)):
        inputs = plain.block(i, hidden)
        for name, kron in backprop.block(i, hidden).items():
            x, g = expected[f"{walk.prefix(i)}.{name}"]
            assert_near(kron.A.H, second_moment(x, g.square().sum(-1)), rtol=1e-3)
            assert_near(kron.B.H, second_moment(g, x.square().sum(-1)), rtol=1e-3)
            assert_near(inputs[name].A.H, x.T @ x, rtol=1e-3)
            assert len(x) == backprop.tokens[name] == plain.tokens[name] or kind not in MIXTURES
            compared.add(f"{walk.prefix(i)}.{name}")
    assert compared == set(expected)


# --- local Hessians ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", [0, 1])  # of the models with windows, one slides and one does not
@pytest.mark.parametrize("shape", ATTENTION)
def test_probabilities_are_those_of_the_model(shape, i):
    """Weighted by them, inputs of v become, through W_V, inputs of o."""
    walk = walk_of(shape, 20)
    seen, attention, roles = flow(walk, i, walk.embed(tokens(1, 20))), Attention(walk, i), walk.layout.roles
    q, k = (attention.rotated(side, seen[roles[side]][1][0]) for side in "qk")
    v = seen[roles["v"]][1][0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
    mixed = [attention.probabilities(q[h][None], k[h // attention.groups])[0] @ v[h // attention.groups] for h in range(len(q))]
    torch.testing.assert_close(torch.cat(mixed, -1), seen[roles["o"]][0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("shape", having("attention"))
def test_score_curvature_is_that_of_the_models_scores(shape, side):
    """All of Phi's head but what is not rotated, Gemma's norms, and each block's own rotary base and window."""
    length, step = 70, 1e-4  # longer than attention's chunk of positions
    walk = walk_of(shape, length)
    for i, hidden in enumerate(inputs_of_blocks(walk, tokens(1, length))):
        attention, roles = Attention(walk, i), walk.layout.roles
        seen = flow(walk, i, hidden)
        z = {one: seen[roles[one]][1][0] for one in "qk"}
        other = "k" if side == "q" else "q"
        x, weight = seen[roles[side]][0][0], walk.linears(i)[roles[side]].weight.detach()
        change = x @ torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).T / 10
        distance = torch.arange(length)[:, None] - torch.arange(length)
        kept = (distance >= 0) & (distance < (attention.window or length))

        def scores(moved, side=side, other=other, z=z, attention=attention, kept=kept):
            q, k = (attention.rotated(one, moved if one == side else z[one]) for one in "qk")
            return (q @ k.repeat_interleave(attention.groups, 0).mT)[:, kept]

        measured = float(((scores(z[side] + step * change) - scores(z[side] - step * change)) / (2 * step)).square().sum().detach())
        rows = change.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
        curvatures = attention.score_curvature(side, z[side], attention.rotated(other, z[other]))
        quadratic = sum(float(torch.einsum("hti,htij,htj->", rows[:, at], C, rows[:, at])) for at, C in curvatures)
        assert quadratic == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("shape", having("attention"))
def test_moments_of_score_curvatures_are_their_sums_where_no_norm_is_between(shape, side):
    """Of several sequences together, whatever the positions weigh, window or not, and what is not rotated of Phi's head."""
    length = 100  # longer than attention's chunk of positions
    walk = walk_of(shape, length)
    weight = torch.rand(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i, hidden in enumerate(inputs_of_blocks(walk, tokens(2, length))):
        attention, roles = Attention(walk, i), walk.layout.roles
        if attention.normed(side):
            assert shape in ("gemma3", "qwen3-moe", "phi-norm")
            continue
        z, others = flow(walk, i, hidden)[roles[side]][1], flow(walk, i, hidden)[roles["k" if side == "q" else "q"]][1]
        others = attention.rotated("k" if side == "q" else "q", others)
        B, traces = attention.score_moments(side, others, weight)
        expected = torch.zeros_like(B)
        for s in range(2):
            for at, C in attention.score_curvature(side, z[s], others[s]):
                expected += torch.einsum("t,htij->hij", weight[at], C)
                torch.testing.assert_close(traces[s, at], C.diagonal(dim1=-2, dim2=-1).sum((0, -1)), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(B, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", having("mlp"))
def test_mlp_curvature_is_that_of_its_output(shape):
    """On a single token A (x) B is the whole Hessian."""
    walk, step = walk_of(shape, 1), 1e-4
    for i, hidden in enumerate(inputs_of_blocks(walk, tokens(1, 1))):
        krons = ESTIMATORS["mlp-local"](walk, factor="kfac").block(i, hidden)
        names = [walk.layout.roles[role] for role in ("up", "gate") if role in walk.layout.roles]
        assert [name for name, kron in krons.items() if kron.B is not None] == sorted(names)
        for name in names:
            E = torch.randn(walk.linears(i)[name].weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
            ahead, behind = (flow(walk, i, hidden, {name: sign * step * E})["mlp"][1] for sign in (1, -1))
            assert krons[name].loss(E) == pytest.approx(float(((ahead - behind) / (2 * step)).square().sum()), rel=1e-5)


@pytest.mark.parametrize("shape", having("value"))
def test_value_curvature_is_that_of_each_heads_share_of_the_output(shape):
    walk = walk_of(shape, 1)
    hidden, roles, d = walk.embed(tokens(1, 1)), walk.layout.roles, Attention(walk, 0).head_dim
    kron = ESTIMATORS["value-local"](walk, factor="kfac").block(0, hidden)[roles["v"]]
    E = torch.randn(walk.linears(0)[roles["v"]].weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    change = flow(walk, 0, hidden, {roles["v"]: E})[roles["o"]][0] - flow(walk, 0, hidden)[roles["o"]][0]
    W = walk.linears(0)[roles["o"]].weight.unflatten(1, (-1, d)).detach()
    shares = torch.einsum("thd,jhd->thj", change[0].unflatten(-1, (-1, d)), W)
    heads = W.shape[1]  # A counts the token once a head
    assert kron.loss(E) == pytest.approx(heads * float(shares.square().sum()), rel=1e-5)


@pytest.mark.parametrize(
    "kind, hessian, missing",
    [("gpt2", "fully-local", "attention"), ("gemma2", "attention-local", "attention"), ("qwen3-moe", "fully-local", "mlp")],
)
def test_local_hessian_that_an_architecture_does_not_have(kind, hessian, missing, tmp_path):
    expected = f"a local Hessian of {missing} for a model of type {kind.replace('-', '_')}, which is not known; expected hessian input or "
    with pytest.raises(RecipeError) as caught:
        ESTIMATORS[hessian](walk_of(kind, 4), factor="kfac")
    assert str(caught.value).startswith(expected) and str(caught.value).endswith(" or backprop. Use --hessian backprop.")
    with pytest.raises(RecipeError) as caught:
        bakron.quantize(save_tiny(tmp_path / "model", kind), tmp_path / "out", hessian=hessian, format="dense")
    assert str(caught.value).startswith(expected) and not (tmp_path / "out").exists()


# --- from end to end ---------------------------------------------------------------------------------------------------------------------


def quantized(tmp_path, kind, **recipe):
    """Summary, reloaded model and original model whose linears hold the stored codes, after a run."""
    (tmp_path / "text.txt").write_text(TEXT)
    fixed = dict(levels=7, group_size=32, sequences=4, length=32, data=str(tmp_path / "text.txt"))
    summary = bakron.quantize(save_tiny(tmp_path / "model", kind), tmp_path / "out", **(fixed | recipe))
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    expected = tiny_model(kind)
    walk = Walk(expected, 4)
    for i in range(len(walk)):
        stored = load_file(tmp_path / "out" / "bakron" / "codes" / f"block_{i:04d}.safetensors")
        for name, linear in walk.linears(i).items():
            scale = stored[f"{name}.scale"].repeat_interleave(32, 1)
            values = stored[f"{name}.codes"].float() * scale
            assert 0 < float((values - linear.weight).detach().norm() / linear.weight.detach().norm()) < 1
            linear.weight.data.copy_(values)
    return summary, reloaded, expected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", OTHERS)
def test_checkpoint_reloads_as_it_was_solved(kind, format, tmp_path):
    model_type = tiny_model(kind).config.model_type
    if format not in LAYOUTS[model_type].formats:
        with pytest.raises(RecipeError) as caught:
            quantized(tmp_path, kind, format=format)
        assert str(caught.value) == (
            f"format {format} for a model of type {model_type}; expected format {' or '.join(LAYOUTS[model_type].formats)}. "
            f"Use --format {LAYOUTS[model_type].formats[0]}."
        )
        assert not (tmp_path / "out").exists()
        return
    _, reloaded, expected = quantized(tmp_path, kind, format=format)
    ids = tokens(2, 32)
    if kind in MIXTURES:
        reloaded.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=ids).logits, expected(input_ids=ids).logits)
    certified = bakron.certify_run(tmp_path / "out")
    assert (certified["violations"], certified["differing"]) == (0, [])


def test_gpt2_as_the_hub_has_it(tmp_path):
    """Names without the base model's, and masks among the weights."""
    path = save_tiny(tmp_path / "model", "gpt2")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(2)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    bakron.quantize(path, tmp_path / "out", method="rtn", group_size=32, format="dense")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert "transformer.h.0.mlp.c_fc.weight" in kept and len(kept) == len(weights) - 2
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(reloaded.transformer.wpe.weight, tiny_model("gpt2").transformer.wpe.weight)


def test_transposed_weights_are_stored_as_the_model_has_them(tmp_path):
    quantized(tmp_path, "gpt2", format="dense", method="rtn")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys() and all(before[name].shape == after[name].shape for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    file = tmp_path / "out" / "model.safetensors"
    assert bakron.certify_run(tmp_path / "out")["differing"] == []
    name = "transformer.h.1.mlp.c_fc.weight"
    after[name][3, 4] += 1
    save_file(after, file, {"format": "pt"})
    assert bakron.certify_run(tmp_path / "out")["differing"] == [name.removesuffix(".weight")]


# --- experts -----------------------------------------------------------------------------------------------------------------------------


def fused_and_walk(kind, length, **changes):
    """A model as transformers has it, and the same one taken apart, float64."""
    fused = tiny_model(kind, **changes).double().requires_grad_()
    return fused, Walk(tiny_model(kind, **changes).double(), length, batch=2, precision="float32")


def slices(fused, walk, i):
    """`{linear: (parameter, index)}` of the experts of block i, in the model as transformers has it."""
    experts, inner = fused.model.layers[i].mlp.experts, fused.model.layers[i].mlp.experts.intermediate_dim
    gate, up, down = (name for names in walk.layout.expert_inputs for name in names)
    found = {}
    for e in range(experts.num_experts):
        found |= {
            f"mlp.experts.{e}.{gate}": (experts.gate_up_proj, (e, slice(inner))),
            f"mlp.experts.{e}.{up}": (experts.gate_up_proj, (e, slice(inner, None))),
            f"mlp.experts.{e}.{down}": (experts.down_proj, (e,)),
        }
    return found


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_apart_are_the_slices_of_the_fused_ones(kind):
    fused, walk = fused_and_walk(kind, 8)
    for name, (parameter, index) in slices(fused, walk, 0).items():
        assert torch.equal(walk.linears(0)[name].weight, parameter[index])
    assert [name for name in walk.linears(0) if "experts" in name] == [
        name for names in walk.shared_inputs(0)[2:] for name in names
    ] and set(slices(fused, walk, 0)) == {name for name in walk.linears(0) if "experts" in name}
    again = Walk(walk.model, 8)
    assert all(again.linears(0)[name] is linear for name, linear in walk.linears(0).items())
    assert any("experts" in name for name in walk.linears(1)) == (kind == "mixtral")


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_factors_are_those_of_the_gradients_of_the_fused_ones(kind, tmp_path):
    """`sequence` of one sequence: A = G^T G, B = G G^T, with G from transformers' own backward pass. Experts that no token reached have none."""
    ids = tokens(1, 3)
    fused, walk = fused_and_walk(kind, 3, num_experts_per_tok=1)
    krons = BackpropEstimator(walk, ids, tmp_path, factor="sequence", labels="empirical").block(0, walk.embed(ids))
    logits = fused(input_ids=ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    zeros = []
    for name, (parameter, index) in slices(fused, walk, 0).items():
        G = parameter.grad[index]
        assert_near(krons[name].A.H, G.T @ G, rtol=1e-6)
        assert_near(krons[name].B.H, G @ G.T, rtol=1e-6)
        zeros.append(not bool(G.any()))
    assert any(zeros) and not all(zeros)


@pytest.mark.parametrize("factor, clip", [("shampoo:2", None), ("kl", 0.9), ("kfac", None)])
def test_experts_with_few_tokens_have_finite_factors(factor, clip, tmp_path):
    ids = tokens(3, 3)
    _, walk = fused_and_walk("qwen3-moe", 3)
    estimator = BackpropEstimator(walk, ids, tmp_path, factor=factor, clip=clip, skip=1, held=1)
    krons = estimator.block(0, walk.embed(ids))
    held = estimator.heldout(0)
    assert {0} < set(estimator.tokens.values()) and max(estimator.tokens.values()) == 6
    for name, kron in krons.items():
        assert bool(torch.isfinite(kron.A.H).all()) and bool(torch.isfinite(kron.B.H).all())
        assert estimator.tokens[name] or not bool(kron.A.H.any())
        assert held.changes(name, torch.ones(walk.linears(0)[name].weight.shape)).shape == (1, 1, 2)
        assert estimator.tokens[name] == 0 or -1 <= held.alignment(name, kron)["two-sided"] <= 1


@pytest.mark.parametrize("recipe", [{}, {"gate": True}, {"method": "gptq"}, {"hessian": "heads-local"}, {"factor": "sequence"}])
def test_experts_that_few_tokens_reach_are_rounded_to_nearest_and_listed(recipe, tmp_path):
    lines = []
    few = dict(format="dense", sequences=4, length=3, log=lines.append)
    summary, _, _ = quantized(tmp_path, "qwen3-moe", **few, **recipe)
    events = [json.loads(line) for line in (tmp_path / "out" / "bakron" / "events.jsonl").read_text().splitlines()]
    nearest = [event["linear"] for event in events if event.get("fallback") == "nearest"]
    assert nearest == [event["linear"] for event in events if "experts" in event["linear"] and event["tokens"] < event["shape"][1] / 16]
    assert 0 < len(nearest) < sum("experts" in event["linear"] for event in events)
    assert summary["rounded_to_nearest"] == nearest
    assert [line for line in lines if f"too few tokens reached {len(nearest)} linears" in line and line.endswith(", ".join(nearest))]
    stored, original = load_file(tmp_path / "out" / "bakron" / "codes" / "block_0000.safetensors"), Walk(tiny_model("qwen3-moe"), 3)
    for name, linear in original.linears(0).items():
        scale = stored[f"{name}.scale"].repeat_interleave(32, 1)
        to_nearest = torch.equal(stored[f"{name}.codes"].float(), (linear.weight.detach() / scale).round().clamp(-3, 3))
        assert to_nearest == (f"model.layers.0.{name}" in nearest)
    assert bakron.certify_run(tmp_path / "out")["violations"] == 0


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_read_one_by_one_from_shards(kind, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model, weights = load.open_model(load.find(str(tmp_path)))
    expected = Walk(tiny_model(kind), 4).model.state_dict()
    assert model.state_dict().keys() == expected.keys() and all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", MIXTURES)
def test_names_and_exceptions_of_a_packed_mixture(kind, tmp_path):
    quantized(tmp_path, kind, method="rtn")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    kept = {name for name in after if not name.endswith(("_packed", "_scale", "_shape"))}
    assert packed | kept == before.keys() and {name for name in kept if "experts" in name} == set()
    routers = [name for name in kept if name.endswith("gate.weight")]
    assert routers and all(torch.equal(after[name], before[name]) for name in kept)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head", r"re:.*\.gate$"]


# --- evaluation --------------------------------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_capped_logits():
    model, ids = tiny_model("gemma2"), tokens(2, 16)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert evaluation.compare(model, ids)["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)


def test_formats_of_an_architecture():
    assert {"dense"} == {format for format in FORMATS if format in LAYOUTS["gpt2"].formats}
    for format in FORMATS:
        check_format("llama", format)
