import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, save_tiny_gguf, tiny_bpe, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import bakron
from bakron.errors import ModelError, RecipeError
from bakron.export.gguf import rows
from bakron.formats import GGUF_TYPES
from bakron.grids import OffsetGrid, UniformGrid, code_range

WIDE = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)


def stored(out, kind, levels=None, group=None):
    """Weights of a run's linears by module name, from its codes."""
    row = GGUF_TYPES[kind]
    symmetric = True in row.levels
    low, high = code_range(levels or max(row.levels.values()), None, symmetric)
    found = {}
    for i in range(2):
        tensors = load_file(out / "bakron" / "codes" / f"block_{i:04d}.safetensors")
        for name in [key.removesuffix(".codes") for key in tensors if key.endswith(".codes")]:
            grid = UniformGrid(tensors[f"{name}.scale"], tensors.get(f"{name}.zero"), low, high, group or row.group)
            if f"{name}.offset" in tensors:
                grid = OffsetGrid(grid.scale, None, low, high, row.group, None, tensors[f"{name}.offset"])
            found[f"model.layers.{i}.{name}"] = grid.values(tensors[f"{name}.codes"].to(torch.int32))
    return found


def fields(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize("model", ["llama-bias", "qwen2", "qwen3"])
def test_transformers_reads_what_was_solved(model, kind, tmp_path):
    """transformers has its own reader of GGUF, which puts rotary pairs back in its own order."""
    changes = WIDE if GGUF_TYPES[kind].width == 256 else {}
    if model == "qwen3":  # of which that reader knows only heads of 128
        changes = changes | dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
    path, out = save_tiny(tmp_path / "model", model, tokenizer=tiny_bpe(), **changes), tmp_path / "out"
    summary = bakron.quantize(path, out, method="rtn", format="gguf", gguf_type=kind)
    assert {file.name for file in out.iterdir()} == {"bakron", "README.md", f"model-{kind.upper()}.gguf"}
    assert summary["checks"][1].startswith("verified: all 14 linears as the package gguf reads them")
    read = AutoModelForCausalLM.from_pretrained(out, gguf_file=f"model-{kind.upper()}.gguf", dtype=torch.float32)
    rounded, original = stored(out, kind), tiny_model(model, **changes)
    assert len(rounded) == 14
    with torch.no_grad():
        for name, weight in rounded.items():
            original.get_submodule(name).weight.copy_(weight)
    expected = dict(original.named_parameters())
    for name, parameter in read.named_parameters():
        if not (model == "llama-bias" and name.endswith("bias")):  # which that reader leaves out for Llama
            assert torch.equal(parameter, expected[name]), name


def test_llama_biases_follow_their_rows(tmp_path):
    path, out = save_tiny(tmp_path / "model", "llama-bias", tokenizer=tiny_bpe()), tmp_path / "out"
    bakron.quantize(path, out, method="rtn", format="gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out / "model-Q4_0.gguf").tensors}
    bias = load_file(path / "model.safetensors")["model.layers.1.self_attn.q_proj.bias"].numpy()
    assert np.array_equal(tensors["blk.1.attn_q.bias"], bias.reshape(4, 2, 8).transpose(0, 2, 1).flatten())
    assert np.array_equal(
        tensors["blk.1.attn_v.bias"], load_file(path / "model.safetensors")["model.layers.1.self_attn.v_proj.bias"].numpy()
    )


def test_rows_and_back():
    config = tiny_model("llama").config
    weight = torch.arange(64 * 3).reshape(64, 3)
    there = rows(weight, "model.layers.0.self_attn.q_proj", config)
    assert not torch.equal(there, weight) and torch.equal(rows(there, "a.q_proj", config, back=True), weight)
    assert torch.equal(rows(weight, "model.layers.0.self_attn.v_proj", config), weight)


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama"])
def test_vocabulary(cut, tmp_path):
    tokenizer = tiny_bpe(cut)
    path, out = save_tiny(tmp_path / "model", "llama", tokenizer=tokenizer), tmp_path / "out"
    bakron.quantize(path, out, method="rtn", format="gguf")
    found = fields(out / "model-Q4_0.gguf")
    assert found["tokenizer.ggml.model"] == ("llama" if cut == "llama" else "gpt2")
    assert found.get("tokenizer.ggml.pre") == (None if cut == "llama" else cut)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 128 == found["llama.vocab_size"]
    vocabulary = tokenizer.get_vocab()
    assert all(tokens[number] == token for token, number in vocabulary.items())
    assert types[1] == types[2] == gguf.TokenType.CONTROL and set(types[len(vocabulary) :]) <= {gguf.TokenType.UNUSED}
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.add_bos_token"]) == (
        1,
        2,
        True,
    )
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    if cut == "llama":
        scores = found["tokenizer.ggml.scores"]
        assert scores[tokens.index("he\u2581")] > scores[tokens.index("the\u2581")] > -10 and found["tokenizer.ggml.add_space_prefix"]
    else:
        assert len(found["tokenizer.ggml.merges"]) == len(vocabulary) - len({token for token in vocabulary if len(token) == 1}) - 3


def test_vocabulary_of_a_gguf_source_is_copied(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    bakron.quantize(tmp_path / "tiny.gguf", tmp_path / "out", method="rtn", format="gguf", gguf_type="q8_0")
    before, after = fields(tmp_path / "tiny.gguf"), fields(tmp_path / "out" / "model-Q8_0.gguf")
    copied = {name: value for name, value in before.items() if name.startswith("tokenizer.")}
    assert len(copied) == 5 and copied == {name: value for name, value in after.items() if name.startswith("tokenizer.")}
    assert after["general.name"] == "tiny" and after["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0


def test_hyperparameters(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = save_tiny(tmp_path / "model", "llama", tokenizer=tiny_bpe(), rope_parameters=rope)
    bakron.quantize(path, tmp_path / "out", method="rtn", format="gguf")
    reader = gguf.GGUFReader(tmp_path / "out" / "model-Q4_0.gguf")
    found = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    expected = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4, "vocab_size": 128,
        "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 5e5,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    assert len(factors) == 8 and factors[0] == 1.0 and factors[-1] == pytest.approx(8.0)


@pytest.mark.parametrize(
    "kind, changes, tokenizer, message",
    [
        ("mistral", {}, None, "an attention window of 8 tokens in format gguf"),
        ("llama", {}, None, "a tokenizer of kind WordLevel in format gguf"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "gpt-2",
            "a rotary embedding of type 'dynamic' in format gguf; expected one of default, linear, llama3",
        ),
    ],
    ids=["window", "tokenizer", "rope"],
)
def test_what_llama_cpp_has_no_words_for_is_refused_before_the_run(kind, changes, tokenizer, message, tmp_path):
    path = save_tiny(tmp_path / "model", kind, tokenizer=tiny_bpe(tokenizer) if tokenizer else tiny_tokenizer(), **changes)
    with pytest.raises(ModelError, match=message.replace("(", "\\(")):
        bakron.quantize(path, tmp_path / "out", method="rtn", format="gguf")
    assert not (tmp_path / "out").exists()


def test_layers_that_do_not_fill_blocks_are_refused_before_the_run(tmp_path):
    path = save_tiny(tmp_path / "model", "llama", tokenizer=tiny_bpe())
    with pytest.raises(
        RecipeError, match=r"the 64 inputs of q_proj.* in format gguf, type q3_k; expected a multiple of 256\. Use --gguf-type q4_0"
    ):
        bakron.quantize(path, tmp_path / "out", method="rtn", format="gguf", gguf_type="q3_k")
