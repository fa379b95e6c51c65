"""What is left out costs nothing and changes nothing: linears that are not to be quantized, and blocks of different shapes in a plan."""

import pytest
import torch
from safetensors.torch import load_file
from test_resume import TEXT
from tiny import save_tiny

import bakron
from bakron import api, probe
from bakron.models.walk import Walk

COMMON = dict(
    levels=7, group_size=32, sequences=4, length=32, inputs="original"
)  # so that a block does not see what became of those before it
EXCLUDE = "*.0.*,*.q_proj,*.gate_proj,*.1.mlp.*,*.2.self_attn.*"
RECIPES = {
    "gptq": dict(method="gptq"),
    "bakron": {},
    "clipped": dict(factor="shampoo:2", clip=0.9, samples=2),
    "sequence": dict(factor="sequence"),
    "gate": dict(gate=True, sequences=8),
    "fully-local": dict(hessian="fully-local"),
    "attention-local": dict(hessian="attention-local"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama", num_hidden_layers=3)
    (path / "text.txt").write_text(TEXT)
    return path


def options(place, name, **changes):
    return {**COMMON, "data": str(place / "text.txt"), **RECIPES[name], **changes}


def codes(out):
    return {
        f"{file.stem}.{name}": tensor for file in sorted((out / "bakron" / "codes").iterdir()) for name, tensor in load_file(file).items()
    }


def tensors_in(folder):
    return {file.stem: load_file(file) for file in folder.glob("block_*.safetensors")}


def wanted(name):
    return "block_0000" not in name and not any(part in name for part in ("q_proj", "gate_proj", "block_0001.mlp", "block_0002.self_attn"))


@pytest.mark.parametrize("name", RECIPES)
def test_hessians_are_made_of_chosen_linears_only_and_are_the_same(name, place, tmp_path):
    runs, passes, last = {}, {}, {}
    for exclude in (None, EXCLUDE):
        out = tmp_path / str(bool(exclude))

        def progress(stage, *_, out=out, exclude=exclude):
            if stage == "backward":
                last[exclude] = tensors_in(out / "bakron" / "gradients")

        found = api.plan(place / "model", out, **options(place, name, exclude=exclude))
        summary = bakron.quantize(place / "model", out, progress=progress, **options(place, name, exclude=exclude))
        runs[exclude], passes[exclude] = codes(out), summary["passes"]
        assert summary["passes"] == found.passes
        if last:
            told = sum(tensor.nbytes for file in last[exclude].values() for tensor in file.values())
            assert found.disk["gradients"] == told + (4 * RECIPES[name].get("sequences", 4) * 32 * 64 * summary["recipe"]["samples"])
    every, chosen = runs[None], runs[EXCLUDE]
    assert chosen.keys() == {one for one in every if wanted(one)} and len(chosen) == 2 * 5
    assert all(torch.equal(chosen[one], every[one]) for one in chosen)
    assert passes[EXCLUDE]["forward"] < passes[None]["forward"] or name == "sequence"  # which has no other pass than that of the gradients
    for file, tensors in last.get(EXCLUDE, {}).items():
        kept = {f"{file}.{one}" for one in tensors if not one.startswith("heldout.")}
        assert kept == {f"{file}.{one}" for one in last[None][file] if not one.startswith("heldout.") and wanted(f"{file}.{one}")}
        assert all(torch.equal(tensors[one], last[None][file][one]) for one in tensors)


def test_only_chosen_linears_are_hooked(place, tmp_path, monkeypatch):
    hooked = []
    before = torch.nn.Linear.register_forward_pre_hook
    monkeypatch.setattr(
        torch.nn.Linear, "register_forward_pre_hook", lambda self, hook: (hooked.append(tuple(self.weight.shape)), before(self, hook))[1]
    )
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "gptq", include="*.down_proj"))
    assert hooked == [(64, 96)] * 3


def test_a_gradient_pass_that_is_kept_serves_runs_that_quantize_other_linears(place, tmp_path):
    store = str(tmp_path / "gradients")
    bakron.quantize(place / "model", tmp_path / "some", **options(place, "bakron", exclude=EXCLUDE, factors=store))
    summary = bakron.quantize(place / "model", tmp_path / "all", **options(place, "bakron", factors=store))
    assert summary["gradient_pass"] is None
    bakron.quantize(place / "model", tmp_path / "alone", **options(place, "bakron"))
    assert all(torch.equal(one, codes(tmp_path / "alone")[name]) for name, one in codes(tmp_path / "all").items())


# --- plans of blocks that differ ------------------------------------------------------------------------------------------------------------


def sizes(folder):
    return sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())


@pytest.mark.parametrize("dense", [0, 1])
def test_a_plan_of_dense_and_expert_blocks_is_what_happens(dense, place, tmp_path):
    save_tiny(tmp_path / "model", "qwen3-moe", num_hidden_layers=3, mlp_only_layers=[dense])
    settings = dict(levels=7, group_size=32, sequences=4, length=32, data=str(place / "text.txt"))
    found = api.plan(tmp_path / "model", tmp_path / "out", **settings)
    gradients = []
    done = bakron.quantize(
        tmp_path / "model",
        tmp_path / "out",
        progress=lambda stage, *_: gradients.append(sizes(tmp_path / "out" / "bakron" / "gradients")) if stage == "backward" else None,
        **settings,
    )
    assert found.problems == [] and done["passes"] == found.passes and gradients[-1] == found.disk["gradients"]
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) == found.disk["checkpoint"]
    assert sizes(tmp_path / "out" / "bakron" / "codes") == found.disk["codes"]


def test_a_plan_looks_at_each_kind_of_block_whichever_comes_first(place, tmp_path, monkeypatch):
    memory, probed, settings = [], [], dict(levels=7, group_size=32, sequences=4, length=32, data=str(place / "text.txt"))
    real = probe._probe
    monkeypatch.setattr(probe, "_probe", lambda job, i, *rest: (probed.append(i), real(job, i, *rest))[1])
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.0)
    for dense in ([0], [2]):
        save_tiny(tmp_path / str(dense), "qwen3-moe", num_hidden_layers=3, mlp_only_layers=dense)
        found = api.plan(tmp_path / str(dense), **settings)
        memory.append({stage: size - found.memory["process"] for stage, size in found.memory.items()})
    assert memory[0] == memory[1]
    assert probed == [0, 1, 0, 2]
    assert set(found.seconds) == {"load", "calibrate", "hessian", "solve", "write", "total"}


def test_a_walk_of_one_block_is_that_block(place):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "model")
    walk = Walk(model, 16)
    only = walk.only(1)
    hidden = torch.randn(2, 16, 64)
    assert (len(only), only.prefix(0), only.only(0).prefix(0)) == (1, "model.layers.1", "model.layers.1")
    assert torch.equal(only.apply(0, hidden), walk.apply(1, hidden)) and only.runs["forward"] == walk.runs["forward"] == 1
    walk.choose(None, "*.0.*")
    assert walk.kinds() == [[0], [1, 2]]
