"""A model in memory in place of a path: the same files, and the model as it was."""

import copy
import json

import pytest
import torch
from tiny import KINDS, OTHERS, save_tiny, tiny_bpe, tiny_model, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

import bakron
from bakron import api, data
from bakron.errors import BakronError, DataError, ModelError, OutputError, RecipeError
from bakron.models import load
from bakron.recheck import certify_run

TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(120))
RECIPE = dict(levels=7, group_size=16, sequences=4, length=32, verify=False)
IDS = torch.randint(3, 60, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def loaded(path, kind="llama", dtype=None):
    """A model in memory and its tokenizer, and a directory where both are saved."""
    model = tiny_model(kind)
    model = model if dtype is None else model.to(dtype)
    tokenizer = tiny_tokenizer()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, tokenizer


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def state(model):
    """All that must stay as it is: weights and buffers, objects and values, mode, gradients wanted, hooks, config."""
    return {
        "values": {name: (id(one), one.dtype, one.requires_grad, one.detach().clone()) for name, one in model.named_parameters()},
        "buffers": {name: (id(one), one.clone()) for name, one in model.named_buffers()},
        "modules": {name: (id(one), one.training, len(one._forward_hooks), "forward" in vars(one)) for name, one in model.named_modules()},
        "config": copy.deepcopy(vars(model.config)),
        "generation": copy.deepcopy(vars(model.generation_config)),
    }


def unchanged(before, model):
    after = state(model)
    for part in ("values", "buffers"):
        assert before[part].keys() == after[part].keys()
        for name, told in before[part].items():
            assert told[:-1] == after[part][name][:-1] and torch.equal(told[-1], after[part][name][-1]), name
    assert all(before[part] == after[part] for part in ("modules", "config", "generation"))


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_model_in_memory_gives_the_files_of_its_directory_and_stays_as_it_is(kind, tmp_path, text):
    model, tokenizer = loaded(tmp_path / "model", kind)
    model.train()
    model.get_submodule(load.layout_of(model.config.model_type).head).register_forward_hook(lambda *_: pytest.fail("run"))
    before = state(model)
    settings = RECIPE | {"data": data.given(IDS).ids, "method": "gptq", "format": "dense" if kind == "gpt2" else "compressed-tensors"}
    del settings["sequences"], settings["length"]
    live = bakron.quantize(model, tmp_path / "live", tokenizer=tokenizer, **settings)
    unchanged(before, model)
    stored = bakron.quantize(tmp_path / "model", tmp_path / "stored", **settings)
    ours, theirs = tree(tmp_path / "live"), tree(tmp_path / "stored")
    assert ours.keys() == theirs.keys()
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different <= {"README.md", "bakron/events.jsonl", "bakron/run.json", "bakron/summary.json"} | {
        name for name in ours if name.startswith("bakron/codes")
    }
    assert live["model_sha256"] == stored["model_sha256"] and live["calibration"] == stored["calibration"]
    assert live["in_memory"] and not stored["in_memory"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_sided_with_text_and_in_half_precision(dtype, tmp_path, text):
    model, tokenizer = loaded(tmp_path / "model", dtype=dtype)
    settings = RECIPE | {"data": text}
    live = bakron.quantize(model, tmp_path / "live", tokenizer=tokenizer, **settings)
    stored = bakron.quantize(tmp_path / "model", tmp_path / "stored", **settings)
    assert live["dtype"] == stored["dtype"] == str(dtype).removeprefix("torch.")
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "live" / name).read_bytes() == (tmp_path / "stored" / name).read_bytes(), name


def test_ready_token_ids_are_the_windows_of_the_text(tmp_path, text):
    model, tokenizer = loaded(tmp_path / "model")
    windows = data.windows(data.load(text, split="calibration"), tokenizer, length=32, sequences=4, seed=0).ids
    settings = {name: value for name, value in RECIPE.items() if name not in ("sequences", "length")}
    by_text = bakron.quantize(tmp_path / "model", tmp_path / "text", **RECIPE, data=text)
    lines = []
    by_ids = bakron.quantize(model, tmp_path / "ids", data=windows.int(), log=lines.append, **settings)  # no tokenizer anywhere
    assert (tmp_path / "text" / "model.safetensors").read_bytes() == (tmp_path / "ids" / "model.safetensors").read_bytes()
    assert not list((tmp_path / "ids").glob("tokenizer*")) and list((tmp_path / "text").glob("tokenizer*"))
    assert "calibration: 4 sequences of 32 tokens, given as ids" in lines
    recipe = by_ids["recipe"]
    assert recipe["data"].startswith("ids:") and (recipe["sequences"], recipe["length"]) == (4, 32)
    assert by_ids["calibration"]["documents"] == 0 and by_text["calibration"]["documents"] == 1


def test_a_run_that_was_cut_short_goes_on_and_no_other(tmp_path, text):
    model, _ = loaded(tmp_path / "model")
    settings = {name: value for name, value in RECIPE.items() if name not in ("sequences", "length")} | {"method": "gptq"}

    def stop(stage, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bakron.quantize(model, tmp_path / "cut", data=IDS, progress=stop, **settings)
    with pytest.raises(RecipeError, match=r"unfinished run of another kind: data \(ids:"):
        bakron.quantize(model, tmp_path / "cut", data=IDS + 1, **settings)
    other = tiny_model("llama", seed=1)
    with pytest.raises(RecipeError, match="unfinished run of another kind: model_sha256"):
        bakron.quantize(other, tmp_path / "cut", data=IDS, **settings)
    lines = []
    summary = bakron.quantize(model, tmp_path / "cut", data=IDS, log=lines.append, **settings)
    assert summary["sessions"] == 2 and any("going on with the run" in line for line in lines)
    bakron.quantize(model, tmp_path / "whole", data=IDS, **settings)
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_finished_run_is_certified_and_exported_once_its_model_is_named(tmp_path):
    model, tokenizer = loaded(tmp_path / "model")
    settings = {name: value for name, value in RECIPE.items() if name not in ("sequences", "length")}
    bakron.quantize(model, tmp_path / "run", tokenizer=tokenizer, data=IDS, **settings)
    assert "base_model" not in (tmp_path / "run" / "README.md").read_text()
    for job in (certify_run, lambda run: bakron.export_run(run, tmp_path / "dense", format="dense")):
        with pytest.raises(ModelError, match="started from a model in memory; expected that model, or a directory it is saved in"):
            job(tmp_path / "run")
    with pytest.raises(DataError, match="data ids:.* stands for token ids that were given to a run; expected the same tensor"):
        certify_run(tmp_path / "run", model=model)
    with pytest.raises(DataError, match="has changed since the run"):
        certify_run(tmp_path / "run", model=model, data=IDS + 1)
    assert certify_run(tmp_path / "run", model=model, data=IDS)["violations"] == 0
    bakron.export_run(tmp_path / "run", tmp_path / "one", format="dense", model=model, tokenizer=tokenizer)
    bakron.export_run(tmp_path / "run", tmp_path / "two", format="dense", model=tmp_path / "model")
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert one == two


def test_plan_takes_it_too(tmp_path, text):
    model, tokenizer = loaded(tmp_path / "model")
    found = api.plan(model, tmp_path / "out", tokenizer=tokenizer, **RECIPE | {"data": text})
    by_path = api.plan(tmp_path / "model", tmp_path / "out", **RECIPE | {"data": text})
    assert not found.problems and found.passes == by_path.passes and found.disk["checkpoint"] == by_path.disk["checkpoint"]
    assert api.plan(model, data=IDS, levels=7, group_size=16).passes == found.passes
    assert "no tokenizer for the text" in api.plan(model, **RECIPE | {"data": text}).problems[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_evaluate_compares_with_a_model_in_memory_and_leaves_it_as_it_is(kind, dtype, tmp_path, text):
    model, tokenizer = loaded(tmp_path / "model", kind, dtype)
    bakron.quantize(tmp_path / "model", tmp_path / "run", method="rtn", levels=7, group_size=16, format="dense", verify=False)
    model.train()
    before = state(model)
    settings = dict(data=text, length=32, sequences=3)
    found = bakron.evaluate(tmp_path / "run", reference=model, **settings)
    unchanged(before, model)
    assert found == bakron.evaluate(tmp_path / "run", reference=tmp_path / "model", **settings)
    assert found["kl"] > 0
    record = json.loads((tmp_path / "run" / "bakron" / "evaluation.json").read_text())
    assert record["kl"] == found["kl"]
    itself = bakron.evaluate(model, reference=model, tokenizer=tokenizer, **settings)
    assert itself["kl"] == 0 and itself["agreement"] == 1
    windows = data.windows(data.load(text, split="evaluation"), tokenizer, length=32, sequences=5).ids
    assert bakron.evaluate(model, reference=model, data=windows, sequences=3) == itself


def test_the_weights_of_a_model_in_host_memory_are_shared_for_evaluation_not_copied():
    model = tiny_model("qwen3")
    read = load.read(load.find(model), torch.float32)
    assert read is not model and read.get_output_embeddings().weight is read.get_input_embeddings().weight
    for name, parameter in read.named_parameters():
        assert parameter.data_ptr() == model.get_parameter(name).data_ptr() and parameter is not model.get_parameter(name)


class Own(type(tiny_model("llama"))):
    """A model that computes in its own way."""


def lora(model):
    model.model.layers[1].mlp.up_proj.base_layer = nn.Linear(4, 4)
    return model


def on_meta(model):
    model.model.layers[0].self_attn.q_proj.to("meta")
    return model


def eight_bits(model):
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.to(torch.float8_e4m3fn)
    return model


def quantized(model):
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def unknown(model):
    shape = dict(vocab_size=128, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32)
    return AutoModelForCausalLM.from_config(OPTConfig(**shape))


def untied(model):
    model.config.tie_word_embeddings = True
    return model


def not_finite(model):
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    return model


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda model: nn.Sequential(model),
            r"a Sequential as a model; expected a path, a hub name, or a PreTrainedModel of transformers. Give",
        ),
        (lambda model: 3, "a int as a model"),
        (lambda model: model.model, "a LlamaModel; expected a LlamaForCausalLM of transformers"),
        (lambda model: Own(model.config), "a Own; expected a LlamaForCausalLM of transformers, none that only derives from it"),
        (unknown, "a model of type 'opt'; expected one of llama"),
        (on_meta, "layers.0.self_attn.q_proj.weight is on the meta device; expected all weights in memory"),
        (eight_bits, "layers.0.mlp.up_proj.weight is float8_e4m3fn; expected plain 16 or 32 bit weights. Start from the original"),
        (quantized, r"already quantized \(quant_method 'fp8'\); expected plain 16 or 32 bit weights"),
        (lora, "holds 2 weights that its config has no place for: model.layers.1.mlp.up_proj.base_layer"),
        (not_finite, "model.norm.weight of LlamaForCausalLM holds NaN or Inf"),
        (untied, "lm_head.weight of LlamaForCausalLM differs from model.embed_tokens.weight, although its config ties them"),
    ],
)
def test_models_that_are_refused(change, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        bakron.quantize(change(tiny_model("llama")), tmp_path / "out", data=IDS, group_size=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"data": IDS.tolist()}, r"data is a list; expected text, or token ids \[N, T\] as an integer tensor. torch.as_tensor"),
        ({"data": IDS.float()}, "data is a tensor of dtype float32; expected text, or token ids"),
        ({"data": IDS > 5}, "data is a tensor of dtype bool"),
        *(({"data": one}, "data is a tensor that is sparse, nested, quantized") for one in (IDS.to("meta"), IDS.to_sparse())),
        ({"data": IDS[0]}, r"data is a tensor of shape \[32\]; expected .* N at least 1, T at least 2"),
        ({"data": IDS[:0]}, r"data is a tensor of shape \[0, 32\]"),
        ({"data": IDS - 20}, "data has token -.*; expected ids from 0 on"),
        (
            {"data": IDS + 100},
            "data has token 1.*; expected tokens below 128, the model's embeddings. Make the ids with this model's tokenizer",
        ),
        ({"data": IDS.repeat(1, 5)}, "sequences of 160 tokens; expected at most 128"),
        ({"data": IDS, "length": 16}, r"length 16 beside token ids \[4, 32\]; expected 32"),
        ({"data": IDS[:2], "gate": True}, "sequences 2, two of which it would hold out"),
        ({}, "no tokenizer for the text, as LlamaForCausalLM is a model in memory; expected tokenizer=, or ready token ids as data"),
        ({"tokenizer": "gpt2"}, "a str as tokenizer; expected a tokenizer of transformers"),
        ({"data": IDS, "format": "gguf", "group_size": 32}, "a model without tokenizer in format gguf"),
    ],
)
def test_data_that_is_refused(arguments, message, tmp_path):
    with pytest.raises(BakronError, match=message):
        bakron.quantize(tiny_model("llama"), tmp_path / "out", **{"group_size": 16} | arguments)
    assert not (tmp_path / "out").exists()


def test_other_arguments_that_are_refused(tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match="a tokenizer beside the path .* which has its own"):
        bakron.quantize(path, tmp_path / "out", tokenizer=tiny_tokenizer(), data=IDS)
    with pytest.raises(RecipeError, match="length 16 beside token ids"):
        bakron.evaluate(path, data=IDS, length=16)
    with pytest.raises(ModelError, match="data has token 1.*Make the ids"):
        bakron.evaluate(path, data=IDS + 100)
    with pytest.raises(ModelError, match="no tokenizer for the text"):
        bakron.evaluate(tiny_model("llama"))
    bakron.quantize(path, tmp_path / "run", method="rtn", group_size=16, verify=False)
    with pytest.raises(OutputError, match="finished run"):
        bakron.quantize(tiny_model("llama"), tmp_path / "run", data=IDS)


def test_gguf_of_a_model_in_memory(tmp_path):
    pytest.importorskip("gguf")
    model, tokenizer = tiny_model("llama"), tiny_bpe()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = dict(method="rtn", bits=4, format="gguf", verify=False)
    bakron.quantize(model, tmp_path / "live", tokenizer=tokenizer, **settings)
    bakron.quantize(tmp_path / "model", tmp_path / "stored", **settings)
    from gguf import GGUFReader

    files = [GGUFReader(tmp_path / name / "model-Q4_0.gguf") for name in ("live", "stored")]
    assert all((one.data == other.data).all() for one, other in zip(files[0].tensors, files[1].tensors, strict=True))
    assert files[0].fields.keys() == files[1].fields.keys()
