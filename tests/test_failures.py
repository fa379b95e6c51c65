"""Failures that users of quantization tools report, each by its kind: the outcome that is documented here, on the input side (A) and the output side (B).

A test is named after the kind that it closes. Kinds that have a file of tests of their own are met here once, by their plainest case.
"""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model, tiny_tokenizer

import bakron
from bakron import api, data, pipeline, recipes
from bakron.errors import BakronError, DataError, FactorError, ModelError, OutputError, RecipeError
from bakron.export import Linear, compressed_tensors
from bakron.grids import UniformGrid
from bakron.hessian import InputEstimator
from bakron.kron import Factor, Kron
from bakron.models import load
from bakron.models.walk import Walk

TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(60))
SMALL = dict(levels=7, group_size=32, sequences=4, length=32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text(TEXT)
    return path


def quantize(place, out, model=None, **recipe):
    recipe = {**SMALL, **recipe}
    if recipe.get("method") == "rtn":
        recipe = {key: value for key, value in recipe.items() if key not in ("sequences", "length")}
    else:
        recipe.setdefault("data", str(place / "text.txt"))
    return bakron.quantize(model or place / "model", out, **recipe)


def changed(place, path, change, kind="llama", **shape):
    save_tiny(path, kind, **shape)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def sides(thin, size=24):
    """A Kron whose factor A, or B, or both, are made of `thin`, the others of many tokens."""
    wide = torch.randn(400, size, generator=torch.Generator().manual_seed(1))
    whole = wide.T @ wide
    return {"a": Kron(thin, whole), "b": Kron(whole, thin), "both": Kron(thin, thin)}


# --- Hessians -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_b01_rank_deficient_factors_are_damped_more_and_told(side):
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    recipe = recipes.from_dict({"damp_a": 0.0, "damp_b": 0.0, "levels": 7}).resolve()
    kron, raised = pipeline.damped(sides(x.T @ x)[side], recipe, "p")
    W = torch.randn(24, 24)
    solution = bakron.solve(W, kron, UniformGrid.fit(W, 7))
    assert raised and bool(torch.isfinite(solution.values).all())
    for which, pairs in solution.damping.items():
        assert (pairs[0][0] > 0) == (side in (which, "both"))


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_b02_dead_channels_and_dead_outputs_are_rounded_and_counted(side):
    x = torch.randn(200, 24, generator=torch.Generator().manual_seed(0))
    x[:, 7] = 0
    W = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    solution = bakron.solve(W, sides(x.T @ x)[side].damp(0.1, 0.1), UniformGrid.fit(W, 7))  # the solver by itself, as its users call it
    assert solution.dead == {"a": int(side != "b"), "b": int(side != "a")} and bool(torch.isfinite(solution.values).all())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("side", ["a", "b"])
def test_b04_a_factor_that_is_not_finite_is_refused_and_damping_is_no_advice(side, bad):
    H = torch.eye(8)
    H[3, 3] = bad
    with pytest.raises(FactorError, match="Damping cannot cure this") as caught:
        Kron(H, torch.eye(8)) if side == "a" else Kron(torch.eye(8), H)
    assert caught.value.index == 3


@pytest.mark.parametrize("method", ["gptq", "bakron"])
def test_b04_the_first_module_and_sequence_are_named(method, place, tmp_path):
    def overflow(weights):
        weights["model.layers.0.mlp.up_proj.weight"] *= 1e25
        weights["model.layers.0.mlp.gate_proj.weight"] *= 1e20

    path = changed(place, tmp_path / "model", overflow)
    for fallback in ("stop", "fallback"):  # no policy makes such a run good
        with pytest.raises(ModelError, match=r"activations are not finite, first at model\.layers\.0\.mlp\.\S* in sequence 0"):
            quantize(place, tmp_path / "out", path, method=method, on_failure=fallback)


def test_b04_half_precision_sums_and_outlier_channels():
    x = (torch.randn(2048, 32, generator=torch.Generator().manual_seed(0)) * 20).half()
    from bakron.hessian.factor import Gram

    gram = Gram(32)
    gram.add(x)
    assert bool(torch.isfinite(gram.value()).all()) and not bool(torch.isfinite(x.T @ x).all())
    x = x.float()
    x[:, 3] *= 1e4
    A = Factor(x.T @ x)
    assert A.damp(0.1, "diagonal").rho < 1 - 1e-3 < A.damp(0.1, "mean").rho  # the default leaves the other channels their feedback


def indefinite(monkeypatch, which):
    """Every factor of that side is one that no damping cures."""
    damp = Kron.damp

    def spoiled(self, a, b, rule):
        bad = torch.eye(self.A.size if which == "a" else (self.B.size if self.B else self.A.size))
        bad[0, 1] = bad[1, 0] = 50.0
        if which == "a":
            return damp(Kron(bad, None if self.B is None else self.B.H), a, b, rule)
        return damp(self if self.B is None else Kron(self.A.H, bad), a, b, rule)

    monkeypatch.setattr(Kron, "damp", spoiled)


@pytest.mark.parametrize("side, how", [("a", "nearest"), ("b", "one-sided")])
def test_x11_a_factor_that_cannot_be_used_stops_the_run_or_is_done_without(side, how, place, tmp_path, monkeypatch):
    indefinite(monkeypatch, side)
    with pytest.raises(FactorError, match=rf"q_proj, factor {side.upper()}: .*on-failure fallback goes on without it"):
        quantize(place, tmp_path / "out")
    log = []
    summary = quantize(place, tmp_path / "out", on_failure="fallback", log=log.append)  # goes on with the same run
    assert len(summary["fallbacks"]) == 14 and set(summary["fallbacks"].values()) == {how}
    assert any("14 linears were rounded without a factor that could not be used" in line for line in log)
    events = [json.loads(line) for line in (tmp_path / "out" / "bakron" / "events.jsonl").read_text().splitlines()]
    assert {event["fallback"] for event in events} == {how} and all(event["failed"] for event in events)
    if how == "nearest":
        assert {event["loss"] for event in events} == {None}


def test_x11_fallbacks_have_an_exit_status_of_their_own(place, monkeypatch):
    from typer.testing import CliRunner

    from bakron import cli

    told = {"seconds": dict(total=1, hessian=1, solve=1), "parameters": dict(quantized=1, quantized_percent=1), "core_share": 1}
    told |= {"bits_per_weight": 1, "stored_bits_per_weight": 1}
    for fallbacks, status in (({}, 0), ({"w": "nearest"}, 3)):
        monkeypatch.setattr(api, "quantize", lambda *_, fallbacks=fallbacks, **__: told | {"fallbacks": fallbacks})
        assert CliRunner().invoke(cli.app, ["quantize", "model", "out"]).exit_code == status


def test_x13_linears_that_see_one_input_share_a_and_never_b(place):
    model = tiny_model("llama")
    krons = InputEstimator(walk := Walk(model, 16)).block(0, walk.embed(torch.randint(64, (2, 16))))
    q, k, v, gate, up = (
        krons[name].A for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    assert q is k is v and gate is up and q is not gate


def test_x10_a_linear_that_runs_twice_is_refused():
    model = tiny_model("llama")
    block = model.model.layers[1]
    forward = block.mlp.forward
    block.mlp.forward = lambda x: forward(forward(x))
    walk = Walk(model, 8)
    with pytest.raises(ModelError, match="runs twice in one pass of its block"):
        InputEstimator(walk).block(1, walk.embed(torch.randint(64, (1, 8))))


# --- grids and layers -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_b05_zero_and_constant_groups(bits, symmetric):
    W = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    W[2], W[3], W[4, :32] = 0, 0.37, 0
    grid = UniformGrid.fit(W, 2**bits, 32, symmetric=symmetric)
    _, values = grid.project(W)
    assert float(grid.scale.min()) > 0 and bool(torch.isfinite(values).all())
    assert not bool(values[2].any()) and not bool(values[4, :32].any())
    torch.testing.assert_close(values[3], W[3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("group", [128, 512, 38])
def test_b09_x07_groups_that_do_not_divide_every_width_are_told_at_once(group, place, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "open_model", lambda *_: pytest.fail("too late"))
    with pytest.raises(RecipeError, match=f"group size {group} does not divide") as caught:
        quantize(place, tmp_path / "out", group_size=group)
    assert "down_proj" in str(caught.value) and "q_proj" in str(caught.value) and "-1" in str(caught.value)
    found = api.plan(place / "model", data=str(place / "text.txt"), **SMALL | {"group_size": group})
    assert len(found.problems) == 1 and found.problems[0] == str(caught.value)


def test_b11_x01_gpt2_keeps_its_weights_the_other_way_round(place, tmp_path):
    save_tiny(tmp_path / "model", "gpt2")
    quantize(place, tmp_path / "out", tmp_path / "model", method="rtn", format="dense", group_size=None)
    found, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in before if name.endswith("h.0.attn.c_attn.weight"))
    W = before[name].T
    torch.testing.assert_close(found[name], UniformGrid.fit(W, 7, None, "absmax").project(W)[1].T.contiguous())
    with pytest.raises(RecipeError, match="format compressed-tensors for a model of type gpt2"):
        quantize(place, tmp_path / "packed", tmp_path / "model", method="rtn", group_size=None)


def test_b13_b15_heads_and_windows_are_those_of_the_config():
    for kind, changes in (("qwen3", {}), ("qwen3", dict(num_key_value_heads=1)), ("mistral", {})):
        model, ids = tiny_model(kind, **changes), torch.randint(64, (2, 24))
        walk = Walk(model, 24, precision="float32")
        hidden = walk.embed(ids)
        for i in range(len(walk)):
            hidden = walk.apply(i, hidden)
        with torch.no_grad():
            torch.testing.assert_close(walk.logits(hidden), model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_b14_b17_tied_embeddings_stay_tied_and_biases_as_they_were(place, tmp_path):
    for kind in ("qwen3", "qwen2", "llama-bias"):
        model = save_tiny(tmp_path / kind, kind)
        quantize(place, tmp_path / f"out-{kind}", model, method="rtn")
        before, after = load_file(model / "model.safetensors"), load_file(tmp_path / f"out-{kind}" / "model.safetensors")
        biases = {name: tensor for name, tensor in before.items() if name.endswith(".bias")}
        assert biases.keys() == {name for name in after if name.endswith(".bias")} and bool(biases) == (kind != "qwen3")
        assert all(torch.equal(after[name], tensor) for name, tensor in biases.items())
        assert ("lm_head.weight" in after) == (kind != "qwen3")
        assert sum(tensor.nbytes for tensor in after.values()) < sum(tensor.nbytes for tensor in before.values())


def test_x08_what_a_server_fuses_has_one_kind_of_level(place, tmp_path):
    """There are no settings for single linears; those left out are told to the readers of the checkpoint."""
    quantize(place, tmp_path / "out", method="rtn", exclude="*.gate_proj,*.up_proj")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert list(found["config_groups"]) == ["group_0"]
    assert found["ignore"] == ["lm_head", *sorted(f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up"))]


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_b38_every_pattern_matches_and_says_how_much(field, place, tmp_path):
    log = []
    quantize(place, tmp_path / "out", method="rtn", log=log.append, **{field: "*.down_proj, model.layers.0.self_attn.*"})
    kept = 6 if field == "include" else 8
    assert f"layers: *.down_proj matches 2; model.layers.0.self_attn.* matches 4; {kept} of 14 linears are to be quantized" in log
    for pattern, words in (
        ("lm_haed", "the pattern lm_haed matches none of the model's 14 linears"),
        ("*.mlp.*,*.Conv9d", "the pattern *.Conv9d matches none"),
        ("re:(", "the pattern re:( matches none"),
    ):
        with pytest.raises(RecipeError, match=re.escape(words)):
            quantize(place, tmp_path / "none", method="rtn", **{field: pattern})
    with pytest.raises(RecipeError, match="include and exclude leave none"):
        quantize(place, tmp_path / "none", method="rtn", exclude="*")
    with pytest.raises(RecipeError, match=f"{field} is 'a,,b'; expected patterns separated by commas"):
        quantize(place, tmp_path / "none", method="rtn", **{field: "a,,b"})
    assert not (tmp_path / "none").exists()


# --- models -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "pointer", "nan", "packed"])
def test_b18_b31_a_damaged_checkpoint_is_named_before_anything_slow(damage, place, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    file = sorted((tmp_path / "model").glob("*.safetensors"))[2]
    content, tensors = file.read_bytes(), load_file(file)
    name = next(iter(tensors))
    if damage == "gone":
        file.unlink()
    elif damage == "nan":
        tensors[name].view(-1)[0] = math.nan
        save_file(tensors, file, {"format": "pt"})
    elif damage == "packed":
        save_file({(key + "_packed" if key == name else key): tensor for key, tensor in tensors.items()}, file, {"format": "pt"})
    else:
        file.write_bytes(
            {"cut": content[: len(content) // 2], "empty": b"", "pointer": b"version https://git-lfs.github.com/spec/v1\n"}[damage]
        )
    found = api.plan(tmp_path / "model", method="rtn", levels=7, group_size=32)
    assert len(found.problems) == 1
    for run in (lambda: quantize(place, tmp_path / "out", tmp_path / "model", method="rtn"),):
        with pytest.raises(ModelError) as caught:
            run()
        assert str(caught.value) == found.problems[0]
        assert (name if damage in ("nan", "packed") else file.name) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["fp8", "nosuch"])
def test_b24_what_is_quantized_already_is_refused(method, place, tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    settings = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"is already quantized \\(quant_method '{method}'"):
        quantize(place, tmp_path / "out", path)
    assert "already quantized" in api.plan(path, method="rtn").problems[0]


def test_b21_b22_b23_a_run_is_not_lost(place, tmp_path, monkeypatch):
    """No pad token, a generation config that contradicts itself, and an export that fails: the run goes on from its codes (test_resume has the rest)."""
    assert tiny_tokenizer().pad_token is None
    path = save_tiny(tmp_path / "model", "llama")
    (path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9, "top_p": 0.6}')
    with monkeypatch.context() as patch:
        patch.setattr("bakron.export.files.write_checkpoint", lambda *_: (_ for _ in ()).throw(OutputError("the disk is full")))
        with pytest.raises(OutputError, match="the disk is full"):
            quantize(place, tmp_path / "out", path, method="gptq")
    monkeypatch.setattr(Walk, "apply", lambda *_: pytest.fail("a block is run again"))
    quantize(place, tmp_path / "out", path, method="gptq")
    assert (tmp_path / "out" / "generation_config.json").read_text() == (path / "generation_config.json").read_text()


# --- text ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b" \n \n", "holds no text, only blank lines"),
        (b"caf\xe9", "is not UTF-8: byte 0xe9 at offset 3"),
        (b"\x1f\x8b\x08", "is compressed with gzip"),
        (b"ab", "too few for one sequence; expected at least 32"),
    ],
)
def test_b25_b28_text_that_cannot_be_used_is_told_before_the_model(content, words, place, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "open_model", lambda *_: pytest.fail("too late"))
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=words):
        quantize(place, tmp_path / "out", data=str(tmp_path / "text.txt"))
    assert words in api.plan(place / "model", **SMALL, data=str(tmp_path / "text.txt")).problems[0]


def test_b25_b26_texts_of_any_length_are_joined_and_counted(tmp_path):
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("a" * 37, "b" * 5, "c", "", "d" * 64, "b" * 5)))
    tokens = data.windows(data.load(str(tmp_path / "text.jsonl"), split="calibration"), tiny_tokenizer(), length=8, sequences=99)
    assert (tokens.asked, tokens.kept, tokens.blank, tokens.documents) == (99, tokens.available, 1, 5)
    assert tokens.ids.numel() + tokens.dropped_tail == tokens.tokens_in_text


def test_b28_a_column_that_is_not_there_lists_those_that_are(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"content": "a"}\n')
    with pytest.raises(DataError, match=r"line 1: no column 'text'; found 'content'\. Choose one with"):
        data.load(str(tmp_path / "text.jsonl"), split="calibration")


def test_x02_a_window_begins_with_one_begin_token(place):
    tokens = data.windows(data.load(str(place / "text.txt"), split="calibration"), tiny_tokenizer(), length=16, sequences=2)
    assert tokens.ids.flatten().tolist().count(1) == 1


def test_x03_x04_x12_nothing_is_fetched_and_rounding_to_nearest_needs_no_text(place, tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))  # nothing needs the system's directory for scratch files
    monkeypatch.setattr("tempfile.tempdir", None)
    quantize(place, tmp_path / "out", method="rtn")
    quantize(place, tmp_path / "spilled", method="gptq", memory="20kB")
    with pytest.raises(RecipeError, match="unknown key 'dataset'"):
        quantize(place, tmp_path / "other", method="rtn", dataset="wikitext")


# --- files and resources ------------------------------------------------------------------------------------------------------------------------


def test_b29_x09_zero_points_come_back(tmp_path, place):
    def one_sided(weights):
        weights["model.layers.0.mlp.up_proj.weight"].abs_()
        weights["model.layers.1.mlp.up_proj.weight"].abs_().neg_()

    path = changed(place, tmp_path / "model", one_sided)
    quantize(place, tmp_path / "out", path, method="rtn", symmetric=False, format="dense", levels=16)
    zeros = [load_file(tmp_path / "out" / "bakron" / "codes" / f"block_{i:04d}.safetensors")["mlp.up_proj.zero"] for i in range(2)]
    assert set(zeros[0].unique().tolist()) == {0} and set(zeros[1].unique().tolist()) == {15}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert float(found["model.layers.0.mlp.up_proj.weight"].min()) >= 0 >= float(found["model.layers.1.mlp.up_proj.weight"].max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_b32_the_scale_that_is_stored_is_the_one_rounded_with(dtype):
    W = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    W[1] *= 1e4
    W[2] *= 1e-7
    grid = UniformGrid.fit(W, 7, 32, dtype=dtype)
    codes, values = grid.project(W)
    assert grid.scale.dtype == dtype and bool(torch.isfinite(values).all()) and float(grid.scale.min()) > 0
    assert torch.equal(values, codes * grid.scale.float().repeat_interleave(32, 1))


def test_b33_x05_groups_are_plain_and_no_order_is_claimed():
    W = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for group in (32, None):
        grid = UniformGrid.fit(W, 7, group)
        codes, _ = grid.project(W)
        stored = compressed_tensors.encode("p", Linear(codes, grid), torch.float32)
        assert sorted(stored) == ["p.weight_packed", "p.weight_scale", "p.weight_shape"] and bool(stored["p.weight_packed"].any())
        weights = compressed_tensors.quantization_config(grid, [])["config_groups"]["group_0"]["weights"]
        assert "actorder" not in weights or weights["actorder"] is None


def test_b34_b36_no_block_stays_and_no_logits_are_made(place, tmp_path, monkeypatch):
    """Counted, not measured: benchmarks/pipeline.py measures."""
    seen, run = [], Walk.run

    def counted(self, i, hidden):
        seen.append((i, sum(parameter.numel() for parameter in self.model.parameters() if not parameter.is_meta)))
        return run(self, i, hidden)

    monkeypatch.setattr(Walk, "run", counted)
    monkeypatch.setattr(Walk, "logits", lambda *_: pytest.fail("logits of calibration text"))
    quantize(place, tmp_path / "out", method="gptq")
    assert {i for i, _ in seen} == {0, 1} and len({count for _, count in seen}) == 1


def test_b35_packing_has_no_loop_over_rows():
    calls = []
    for rows in (8, 512):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compressed_tensors.pack(torch.zeros(rows, 128, dtype=torch.int32), 3)
        calls.append(len(profile.events()))
    assert calls[1] < 2 * calls[0]  # sixty-four times the rows


def test_x06_the_callers_default_dtype_does_not_matter(place, tmp_path):
    torch.set_default_dtype(torch.bfloat16)
    try:
        quantize(place, tmp_path / "one", method="gptq")
    finally:
        torch.set_default_dtype(torch.float32)
    quantize(place, tmp_path / "two", method="gptq")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


# --- the plan -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        dict(method="rtn"),
        dict(method="gptq", include="*.mlp.*"),
        dict(gate=True, sequences=8, samples=2),
        dict(factor="shampoo:2", clip=0.9, boundary_memory="500kB"),
        dict(hessian="fully-local", format="packed"),
        dict(method="gptq", symmetric=False, format="dense", dtype="bfloat16"),
    ],
    ids=str,
)
def test_the_plan_is_what_happens(recipe, place, tmp_path):
    settings = {**SMALL, **recipe} | ({} if recipe.get("method") == "rtn" else {"data": str(place / "text.txt")})
    if recipe.get("method") == "rtn":
        settings = {"levels": 7, "group_size": 32, **recipe}
    found = api.plan(place / "model", tmp_path / "out", **settings)
    assert found.problems == [] and not (tmp_path / "out").exists()
    gradients = []
    done = bakron.quantize(
        place / "model",
        tmp_path / "out",
        progress=lambda stage, count, _: (
            gradients.append(sizes(tmp_path / "out" / "bakron" / "gradients")) if stage == "backward" else None
        ),
        **settings,
    )
    assert done["passes"] == found.passes
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) == found.disk["checkpoint"]
    assert sizes(tmp_path / "out" / "bakron" / "codes") == found.disk["codes"]
    assert (gradients[-1] if gradients else 0) == found.disk["gradients"]
    assert found.memory["peak"] == max(value for name, value in found.memory.items() if name != "peak") >= found.memory["process"] > 0
    assert "total" in found.seconds and all(value >= 0 for value in found.seconds.values())


def sizes(folder):
    """Bytes of all tensors in the files of a directory."""
    return sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())


def test_the_plan_tells_all_problems_at_once(place, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    found = api.plan(place / "model", tmp_path / "out", **SMALL | {"data": str(tmp_path / "none.txt")})
    assert len(found.problems) == 2 and "is not empty" in found.problems[0] and "there is no file" in found.problems[1]
    with pytest.raises(BakronError):
        quantize(place, tmp_path / "out")


def test_a_disk_without_room_is_told_before_the_run(place, tmp_path, monkeypatch):
    from bakron import plan

    monkeypatch.setattr(plan, "free", lambda _: 1000)
    with pytest.raises(
        OutputError, match=r"1,000 bytes are free on the disk of .*; expected [\d,]+ bytes for codes, gradients and checkpoint"
    ):
        quantize(place, tmp_path / "out", method="rtn")
    assert not (tmp_path / "out").exists()
    assert "bytes are free" in api.plan(place / "model", tmp_path / "out", method="rtn", levels=7, group_size=32).problems[0]
