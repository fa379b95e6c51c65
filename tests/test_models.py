import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, MIXTURES, OTHERS, save_tiny, save_tiny_gguf, tiny_model, tiny_tokenizer
from transformers.pytorch_utils import Conv1D

import bakron
from bakron.errors import ModelError, RecipeError
from bakron.models import layout, load
from bakron.models.layout import LAYOUTS, layout_of
from bakron.models.walk import Walk as AnyWalk
from bakron.models.weights import fingerprint

Walk = partial(AnyWalk, precision="float32")  # bfloat16 products, where the processor has them, are not what is compared with

LENGTH = 32  # four times the sliding windows
KINDS_AND_CHANGES = [
    *[(kind, {}) for kind in (*KINDS, *OTHERS)],
    ("llama", dict(num_key_value_heads=1)),
    ("llama", dict(num_key_value_heads=4)),
    ("llama", dict(head_dim=24)),
    ("llama", dict(tie_word_embeddings=True)),
    ("mistral", dict(head_dim=32)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),  # one full, one sliding block
    ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    ("gemma2", dict(query_pre_attn_scalar=7, attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("gpt2", dict(n_inner=None, scale_attn_by_inverse_layer_idx=True)),
]
WINDOWS = [(kind, changes) for kind, changes in KINDS_AND_CHANGES if kind in ("mistral", "gemma2", "gemma3") or "sliding_window" in changes]


def tokens(sequences=4, length=LENGTH):
    return torch.randint(64, (sequences, length), generator=torch.Generator().manual_seed(2))


def refusal(call, *args, **options):
    with pytest.raises(ModelError) as caught:
        call(*args, **options)
    return str(caught.value)


def read(path):
    return load.read(load.find(str(path)), torch.float32)


# --- block by block is the model's own forward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind, changes", KINDS_AND_CHANGES)
def test_blocks_in_order_are_the_models_own_forward(kind, changes, batch):
    model, ids = tiny_model(kind, **changes).double(), tokens()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    walk = Walk(model, LENGTH, batch=batch)
    hidden = walk.embed(ids)
    positions = model.transformer.wpe.weight[:LENGTH] if kind == "gpt2" else 0
    assert torch.equal(hidden, model.get_input_embeddings()(ids) + positions)
    for i in range(len(walk)):
        hidden = walk.apply(i, hidden)
    torch.testing.assert_close(walk.logits(hidden), expected, rtol=1e-6, atol=1e-6)  # norms and softmax compute in float32
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected)  # the model is as it was


@pytest.mark.parametrize(
    "kind, own, changes",
    [
        *[(kind, own, {"sliding_window": LENGTH}) for kind, own in WINDOWS],
        ("gemma2", {}, dict(attn_logit_softcapping=None)),
        ("gemma2", {}, dict(final_logit_softcapping=None)),
        (
            "gemma3",
            {},
            dict(rope_parameters={f"{one}_attention": dict(rope_type="default", rope_theta=1e4) for one in ("full", "sliding")}),
        ),
        ("phi", {}, dict(partial_rotary_factor=1.0)),
    ],
)
def test_what_makes_the_architecture_is_in_play(kind, own, changes):
    """Sliding windows, soft caps, rotary bases: without them the test above would say nothing of them."""
    model, ids = tiny_model(kind, **own), tokens(1)
    full = tiny_model(kind, **own | changes)
    full.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=ids).logits, full(input_ids=ids).logits, atol=1e-3)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_linears_are_all_those_of_the_blocks(kind):
    model = tiny_model(kind)
    walk = Walk(model, 8)
    found = {f"{walk.prefix(i)}.{name}": linear for i in range(len(walk)) for name, linear in walk.linears(i).items()}
    kinds = (torch.nn.Linear, Conv1D)
    everywhere = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    assert everywhere.pop(walk.layout.head) is model.lm_head
    assert found.keys() == everywhere.keys()
    for name, linear in found.items():
        stored = everywhere[name].weight.T if kind == "gpt2" else everywhere[name].weight
        assert torch.equal(linear.weight, stored) and linear.weight.shape == (linear.out_features, linear.in_features)
        linear.weight.data.copy_(torch.ones(linear.weight.shape))
        assert bool((everywhere[name].weight == 1).all())


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_linears_of_the_table_run_in_its_order_and_share_inputs(kind):
    model = tiny_model(kind)
    order, seen = [], {}
    walk = Walk(model, 8, batch=4)
    groups = walk.shared_inputs(0)
    for name, linear in walk.linears(0).items():
        linear.register_forward_pre_hook(lambda _m, args, name=name: (order.append(name), seen.update({name: args[0]}))[1])
    walk.apply(0, walk.embed(tokens(4, 8)))
    assert list(dict.fromkeys(n for name in order for n, names in enumerate(groups) if name in names)) == list(range(len(groups)))
    assert sorted(order) == sorted(walk.linears(0)) and (kind in MIXTURES or groups == walk.layout.shared_inputs)
    for names in groups:
        assert all(seen[name] is seen[names[0]] for name in names)
    assert len({id(x) for x in seen.values()}) == len(groups)


def test_walk_is_differentiable_only_where_asked():
    walk = Walk(tiny_model("llama"), 8)
    hidden = walk.embed(tokens(1, 8))
    assert not walk.apply(0, hidden).requires_grad
    x = hidden.clone().requires_grad_()
    walk.run(0, x).sum().backward()
    assert bool(x.grad.any())


def test_walk_never_runs_the_head():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("logits of every token"))
    walk = Walk(model, 8)
    walk.apply(1, walk.apply(0, walk.embed(tokens(2, 8))))


def test_sequences_longer_than_the_model_allows():
    assert refusal(Walk, tiny_model("llama"), 129) == (
        "sequences of 129 tokens; expected at most 128, the model's max_position_embeddings. Use a smaller length."
    )


def test_linear_of_another_kind_or_missing():
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    assert refusal(Walk, model, 8) == "mlp.up_proj of block 1 is a Identity; expected torch.nn.Linear."
    turned = tiny_model("gpt2")
    turned.transformer.h[0].mlp.c_fc = torch.nn.Linear(64, 96)
    assert refusal(Walk, turned, 8) == "mlp.c_fc of block 0 is a Linear; expected transformers' Conv1D."
    del model.model.layers[1].mlp.up_proj
    assert refusal(Walk, model, 8) == "block 1 has no mlp.up_proj; expected the layout of llama."


def test_unknown_architecture_lists_the_known_ones():
    assert refusal(layout_of, "bloom") == f"a model of type 'bloom'; expected one of {', '.join(LAYOUTS)}."


# --- reading ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_read_as_stored(kind, dtype, tmp_path):
    source = load.find(str(save_tiny(tmp_path, kind, dtype=dtype)))
    model = load.read(source, torch.float32)
    expected = tiny_model(kind).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name].to(dtype).float()), name
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert load.stored_dtype(source, model) == str(dtype).removeprefix("torch.")
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings == (kind in ("qwen3", "gemma2", "gemma3", "gpt2"))


def test_dtype_under_its_older_name(tmp_path):
    path = save_tiny(tmp_path, "llama", dtype=torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    assert load.stored_dtype(load.find(str(path)), None) == "bfloat16"


@pytest.mark.parametrize("kind, changes", KINDS_AND_CHANGES)
def test_widths_of_the_config_are_those_of_the_weights(kind, changes, tmp_path):
    told = layout.widths(load.early_config(load.find(str(save_tiny(tmp_path, kind, **changes)))))
    linears = Walk(tiny_model(kind, **changes), 8).linears(0)
    found = {name: width for names, width in told.items() for name in names.split(", ")}
    assert kind in MIXTURES or len(found) == len(linears)
    assert found == {name if name in found else name.split(".")[-1]: linear.in_features for name, linear in linears.items()}


def test_shards_are_read(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert fingerprint(read(tmp_path)) == fingerprint(model)


def test_fingerprint_tells_one_changed_weight():
    model = tiny_model("llama")
    before = fingerprint(model)
    assert before == fingerprint(tiny_model("llama"))
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(10.0))
    assert fingerprint(model) != before


def test_callers_state_stays_and_nothing_is_printed(tmp_path, capfd):
    from transformers.utils import logging

    path = save_tiny(tmp_path, "llama", dtype=torch.bfloat16)
    capfd.readouterr()
    before = torch.get_rng_state(), torch.get_default_dtype(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    read(path)
    load.read_tokenizer(load.find(str(path)))
    after = torch.get_rng_state(), torch.get_default_dtype(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert capfd.readouterr() == ("", "")


def test_tokenizer_missing(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    message = refusal(load.read_tokenizer, load.find(str(tmp_path)))
    assert message.startswith(f"no tokenizer can be loaded from {tmp_path}: ") and message.endswith(
        "expected a tokenizer beside the model. Copy one there, or give token ids as data= in Python."
    )


def test_hub_name_is_not_looked_up_to_be_found():
    source = load.find("org/name")
    assert (source.name, source.path, source.gguf, source.config, source.quantized) == ("org/name", None, None, None, None)


# --- GGUF ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
def test_gguf(quantized, tmp_path):
    file = tmp_path / "tiny.gguf"
    expected = save_tiny_gguf(file, quantized=quantized).state_dict()
    source = load.find(str(file))
    assert layout.widths(load.early_config(source)) == {"q_proj, k_proj, v_proj, gate_proj, up_proj": 64, "o_proj": 64, "down_proj": 96}
    model = load.read(source, torch.float32)
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert load.stored_dtype(source, model) == "bfloat16"
    tokenizer = load.read_tokenizer(source)
    text = "the fox, 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    Walk(model, 8)


@pytest.mark.parametrize("keep", [4, 2000, -5000])
def test_damaged_gguf(keep, tmp_path):
    file = tmp_path / "tiny.gguf"
    save_tiny_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(bakron.quantize, file, tmp_path / "out", method="rtn")
    assert message.startswith(f"{file} is damaged: ") and message.endswith("expected a complete GGUF file. Download it again.")
    assert not (tmp_path / "out").exists()


def test_gguf_of_unknown_architecture(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "bloom")
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_head_count):
        add(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "a model of type 'bloom'; expected one of llama" in refusal(bakron.quantize, tmp_path / "a.gguf", tmp_path / "out")


# --- checkpoints that are refused before anything is loaded ------------------------------------------------------------------------------

LFS = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
SHARD, INDEX = "model-00002-of-00006.safetensors", "model.safetensors.index.json"


def changed_config(**changes):
    def change(path):
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def written(name, content):
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name, share):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[: int(share * (path / name).stat().st_size)])


def removed(name):
    return lambda path: (path / name).unlink()


def stored_as(dtype, leaf="weight"):
    """An MLP weight of the first block in another dtype, as files have it whose config lacks its quantization_config."""

    def change(path):
        name = "model.layers.0.mlp.up_proj"
        file = path / json.loads((path / INDEX).read_text())["weight_map"][f"{name}.weight"]
        tensors = load_file(file)
        tensors[f"{name}.{leaf}"] = tensors.pop(f"{name}.weight").to(dtype)
        save_file(tensors, file, {"format": "pt"})

    return change


def pickled(path):
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"PK")


def points_outside(path):
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../model.safetensors"
    (path / INDEX).write_text(json.dumps(index))


DAMAGE = {
    "no config": (removed("config.json"), "no config.json in {path}; expected a Hugging Face model directory."),
    "config not JSON": (cut("config.json", 0.5), "{path}/config.json cannot be read: "),
    "config not UTF-8": (written("config.json", b'{"a": "\xff"}'), "{path}/config.json cannot be read: "),
    "config a list": (written("config.json", "[]"), "{path}/config.json holds a list; expected a JSON object."),
    "unknown architecture": (changed_config(model_type="bloom"), "a model of type 'bloom'; expected one of llama, "),
    "no architecture": (changed_config(model_type=None), "a model of type 'None'; expected one of llama, "),
    "fp8": (
        changed_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "{path} is already quantized (quant_method 'fp8' in its config.json); expected a model with plain 16 or 32 bit weights. "
        "Start from the original checkpoint.",
    ),
    "fp8 without a word": (
        stored_as(torch.float8_e4m3fn),
        "{path} is already quantized: model.layers.0.mlp.up_proj.weight is stored as F8_E4M3; expected a model with plain 16 or 32 bit",
    ),
    "int8 without a word": (
        stored_as(torch.int8),
        "{path} is already quantized: model.layers.0.mlp.up_proj.weight is stored as I8; expected",
    ),
    "gptq": (changed_config(quantization_config={"quant_method": "gptq", "bits": 4}), "is already quantized (quant_method 'gptq' in its"),
    "gptq without a word": (
        stored_as(torch.int32, "qweight"),
        "{path} is already quantized: model.layers.0.mlp.up_proj.qweight is stored as I32; expected a model with plain 16 or 32 bit weights",
    ),
    "nosuch": (changed_config(quantization_config={"quant_method": "nosuch"}), "is already quantized (quant_method 'nosuch'"),
    "no method": (changed_config(quantization_config={"bits": 4}), "is already quantized (quant_method 'unknown'"),
    "shard missing": (removed(SHARD), "{path}/" + SHARD + " is missing; expected every weight file of the checkpoint. Download it again."),
    "shard cut": (cut(SHARD, 0.5), "{path}/" + SHARD + " is damaged ("),
    "shard too long": (lambda path: (path / SHARD).open("ab").write(b"\0" * 8), "{path}/" + SHARD + " is damaged ("),
    "shard cut in its header": (cut(SHARD, 0.001), "{path}/" + SHARD + " is damaged ("),
    "shard empty": (written(SHARD, b""), "{path}/" + SHARD + " is damaged (0 bytes"),
    "shard is a pointer": (written(SHARD, LFS), "{path}/" + SHARD + " is damaged ("),
    "shard is zeros": (written(SHARD, bytes(5000)), "{path}/" + SHARD + " is damaged ("),
    "index missing": (removed(INDEX), "{path}/model.safetensors is missing; expected every weight file"),
    "index not JSON": (cut(INDEX, 0.5), "{path}/" + INDEX + " cannot be read: "),
    "index a list": (written(INDEX, "[]"), "{path}/" + INDEX + " cannot be read: "),
    "index without map": (written(INDEX, "{}"), "{path}/" + INDEX + " cannot be read: "),
    "index with numbers": (written(INDEX, '{"weight_map": {"a": 1}}'), "{path}/" + INDEX + " cannot be read: "),
    "index outside": (
        points_outside,
        "{path}/" + INDEX + " points outside its directory: ../model.safetensors; expected plain file names.",
    ),
    "pickled": (pickled, "{path} holds pickled weights (.bin); expected safetensors. Load it in transformers and call save_pretrained."),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_refused_by_name_before_it_is_loaded(name, tmp_path):
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path, max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(path)
    assert load.find(str(path)).path == path
    damage, expected = DAMAGE[name]
    damage(path)
    message = refusal(load.find, str(path))
    assert expected.format(path=path) in message
    assert refusal(bakron.quantize, path, tmp_path / "out") == message
    assert not (tmp_path / "out").exists()


def test_own_output_is_refused_as_input(tmp_path):
    bakron.quantize(save_tiny(tmp_path / "model", "llama"), tmp_path / "out", method="rtn", group_size=32)
    message = refusal(bakron.quantize, tmp_path / "out", tmp_path / "again")
    assert message.startswith(f"{tmp_path / 'out'} is already quantized (quant_method 'compressed-tensors'")
    assert load.find(str(tmp_path / "out"), quantized=True).quantized == "compressed-tensors"


@pytest.mark.parametrize("name", ["{path}/none", "./none", "none", "a/b/c", "/org/name"])
def test_nothing_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = name.format(path=tmp_path)
    assert refusal(load.find, name) == (
        f"no file or directory {name}; expected a Hugging Face directory, a hub name (org/name), or a GGUF file. Check the path."
    )


def test_file_of_another_kind(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, file)
    assert refusal(load.find, str(file)) == (
        f"{file} is a file that does not start with 'GGUF'; expected a Hugging Face directory, a hub name, or a GGUF file."
    )


# --- weights that are not what they should be ---------------------------------------------------------------------------------------------


def rewritten(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_weight_that_is_not_finite_is_named(name, value, tmp_path):
    path = rewritten(save_tiny(tmp_path, "llama"), lambda weights: weights[name].view(-1)[5:6].fill_(value))
    assert refusal(read, path) == f"{name} of {path} holds NaN or Inf; expected finite weights. Download it again."


def test_missing_weights_are_named(tmp_path):
    def drop(weights):
        del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]

    path = rewritten(save_tiny(tmp_path, "llama"), drop)
    assert refusal(read, path) == f"{path} lacks 2 weights: model.layers.1.mlp.up_proj.weight, model.norm.weight; expected all weights."


def test_packed_weights_without_a_config_that_says_so(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    path = rewritten(save_tiny(tmp_path, "llama"), lambda weights: weights.update({name + "_packed": weights.pop(name).int()}))
    assert f"lacks 1 weights: {name};" in refusal(read, path)


def test_tied_head_needs_no_weight_of_its_own(tmp_path):
    path = save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    read(path)


def test_weights_of_another_shape(tmp_path):
    path = save_tiny(tmp_path, "llama")
    changed_config(intermediate_size=128)(path)
    assert refusal(read, path) == (
        f"model.layers.0.mlp.down_proj.weight of {path} has shape [64, 96]; expected [64, 128] by its config. Get weights and config of one model."
    )


def test_blocks_beyond_the_count_of_the_config(tmp_path):
    path = save_tiny(tmp_path, "llama")
    changed_config(num_hidden_layers=1)(path)
    assert f"{path} holds 9 weights that its config has no place for: model.layers.1.input_layernorm.weight, " in refusal(read, path)


def test_biases_that_the_config_denies(tmp_path):
    path = save_tiny(tmp_path, "llama-bias")
    changed_config(attention_bias=False)(path)
    assert refusal(read, path) == (
        f"{path} holds 8 weights that its config has no place for: model.layers.0.self_attn.k_proj.bias, "
        "model.layers.0.self_attn.o_proj.bias, model.layers.0.self_attn.q_proj.bias. Get weights and config of one model."
    )
    changed_config(attention_bias=True)(path)
    read(path)


def test_experts_with_zero_points_are_refused_where_no_reader_has_them():
    for kind in ("mixtral", "qwen3_moe"):
        layout.check_format(kind, "compressed-tensors")
        layout.check_format(kind, "dense", symmetric=False)
        with pytest.raises(RecipeError, match="zero points in format compressed-tensors for a model of type"):
            layout.check_format(kind, "compressed-tensors", symmetric=False)
