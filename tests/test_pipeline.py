import json
import math
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import KINDS, save_tiny, tiny_model, tiny_tokenizer

import bakron
from bakron import data, pipeline, recipes
from bakron.config import Recipe
from bakron.errors import BakronError, DataError, FactorError, ModelError, OutputError, RecipeError
from bakron.grids import UniformGrid, code_range
from bakron.hessian import FACTORS, BackpropEstimator, Candidate, InputEstimator, backprop
from bakron.kron import Kron
from bakron.models.walk import Walk
from bakron.recheck import certify_run

TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(120))
BASE = dict(levels=7, group_size=32, sequences=4, length=32)
METHODS = ("rtn", "gptq", "bakron")
NAMES = [f"model.layers.{i}.{name}" for i in range(2) for name in Walk(tiny_model("llama"), 2).layout.linears]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model and a text, neither of which any test changes."""
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text(TEXT)
    (path / "other.txt").write_text(TEXT[::-1])
    return path


@pytest.fixture
def quantize(place, tmp_path):
    count = iter(range(100))

    def run(model=place / "model", **recipe):
        out = tmp_path / f"out{next(count)}"
        if recipe.get("method") != "rtn" and "recipe" not in recipe:
            recipe = {"sequences": 4, "length": 32, "data": str(place / "text.txt")} | recipe
        if "recipe" not in recipe:
            recipe = {"group_size": 32, "verify": False} | ({"levels": 7} if "bits" not in recipe else {}) | recipe
        summary = bakron.quantize(model, out, **recipe)
        return Run(out, summary)

    return run


class Run:
    """What a finished run left behind."""

    def __init__(self, out, summary):
        self.out, self.summary = out, summary
        self.events = [json.loads(line) for line in (out / "bakron" / "events.jsonl").read_text().splitlines()]
        self.recipe = yaml.safe_load((out / "bakron" / "recipe.yaml").read_text())
        self.weights = (out / "model.safetensors").read_bytes()
        self.tensors = {}
        for i in range(2):
            for name, tensor in load_file(out / "bakron" / "codes" / f"block_{i:04d}.safetensors").items():
                self.tensors[f"model.layers.{i}.{name}"] = tensor

    @property
    def codes(self):
        return {name: tensor for name, tensor in self.tensors.items() if name.endswith(".codes")}

    def grid(self, name, levels=7, group_size=32, symmetric=True):
        low, high = code_range(levels, None, symmetric)
        return UniformGrid(self.tensors[f"{name}.scale"], self.tensors.get(f"{name}.zero"), low, high, group_size)

    def values(self, name, **grid):
        return self.grid(name, **grid).values(self.tensors[f"{name}.codes"].int())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed_model(place, path, change, kind="llama"):
    """A copy of the tiny model on disk with `change(model)` made to it."""
    model = tiny_model(kind)
    with torch.no_grad():
        change(model)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


# --- what a run does is what it says -----------------------------------------------------------------------------------------------------


def test_rtn_is_nearest_rounding(quantize):
    run = quantize(method="rtn")
    for name in NAMES:
        W = tiny_model("llama").get_submodule(name).weight.detach()
        scale = run.tensors[f"{name}.scale"].repeat_interleave(32, 1)
        assert torch.equal((W / scale).round().clamp(-3, 3).to(torch.int8), run.tensors[f"{name}.codes"])


@pytest.mark.parametrize("inputs", ["quantized", "original"])
@pytest.mark.parametrize("method, factor", [("gptq", None), *[("bakron", factor) for factor in FACTORS]])
def test_every_linear_is_certified_against_the_hessian_of_its_place(method, factor, inputs, quantize, place, tmp_path):
    """Redo the data flow by hand: gradients of the original model, inputs from the rounded (or original) prefix, documented default damping."""
    if factor == "sequence" and inputs == "quantized":
        pytest.skip("refused: test_hessian_factors")
    recipe = dict(method=method, inputs=inputs) | ({} if factor is None else {"factor": factor})
    run = quantize(**recipe, seed=3)
    texts = data.load(str(place / "text.txt"), split="calibration")
    ids = data.windows(texts, tiny_tokenizer(), length=32, sequences=4, seed=3).ids
    walk = Walk(tiny_model("llama").requires_grad_(False), 32)
    estimator = InputEstimator(walk) if factor is None else BackpropEstimator(walk, ids, tmp_path / "gradients", factor=factor, seed=3)
    hidden = walk.embed(ids)
    events = {event["linear"]: event for event in run.events}
    for i in range(len(walk)):
        krons = estimator.block(i, hidden)
        following = walk.apply(i, hidden)
        for short, linear in walk.linears(i).items():
            name = f"{walk.prefix(i)}.{short}"
            kron = krons[short].damp(0.1, 1.0, "diagonal")
            assert (kron.B is None) == (method == "gptq")
            W, values = linear.weight.detach().clone(), run.values(name)
            grid = UniformGrid.fit(W, 7, 32, "curvature", kron=kron)
            torch.testing.assert_close(run.grid(name).scale, grid.scale, rtol=1e-5, atol=0)
            assert bakron.certify(values, W, kron, run.grid(name)).violations == 0
            assert events[name]["loss"] == pytest.approx(kron.loss(values - W), rel=1e-4)
            assert events[name]["relative_loss"] == pytest.approx(kron.loss(values - W) / kron.loss(W), rel=1e-4)
            linear.weight.copy_(values)
        hidden = following if inputs == "original" else walk.apply(i, hidden)


@pytest.mark.parametrize("method", METHODS)
def test_asymmetric_levels(method, quantize):
    run = quantize(method=method, symmetric=False, format="dense")
    for name in NAMES:
        codes, zero = run.tensors[f"{name}.codes"], run.tensors[f"{name}.zero"]
        assert codes.dtype == torch.uint8 and int(codes.max()) == 6
        assert len(zero.unique()) > 1 and int(zero.min()) >= 0 and int(zero.max()) <= 6
        W, values = tiny_model("llama").get_submodule(name).weight.detach(), run.values(name, symmetric=False)
        assert float((values - W).norm() / W.norm()) < 0.35


def test_feedback_pays_off(quantize, place):
    """On the calibration text itself each method is closer to the original than the one before: the order is the point of the program."""
    figures = []
    for method in METHODS:
        run = quantize(method=method, levels=4, sequences=40)
        figures.append(bakron.evaluate(run.out, reference=place / "model", data=str(place / "text.txt"), length=32, sequences=40)["kl"])
    assert figures[0] > figures[1] > figures[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_by_every_method(kind, method, quantize, tmp_path):
    run = quantize(save_tiny(tmp_path / "model", kind), method=method)
    assert [event["linear"] for event in run.events] == NAMES
    original = tiny_model(kind)
    for name in NAMES:
        W = original.get_submodule(name).weight.detach()
        assert 0 < float((run.values(name) - W).norm() / W.norm()) < 0.5


# --- one seed, one result ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_are_equal_to_the_byte(method, quantize):
    first, second = quantize(method=method), quantize(method=method)
    assert first.weights == second.weights
    assert same(first.tensors, second.tensors)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        dict(method="rtn", scale="absmax"),
        dict(method="gptq", damping="mean", damp_a=0.01, group_size=-1),
        dict(factor="shampoo", inputs="original", seed=2, bits=3),
        dict(symmetric=False, format="dense", dtype="bfloat16"),
    ],
)
def test_recipe_of_a_run_repeats_it(recipe, quantize):
    first = quantize(**recipe)
    again = quantize(recipe=first.out / "bakron" / "recipe.yaml")
    assert again.weights == first.weights
    assert again.recipe == first.recipe == first.summary["recipe"]
    assert recipes.load(first.out / "bakron" / "recipe.yaml").resolve() == recipes.from_dict(first.recipe)


@pytest.mark.parametrize("kind", ["path", "string", "object"])
def test_recipe_in_any_form_and_overrides_win(kind, quantize, place, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"method: gptq\nlevels: 15\ngroup_size: 16\nsequences: 4\nlength: 32\ndata: {place}/text.txt\n")
    given = {"path": file, "string": str(file), "object": recipes.load(file)}[kind]
    run = quantize(recipe=given, levels=4)
    assert (run.recipe["method"], run.recipe["group_size"], run.recipe["levels"]) == ("gptq", 16, 4)
    assert max(int(codes.max()) for codes in run.codes.values()) == 1


def test_callers_state_stays(quantize):
    settings = (torch.get_default_dtype, torch.is_grad_enabled, torch.get_num_threads, torch.get_float32_matmul_precision)
    random, before = torch.get_rng_state(), [setting() for setting in settings]
    quantize()
    assert torch.equal(random, torch.get_rng_state()) and before == [setting() for setting in settings]


def test_default_dtype_of_the_caller_does_not_matter(quantize):
    expected = quantize()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = quantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.weights == expected.weights


def test_nothing_is_fetched(quantize, monkeypatch):
    import socket

    def connect(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    quantize()


# --- every choice has an effect ------------------------------------------------------------------------------------------------------------

CHOICES = {
    "method": [dict(method="gptq"), dict(method="rtn")],
    "hessian": [dict(method="gptq", hessian="backprop"), dict(hessian="fully-local")],
    "factor": [dict(factor=name) for name in ("kfac", "shampoo", "shampoo:2", "sequence", "kl")],
    "labels": [dict(labels="empirical")],
    "samples": [dict(samples=2)],
    "clip": [dict(clip=0.8)],
    "skip_first": [dict(skip_first=True)],
    "levels": [dict(levels=15)],
    "bits": [dict(bits=3)],
    "group_size": [dict(group_size=16), dict(group_size=None)],
    "symmetric": [dict(symmetric=False, format="dense")],
    "scale": [dict(scale="mse"), dict(scale="absmax")],
    "damping": [dict(damping="mean")],
    "damp_a": [dict(damp_a=1.0)],
    "damp_b": [dict(damp_b=0.1)],
    "order": [dict(order="diagonal"), dict(order="min-pivot"), dict(order="reversed")],
    "polish": [dict(polish=1)],
    "inputs": [dict(inputs="original")],
    "sequences": [dict(sequences=8)],
    "length": [dict(length=16)],
    "seed": [dict(seed=1)],
    "data": [dict(data="other.txt"), dict(data="builtin")],
}
NO_EFFECT_ON_CODES = {
    "include",
    "exclude",
    "on_failure",
    "format",
    "gguf_type",
    "verify",
    "dtype",
    "batch",
    "device",
    "factors",
    "precision",
    "boundary_memory",
    "memory",
    "diagnostics",
    "gate",
    "refit",
    "accumulate",
}  # tested by themselves, or need another machine


def test_every_field_of_the_recipe_is_tested():
    assert CHOICES.keys() | NO_EFFECT_ON_CODES == set(Recipe.model_fields)


@pytest.mark.parametrize("change", [change for changes in CHOICES.values() for change in changes], ids=str)
def test_choice_changes_the_codes(change, quantize, place):
    if change.get("data") == "other.txt":
        change = {"data": str(place / "other.txt")}
    base = quantize(method="gptq") if "hessian" in change else quantize()
    other = quantize(**change)
    differing = sum(not torch.equal(base.codes[name], other.codes[name]) for name in base.codes)
    # Inputs of block 0 are the same; o and down of block 0 have no local Hessian; a sequence's first query is compared with one key only, so it has no gradient.
    same = {"inputs": 7, "skip_first": 1}.get(next(iter(change)), 2 if change.get("hessian") == "fully-local" else 0)
    assert differing == len(NAMES) - same
    for key, value in change.items():
        assert other.recipe[key] == value


@pytest.mark.parametrize("change", [dict(levels=8), dict(bits=3)])
def test_bits_are_short_for_levels(change, quantize):
    assert quantize(**change).weights == quantize(bits=3).weights


@pytest.mark.parametrize("format", ["compressed-tensors", "packed", "dense"])  # the others have scales of their own
def test_format_changes_the_file_and_not_the_codes(format, quantize):
    base, other = quantize(), quantize(format=format)
    assert same(base.tensors, other.tensors)
    assert (base.weights == other.weights) == (format == "compressed-tensors")


def test_dtype_changes_the_scales(quantize):
    base, other = quantize(), quantize(dtype="bfloat16")
    assert {tensor.dtype for name, tensor in other.tensors.items() if name.endswith(".scale")} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in base.tensors.items() if name.endswith(".scale")} == {torch.float32}


@pytest.mark.parametrize("batch", [1, 3])
def test_batch_changes_nothing_but_rounding(batch, quantize):
    base, other = quantize(), quantize(batch=batch)
    equal = [float((base.codes[name] == other.codes[name]).float().mean()) for name in base.codes]
    assert min(equal) > 0.9 and sum(equal) / len(equal) > 0.98  # one flip at a boundary moves others of the same linear and after it
    for one, two in zip(base.events, other.events):
        assert two["loss"] == pytest.approx(one["loss"], rel=0.05)


def test_gptq_with_gradients_uses_the_weighted_inputs_and_no_output_factor(quantize):
    run = quantize(method="gptq", hessian="backprop")
    assert all(event["rho_b"] is None and event["damping"]["b"] == [] for event in run.events)


# --- the kept gradient pass ------------------------------------------------------------------------------------------------------------------


def test_factors_are_kept_and_reused_with_the_same_result(quantize, tmp_path, monkeypatch):
    store = tmp_path / "factors"
    plain, first = quantize(), quantize(factors=str(store))
    kept = sorted(file.name for file in store.iterdir())
    assert kept == ["block_0000.safetensors", "block_0001.safetensors", "manifest.json"]
    monkeypatch.setattr(backprop, "gradient_pass", lambda *_, **__: pytest.fail("a second gradient pass"))
    again = quantize(factors=str(store))
    assert plain.weights == first.weights == again.weights
    quantize(factors=str(store), levels=15, damp_a=0.5, damp_b=0.1, inputs="original", group_size=16)  # none of which touches the gradients
    assert sorted(file.name for file in store.iterdir()) == kept


@pytest.mark.parametrize("change", [dict(seed=1), dict(sequences=3), dict(length=16), dict(factor="shampoo"), dict(model=None)], ids=str)
def test_factors_of_another_run_are_refused(change, quantize, tmp_path):
    store = tmp_path / "factors"
    quantize(factors=str(store))
    if "model" in change:
        change = {"model": save_tiny(tmp_path / "model", "llama", seed=1)}
    with pytest.raises(RecipeError, match="holds the gradients of another run"):
        quantize(factors=str(store), **change)
    assert not (tmp_path / "out1").exists()


# --- what is recorded ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_events_have_one_finite_line_a_linear(method, quantize):
    run = quantize(method=method)
    model = tiny_model("llama")
    assert [event["linear"] for event in run.events] == NAMES
    for event in run.events:
        assert event["method"] == method
        assert event["shape"] == list(model.get_submodule(event["linear"]).weight.shape)
        assert event["block"] == int(event["linear"].split(".")[2])
        assert event["tokens"] == (0 if method == "rtn" else 4 * 32)
        assert event["seconds"].keys() == {"factor", "fit", "sweep"}
        assert all(math.isfinite(value) and value >= 0 for value in event["seconds"].values())
        if method == "rtn":
            assert event["loss"] is None and event["damping"] == {"a": [], "b": []}
            continue
        assert event["damping"] == {"a": [[0.1, "diagonal"]], "b": [[1.0, "diagonal"]] if method == "bakron" else []}
        assert event["dead"] == {"a": 0, "b": 0}
        assert 0 < event["relative_loss"] < 0.2 and 0 < event["loss"] < math.inf
        assert 0 < event["rho_a"] <= 1
        assert event["rho_b"] is None if method == "gptq" else 0 < event["rho_b"] <= 1


def test_diagnostics_add_to_the_events_and_change_nothing_else(quantize):
    base, other = quantize(), quantize(diagnostics=True)
    assert base.weights == other.weights
    for one, two in zip(base.events, other.events):
        assert "top_decile" not in one and set(two) == {*one, "top_decile"}
        assert 0.1 < two["top_decile"]["a"] <= 1 and 0.1 < two["top_decile"]["b"] <= 1
        assert one["effective_tokens"] == two["effective_tokens"]
        assert (
            1 <= one["effective_tokens"]["a"] < 128 and one["effective_tokens"]["b"] == 128
        )  # 4 x 32 tokens; B is not weighted by default


def test_gate_keeps_what_does_clearly_least_harm_on_the_sequences_held_out(quantize):
    run = quantize(gate=True, sequences=8, damp_b=0.01, levels=4)
    counts = {}
    for event in run.events:
        errors = event["gate"]["errors"]
        assert errors.keys() == {"two-sided", "one-sided", "unweighted"} and len(set(errors.values())) == 3
        better = [name for name, margin in event["gate"]["margins"].items() if margin > 1]
        assert event["gate"]["chosen"] == (min(better, key=errors.get) if better else "two-sided")
        assert (event["rho_b"] is not None) == (event["gate"]["chosen"] == "two-sided")
        assert event["tokens"] == 8 * 32
        counts[event["gate"]["chosen"]] = counts.get(event["gate"]["chosen"], 0) + 1
    assert run.summary["gate"] == {"held_out_sequences": 2, "chosen": counts} and len(counts) > 1
    assert {"gate" in event for event in quantize().events} == {False}
    assert quantize(gate=True, factor="kfac").events[0]["gate"]["errors"].keys() == {"two-sided", "one-sided"}


def test_gated_linear_is_rounded_with_the_chosen_candidate_of_all_tokens():
    linear = torch.nn.Linear(16, 8, bias=False).requires_grad_(False)
    W, z = linear.weight.clone(), torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    x, g = z[:, :16], z[:, 16:] @ z[:8, :8]
    recipe = Recipe(levels=4, group_size=None).resolve()
    of = {
        count: (bakron.Kron(x[:count].T @ x[:count], g[:count].T @ g[:count]), bakron.Kron(x[:count].T @ x[:count])) for count in (40, 64)
    }
    tried, final = ({"one": Candidate(of[t][0], 0.1, 1.0), "two": Candidate(of[t][1], 0.1, None)} for t in (40, 64))
    for best in tried:
        values = []
        for candidates in (tried, final):
            linear.weight.copy_(W)
            values.append(pipeline.round_linear(linear, candidates[best].kron, recipe, torch.float32, "w").values)
        linear.weight.copy_(W)
        rounded = pipeline.round_best(
            linear, tried, final, recipe, torch.float32, "w", lambda E, alone=values[0]: (E + W - alone).norm().expand(3, 1, 4)
        )
        assert rounded.event["gate"]["chosen"] == best
        assert not torch.equal(*values) and torch.equal(rounded.values, values[1]) and torch.equal(linear.weight, values[1])


def test_less_boundary_memory_costs_forward_passes_and_changes_nothing_else(quantize):
    one = 4 * 32 * 64 * 4  # tokens, width, bytes
    base, other = quantize(), quantize(boundary_memory=str(6 * one))
    assert base.weights == other.weights
    assert base.summary["gradient_pass"] == dict(forward=2, backward=2, kept=3, bytes=6 * one) == other.summary["gradient_pass"]
    with pytest.raises(RecipeError, match=f"boundary_memory of {5 * one:,} bytes for 128 tokens through 2 blocks"):
        quantize(boundary_memory=str(5 * one))
    assert quantize(method="gptq").summary["gradient_pass"] is None


@pytest.mark.parametrize("method", METHODS)
def test_summary_adds_up(method, quantize):
    run = quantize(method=method)
    summary = json.loads((run.out / "bakron" / "summary.json").read_text())
    assert summary == run.summary
    seconds = dict(summary["seconds"])
    total = seconds.pop("total")
    assert seconds.keys() == {"load", "calibrate", "hessian", "solve", "write"}
    assert 0 < sum(seconds.values()) <= total + 0.005
    # seconds are rounded to milliseconds, of which a tiny run takes few: compare seconds, not shares
    assert summary["core_share"] * total == pytest.approx(seconds["solve"], abs=0.002)
    assert sum(sum(event["seconds"].values()) for event in run.events) <= seconds["solve"] + 0.005
    model = tiny_model("llama")
    every = sum(parameter.numel() for parameter in model.parameters())
    quantized = sum(model.get_submodule(name).weight.numel() for name in NAMES)
    assert summary["parameters"] == {
        "quantized": quantized,
        "kept": every - quantized,
        "quantized_percent": round(100 * quantized / every, 2),
        "kept_percent": round(100 - 100 * quantized / every, 2),
    }
    assert (summary["model"].endswith("/model"), summary["dtype"], summary["threads"]) == (True, "float32", torch.get_num_threads())
    assert 1e8 < summary["peak_memory_bytes"] < 1e12
    assert summary["versions"]["bakron"] == bakron.__version__ and summary["versions"]["torch"] == torch.__version__
    if method == "rtn":
        assert summary["calibration"] is None
    else:
        kept = {key: summary["calibration"][key] for key in ("asked", "kept", "length", "blank", "duplicates")}
        assert kept == dict(asked=4, kept=4, length=32, blank=0, duplicates=0)


def test_tied_parameters_are_counted_once(quantize, tmp_path):
    run = quantize(save_tiny(tmp_path / "model", "qwen3"), method="rtn")
    assert sum(run.summary["parameters"][key] for key in ("quantized", "kept")) == sum(p.numel() for p in tiny_model("qwen3").parameters())


@pytest.mark.parametrize("levels, dtype, group_size", [(7, "float32", 32), (7, "bfloat16", 32), (16, "float16", 16), (2, "bfloat16", -1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bits_per_weight_count_scales_and_zero_points(levels, dtype, group_size, symmetric, quantize):
    run = quantize(method="rtn", levels=levels, dtype=dtype, group_size=group_size, symmetric=symmetric, format="dense")
    side = (32 if dtype == "float32" else 16) + (0 if symmetric else 8)
    scales = sum(tensor.numel() for name, tensor in run.tensors.items() if name.endswith(".scale"))
    weights = run.summary["parameters"]["quantized"]
    assert run.summary["bits_per_weight"] == pytest.approx(math.log2(levels) + side * scales / weights, abs=1e-4)
    assert run.summary["stored_bits_per_weight"] == (32 if dtype == "float32" else 16)


@pytest.mark.parametrize("levels, group_size", [(7, 32), (15, 16), (16, 32), (256, 16)])
def test_stored_bits_are_those_of_the_file(levels, group_size, quantize):
    run = quantize(method="rtn", levels=levels, group_size=group_size, dtype="bfloat16")
    tensors = load_file(run.out / "model.safetensors")
    stored = sum(t.numel() * t.element_size() for name, t in tensors.items() if name.endswith(("weight_packed", "weight_scale")))
    assert run.summary["stored_bits_per_weight"] == pytest.approx(8 * stored / run.summary["parameters"]["quantized"], abs=1e-4)


def test_progress_and_log(place, tmp_path):
    told, log = [], []
    bakron.quantize(
        place / "model", tmp_path / "out", data=str(place / "text.txt"), progress=lambda *step: told.append(step), log=log.append, **BASE
    )
    assert [step for step in told if step[0] == "quantize"] == [("quantize", 1, 2), ("quantize", 2, 2)]
    assert {stage for stage, _, _ in told} == {"forward", "head", "backward", "quantize"}
    assert all(told[index][1] < told[index + 1][1] or told[index][0] != told[index + 1][0] for index in range(len(told) - 1))
    assert log[0].startswith("loading ") and log[1].startswith("calibration: 4 of 4 sequences of 32 tokens; ")


def test_fewer_sequences_than_asked_are_told(place, tmp_path):
    log = []
    (tmp_path / "short.txt").write_text(TEXT[:200])
    summary = bakron.quantize(
        place / "model", tmp_path / "out", data=str(tmp_path / "short.txt"), log=log.append, **BASE | {"sequences": 50}
    )
    assert log[1].startswith("calibration: 6 of 50 sequences of 32 tokens (the text has no more); ")
    assert (summary["calibration"]["asked"], summary["calibration"]["kept"]) == (50, 6)


# --- hard cases ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", ["diagonal", "mean"])
@pytest.mark.parametrize("method", ["gptq", "bakron"])
def test_damping_of_a_factor_from_few_tokens_is_raised_and_recorded(method, damping, place, tmp_path):
    log = []
    undamped = dict(damp_a=0.0, damping=damping) | ({"damp_b": 0.0} if method == "bakron" else {})
    recipe = {**BASE, "sequences": 1, "length": 8, "method": method, "data": str(place / "text.txt"), **undamped}
    summary = bakron.quantize(place / "model", tmp_path / "out", log=log.append, **recipe)
    run = Run(tmp_path / "out", summary)
    assert "warning: 8 calibration tokens are fewer than the 96 inputs of the widest linear" in log[2]
    for event in run.events:
        for side in ("a", "b") if method == "bakron" else ("a",):
            ((amount, rule),) = event["damping"][side]
            assert rule == damping and amount in (1e-4, 1e-3, 1e-2)
        assert math.isfinite(event["loss"]) and event["damping_raised"] is True
    assert summary["damping_raised"] == len(run.events) and "damping had to be raised for 14 linears" in log[-1]
    assert run.recipe["damp_a"] == 0.0
    for name in NAMES:
        assert bool(torch.isfinite(run.values(name)).all())


def test_damping_that_suffices_is_left_alone(quantize):
    run = quantize(damp_a=0.02, damp_b=0.03)
    assert {json.dumps(event["damping"]) for event in run.events} == {'{"a": [[0.02, "diagonal"]], "b": [[0.03, "diagonal"]]}'}
    assert run.summary["damping_raised"] == 0 and not any(event["damping_raised"] for event in run.events)


def test_factor_that_no_damping_cures_is_refused_by_name():
    from bakron import pipeline

    A = torch.eye(4)
    A[0, 1] = A[1, 0] = 50.0  # eigenvalue -49
    recipe = recipes.from_dict({"method": "gptq", "damp_a": 0.1}).resolve()
    with pytest.raises(FactorError) as caught:
        pipeline.damped(Kron(A), recipe, "model.layers.0.mlp.up_proj")
    assert str(caught.value).startswith("model.layers.0.mlp.up_proj, factor A: a Hessian factor [4, 4] that is not positive definite")


def test_one_side_is_raised_alone():
    from bakron import pipeline

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    thin = x.T @ x
    recipe = recipes.from_dict({"method": "bakron", "damp_a": 0.0, "damp_b": 0.5}).resolve()
    assert pipeline.damped(Kron(thin, torch.eye(5)), recipe, "p")[0].damping == {"a": ((1e-4, "diagonal"),), "b": ((0.5, "diagonal"),)}
    recipe = recipes.from_dict({"method": "bakron", "damp_a": 0.5, "damp_b": 0.0}).resolve()
    assert pipeline.damped(Kron(torch.eye(5), thin), recipe, "p")[0].damping == {"a": ((0.5, "diagonal"),), "b": ((1e-4, "diagonal"),)}


def overflow(model):
    model.model.layers[0].mlp.up_proj.weight *= 1e25
    model.model.layers[0].mlp.gate_proj.weight *= 1e20


@pytest.mark.parametrize("method", ["gptq", "bakron"])
def test_activations_that_overflow_name_module_and_sequence(method, quantize, place, tmp_path):
    path = changed_model(place, tmp_path / "model", overflow)
    with pytest.raises(ModelError) as caught:
        quantize(path, method=method)
    assert str(caught.value).startswith("activations are not finite, first at model.layers.0.mlp.")
    assert " in sequence 0; expected finite activations." in str(caught.value)


def dead_input(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight[7] = 0
        layer.mlp.gate_proj.weight[7] = 0


def dead_output(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, 7] = 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("damp", [{}, dict(damp_a=0.0, damp_b=0.0, sequences=16)], ids=["damped", "undamped"])
def test_dead_inputs_are_rounded_and_counted(kind, method, damp, quantize, place, tmp_path):
    recipe = {name: value for name, value in damp.items() if method == "bakron" or (name != "damp_b" and method == "gptq")}
    run = quantize(changed_model(place, tmp_path / "model", dead_input, kind), method=method, **recipe)
    for event in run.events:
        if method != "rtn":
            assert event["dead"]["a"] == (1 if event["linear"].endswith("down_proj") else 0)
            assert math.isfinite(event["loss"])
        values = run.values(event["linear"])
        assert bool(torch.isfinite(values).all())
        if event["linear"].endswith(("up_proj", "gate_proj")):
            assert not bool(values[7].any())
        if event["linear"].endswith("down_proj"):
            assert bool(values[:, 7].any())


@pytest.mark.parametrize("factor", FACTORS)
def test_dead_outputs_are_rounded_and_counted(factor, quantize, place, tmp_path):
    run = quantize(changed_model(place, tmp_path / "model", dead_output), factor=factor)
    for event in run.events:
        assert event["dead"]["b"] == (1 if event["linear"].endswith(("up_proj", "gate_proj")) else 0)
        assert math.isfinite(event["loss"]) and bool(torch.isfinite(run.values(event["linear"])).all())


def plain_groups(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight[2] = 0
    weight[3] = 0.37
    weight[4, :32] = 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "method, bits, scale",
    [
        *[("rtn", bits, scale) for bits in (2, 3, 4, 8) for scale in ("absmax", "mse")],
        *[(method, bits, scale) for method in ("gptq", "bakron") for bits, scale in ((2, "absmax"), (3, "curvature"))],
    ],
)
def test_zero_and_constant_groups(method, bits, scale, symmetric, quantize, place, tmp_path):
    path = changed_model(place, tmp_path / "model", plain_groups)
    run = quantize(path, method=method, bits=bits, symmetric=symmetric, scale=scale, format="dense")
    name = "model.layers.1.mlp.up_proj"
    values = run.values(name, levels=2**bits, symmetric=symmetric)
    assert bool(torch.isfinite(values).all()) and float(run.tensors[f"{name}.scale"].min()) > 0
    assert not bool(values[2].any()) and not bool(values[4, :32].any())
    if method == "rtn":
        torch.testing.assert_close(values[3], torch.full((64,), 0.37), rtol=1e-5, atol=0)


# --- refusals leave nothing behind -------------------------------------------------------------------------------------------------------------

REFUSALS = {
    "method": (
        dict(method="bakrom"),
        RecipeError,
        "method is 'bakrom'; expected rtn, gptq, bakron, boa, yaqa, bakron-mlp-local, bakron-fully-local or bakron-backprop. Perhaps bakron is meant.",
    ),
    "group size": (
        dict(group_size=64),
        RecipeError,
        "group size 64 does not divide the 96 inputs of down_proj; expected a divisor of every width, or no groups (one scale per row). "
        "Use 16, 32 or -1 (no groups).",
    ),
    "all widths": (
        dict(group_size=128),
        RecipeError,
        "the 64 inputs of q_proj, k_proj, v_proj, gate_proj, up_proj, nor the 64 inputs of o_proj, nor",
    ),
    "group size 0": (
        dict(group_size=0),
        RecipeError,
        "group_size is 0; expected a whole number of at least 1, or -1 for one scale per row.",
    ),
    "levels and bits": (dict(levels=7, bits=4), RecipeError, "levels is 7 and bits is 4, which means 16 levels"),
    "unknown key": (dict(group_siz=64), RecipeError, "unknown key 'group_siz'. Perhaps group_size is meant."),
    "idle": (dict(method="rtn", damp_a=0.1), RecipeError, "damp_a would do nothing with method rtn"),
    "curvature": (dict(method="rtn", scale="curvature"), RecipeError, "method rtn has no Hessian"),
    "no text": (dict(data="{tmp}/none.txt"), DataError, "there is no file {tmp}/none.txt"),
    "empty text": (dict(data="{tmp}/empty.txt"), DataError, "{tmp}/empty.txt is empty; expected text."),
    "blank text": (dict(data="{tmp}/blank.txt"), DataError, "{tmp}/blank.txt holds no text, only blank lines"),
    "short text": (
        dict(data="{tmp}/short.txt"),
        DataError,
        "{tmp}/short.txt gives 3 tokens, too few for one sequence; expected at least 32.",
    ),
    "too long": (dict(length=129), ModelError, "sequences of 129 tokens; expected at most 128, the model's max_position_embeddings."),
    "device": (dict(device="gpu"), RecipeError, "device 'gpu': "),
    "meta device": (dict(device="meta"), RecipeError, "device 'meta': "),
    "no model": (dict(model="{tmp}/none"), ModelError, "no file or directory {tmp}/none"),
    "no tokenizer": (dict(model="{tmp}/bare"), ModelError, "no tokenizer can be loaded from {tmp}/bare"),
    "NaN": (dict(model="{tmp}/nan"), ModelError, "model.norm.weight of {tmp}/nan holds NaN or Inf"),
    "factors a file": (dict(factors="{tmp}/short.txt"), OutputError, "{tmp}/short.txt is a file; expected a directory."),
    "factors below a file": (dict(factors="{tmp}/short.txt/a"), OutputError, "{tmp}/short.txt is a file; expected a directory."),
    "recipe file": (dict(recipe="{tmp}/none.yaml"), RecipeError, "there is no recipe file {tmp}/none.yaml"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_leaves_nothing_behind(name, place, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "short.txt").write_text("ab")
    if name == "no tokenizer":
        tiny_model("llama").save_pretrained(tmp_path / "bare")
    if name == "NaN":
        weights = load_file(shutil.copytree(place / "model", tmp_path / "nan") / "model.safetensors")
        weights["model.norm.weight"][3] = math.nan
        save_file(weights, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    change, error, message = REFUSALS[name]
    change = {key: value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value for key, value in change.items()}
    recipe = {"model": place / "model", "out": tmp_path / "deep" / "out", "data": str(place / "text.txt"), **BASE, **change}
    if change.get("method") == "rtn":
        del recipe["data"]
    with pytest.raises(error) as caught:
        bakron.quantize(**recipe)
    assert message.replace("{tmp}", str(tmp_path)) in str(caught.value)
    assert isinstance(caught.value, BakronError) and "\n" not in str(caught.value)
    assert not (tmp_path / "deep").exists()


def test_output_that_is_there_already(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, message in (
        ("full", "is not empty; expected a new or empty directory."),
        ("file", "is a file; expected a new or empty directory."),
    ):
        with pytest.raises(OutputError) as caught:
            bakron.quantize(place / "model", tmp_path / name, method="rtn", group_size=32)
        assert f"{tmp_path / name} {message}" in str(caught.value)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    bakron.quantize(place / "model", tmp_path / "empty", method="rtn", group_size=32)


def test_rtn_needs_no_tokenizer(tmp_path, quantize):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    assert (quantize(tmp_path / "model", method="rtn").out / "model.safetensors").is_file()
    with pytest.raises(ModelError, match="no tokenizer"):
        quantize(tmp_path / "model", method="gptq")
    assert not (tmp_path / "out1").exists()


def test_a_damaged_manifest_of_gradients_is_named(tmp_path, quantize):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{")
    with pytest.raises(RecipeError, match=r"manifest\.json is damaged"):
        quantize(factors=str(tmp_path / "store"))


@pytest.mark.parametrize("recipe", [dict(method="rtn"), dict(method="gptq"), dict(), dict(gate=True), dict(inputs="original")], ids=str)
def test_certify_run_finds_no_violation_in_what_was_rounded_and_one_in_what_was_changed(recipe, quantize):
    run = quantize(**recipe)
    found = certify_run(run.out)
    assert found["violations"] == 0 and found["linears"] == 14 and found["differing"] == []
    assert found["weights"] == sum(codes.numel() for codes in run.codes.values())
    file = run.out / "bakron" / "codes" / "block_0001.safetensors"
    tensors = load_file(file)
    codes = tensors["mlp.down_proj.codes"]
    codes[-1, -1] = -3 if codes[-1, -1] > 0 else 3
    save_file(tensors, file)
    found = certify_run(run.out)
    assert found["differing"] == ["model.layers.1.mlp.down_proj"]
    assert found["violations"] == 1 and found["worst"] == "model.layers.1.mlp.down_proj" and found["max_gap"] > 0.5


def test_certify_run_refuses_what_is_no_finished_run(tmp_path):
    with pytest.raises(OutputError, match="no finished run"):
        certify_run(tmp_path)


def test_certify_run_refuses_another_model_or_text(quantize, place, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    run = quantize(data=str(tmp_path / "text.txt"))
    save_tiny(tmp_path / "other", "llama", seed=1)
    with pytest.raises(ModelError, match="other weights than the run started from"):
        certify_run(run.out, model=tmp_path / "other")
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    with pytest.raises(DataError, match="has changed since the run"):
        certify_run(run.out)


def test_an_override_displaces_the_other_name_of_levels(quantize):
    assert quantize(recipe=Recipe(bits=4, group_size=32, method="rtn"), levels=7).recipe["levels"] == 7


def test_a_store_that_lacks_a_block_or_is_damaged_is_named(quantize, tmp_path):
    store = tmp_path / "store"
    quantize(factors=str(store))
    file = store / "block_0001.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "mlp.up_proj.B": tensors["mlp.up_proj.B"][:-1]}, file)
    with pytest.raises(RecipeError, match="block_0001.safetensors is damaged"):
        quantize(factors=str(store))
    file.unlink()
    with pytest.raises(RecipeError, match="block_0001.safetensors is missing"):
        quantize(factors=str(store))
