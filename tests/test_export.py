import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import KINDS, save_tiny, save_tiny_gguf, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import bakron
import bakron.reader
from bakron.errors import ModelError
from bakron.export import compressed_tensors
from bakron.export.card import model_card
from bakron.grids import UniformGrid, code_range
from bakron.hessian import FACTORS

TEXT = "the quick brown fox jumps over the lazy dog; 0123456789.\n" * 60
LINEARS = 14  # in two blocks
FORMATS = ("compressed-tensors", "packed", "dense")  # those that transformers reads with what is installed here


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def quantize(model, out, text, **recipe):
    return bakron.quantize(model, out, **{**dict(levels=7, group_size=32, sequences=4, length=32, data=text, verify=False), **recipe})


def stored_linears(out, symmetric=True):
    """Weights of all linears from `out/bakron/codes` alone, by the definition of the grid, float32."""
    found = {}
    for i in range(2):
        tensors = load_file(out / "bakron" / "codes" / f"block_{i:04d}.safetensors")
        for name, codes in tensors.items():
            if name.endswith(".codes"):
                linear = name.removesuffix(".codes")
                scale = tensors[f"{linear}.scale"].float()
                zero = torch.zeros_like(scale) if symmetric else tensors[f"{linear}.zero"].float()
                repeat = codes.shape[1] // scale.shape[1]
                values = (codes.float() - zero.repeat_interleave(repeat, 1)) * scale.repeat_interleave(repeat, 1)
                found[f"model.layers.{i}.{linear}.weight"] = values
    assert len(found) == LINEARS
    return found


def weights_of(model):
    """By name, whether or not tied; without what compressed-tensors leaves beside an unpacked weight."""
    packing = (".weight_packed", ".weight_scale", ".weight_shape")
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False) if not name.endswith(packing)}


def assert_reloads(out, original, dtype, symmetric=True):
    """A plain `from_pretrained` gives the rounded linears, and everything else as it was, bit for bit."""
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == dtype
    model(input_ids=torch.arange(8)[None])  # compressed-tensors unpacks at the first forward
    rounded, found, expected = stored_linears(out, symmetric), weights_of(model), weights_of(original)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == dtype, name
        assert torch.equal(parameter, rounded.get(name, expected[name]).to(dtype)), name
    return model


# --- bits ---------------------------------------------------------------------------------------------------------------------------------


def bit_by_bit(words, width, n):
    """Unpack one row: code j is bits j * width to (j + 1) * width of the little-endian stream of 32-bit words."""
    bits = []
    for word in words:
        for k in range(32):
            bits.append((int(word) & 0xFFFFFFFF) >> k & 1)
    codes = []
    for j in range(n):
        codes.append(sum(bits[j * width + k] << k for k in range(width)))
    assert not any(bits[n * width :])
    return codes


@given(st.data(), st.integers(2, 8), st.integers(1, 4), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_packed_codes_are_a_little_endian_bit_stream(data, width, m, n):
    codes = data.draw(st.lists(st.lists(st.integers(0, 2**width - 1), min_size=n, max_size=n), min_size=m, max_size=m))
    packed = compressed_tensors.pack(torch.tensor(codes), width)
    assert packed.dtype == torch.int32 and packed.shape == (m, -(-n * width // 32)) and packed.is_contiguous()
    assert [bit_by_bit(row.tolist(), width, n) for row in packed] == codes


@pytest.mark.parametrize("width", range(2, 9))
def test_extreme_codes(width):
    for code in (0, 2**width - 1):
        packed = compressed_tensors.pack(torch.full((1, 33), code), width)
        assert bit_by_bit(packed[0].tolist(), width, 33) == [code] * 33


@pytest.mark.parametrize("levels", [*range(2, 18), 31, 32, 33, 100, 128, 129, 255, 256])
def test_code_bits_hold_the_grid_and_no_more(levels):
    low, high = code_range(levels, None, True)
    width = compressed_tensors.code_bits(UniformGrid(torch.ones(1, 1), None, low, high))
    assert width >= 2 and 0 <= low + 2 ** (width - 1) and high + 2 ** (width - 1) < 2**width
    assert width == 2 or levels > 2 ** (width - 1)


# --- from end to end, for every architecture ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_reloads_as_it_was_solved(kind, format, tmp_path, text):
    path = save_tiny(tmp_path / "model", kind)
    summary = quantize(path, tmp_path / "out", text, format=format)
    original = tiny_model(kind)
    model = assert_reloads(tmp_path / "out", original, torch.float32)
    linears = stored_linears(tmp_path / "out")
    assert all(not torch.equal(weights_of(original)[name], values) for name, values in linears.items())
    assert summary["parameters"]["quantized"] == sum(values.numel() for values in linears.values())
    assert {name for name in weights_of(model) if name.endswith(".bias")} == {
        name for name in weights_of(original) if name.endswith(".bias")
    }
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (kind == "qwen3")
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (not tied)
    assert model.config.use_cache is True


@pytest.mark.parametrize("group_size", [16, None])
@pytest.mark.parametrize("levels", [2, 3, 4, 7, 8, 15, 16, 31, 256])
@pytest.mark.parametrize("format", FORMATS)
def test_levels_and_groups(format, levels, group_size, tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    bakron.quantize(path, tmp_path / "out", method="rtn", levels=levels, group_size=group_size, format=format, verify=False)
    assert_reloads(tmp_path / "out", tiny_model("llama"), torch.float32)
    for values in load_file(tmp_path / "out" / "bakron" / "codes" / "block_0000.safetensors").values():
        if not values.is_floating_point():
            assert len(values.unique()) <= levels and int(values.max()) - int(values.min()) >= levels - 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if format == "dense":
        assert "quantization_config" not in config
    elif format == "packed":
        found = config["quantization_config"]
        assert (found["levels"], found["group_size"], found["symmetric"]) == (levels, group_size, True)
    else:
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        width = max(2, (levels - 1).bit_length())
        assert (weights["num_bits"], weights["strategy"], weights.get("group_size")) == (
            width, "channel" if group_size is None else "group", group_size
        )  # fmt: skip
        assert config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("levels", [2, 7, 16, 256])
def test_zero_points(levels, tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    bakron.quantize(path, tmp_path / "out", method="rtn", levels=levels, group_size=32, format="dense", symmetric=False)
    assert_reloads(tmp_path / "out", tiny_model("llama"), torch.float32, symmetric=False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", ["auto", "float16", "bfloat16", "float32"])
def test_dtypes(asked, stored, format, tmp_path, text):
    path = save_tiny(tmp_path / "model", "llama-bias", dtype=stored)
    dtype = stored if asked == "auto" else getattr(torch, asked)
    original = tiny_model("llama-bias").to(stored)
    summary = quantize(path, tmp_path / "out", text, format=format, dtype=asked)
    assert_reloads(tmp_path / "out", original, dtype)
    assert summary["dtype"] == str(dtype).removeprefix("torch.")
    for name, tensor in load_file(tmp_path / "out" / "bakron" / "codes" / "block_0001.safetensors").items():
        assert tensor.dtype == (dtype if name.endswith(".scale") else torch.int8)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("model", "out")]
    if format != "dense":
        assert sizes[1] < sizes[0]
    elif dtype == stored:
        assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def with_large_row(path, name, factor):
    """A tiny llama in float32, one row of one weight times `factor`."""
    save_tiny(path, "llama")
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(name)[3] *= factor
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype, factor", [("float16", 1e5), ("float16", 1e-7), ("bfloat16", 1e6), ("bfloat16", 1e-7), ("bfloat16", 1e-30)])
def test_the_scale_rounded_with_is_the_one_stored_however_large_or_small(format, dtype, factor, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    model = with_large_row(tmp_path / "model", name, factor)
    recipe = dict(method="rtn", levels=15, group_size=32, format=format, dtype=dtype)
    checks = bakron.quantize(tmp_path / "model", tmp_path / "out", **recipe)["checks"]
    assert all(line.startswith("verified") for line in checks[:2])  # the forward pass may overflow, as the original's would
    row = assert_reloads(tmp_path / "out", model, getattr(torch, dtype)).get_parameter(name)[3].detach().double()
    expected = model.get_parameter(name)[3].detach().double()
    if dtype == "bfloat16" or factor > 1:
        assert float((row - expected).norm() / expected.norm()) < 0.15
    assert bool(torch.isfinite(row).all())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_beyond_the_range_of_the_dtype_are_refused(name, tmp_path):
    reached = float(with_large_row(tmp_path / "model", name, 1e6).get_parameter(name).detach().abs().max())
    with pytest.raises(ModelError) as caught:
        bakron.quantize(tmp_path / "model", tmp_path / "out", method="rtn", group_size=32, dtype="float16")
    assert (
        str(caught.value)
        == f"{name} reaches {reached:.3g}; expected at most 6.55e+04, the range of float16. Choose dtype bfloat16 or float32."
    )
    assert not (tmp_path / "out").exists()


# --- what lies beside the weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen2"])
def test_tokenizer_reloads(kind, tmp_path):
    path = save_tiny(tmp_path / "model", kind)
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (path / "chat_template.jinja").write_text(template)
    bakron.quantize(path, tmp_path / "out", method="rtn", group_size=32)
    before, after = AutoTokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after("the fox, 12\n")["input_ids"] == before("the fox, 12\n")["input_ids"]
    assert after.chat_template == template
    assert after.pad_token is None and after.special_tokens_map == before.special_tokens_map
    for file in path.glob("tokenizer*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        '{"do_sample": false, "temperature": 0.9, "top_p": 0.6,   "eos_token_id": 2}',
        '{"max_new_tokens": 7}',
        '{"no_such_key": [1]}',
        None,
        "{broken",
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_generation_config_is_copied_verbatim_whatever_it_says(format, content, tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    file = path / "generation_config.json"
    file.unlink() if content is None else file.write_text(content)
    bakron.quantize(path, tmp_path / "out", method="rtn", group_size=32, format=format)
    if content is not None:
        assert (tmp_path / "out" / "generation_config.json").read_text() == content
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_model_card_names_model_and_figures(tmp_path):
    path = save_tiny(tmp_path / "model", "llama")
    summary = bakron.quantize(path, tmp_path / "out", method="rtn", group_size=32, levels=7)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and str(tmp_path) not in card  # a path means nothing to others
    assert 'base_model: "org/name"' in model_card({**summary, "model": "org/name"}, tokenizer=True)
    assert "AutoTokenizer.from_pretrained" in card and "Tokenizer" not in model_card(summary, tokenizer=False)
    for words in (
        "7 levels",
        "rounding to nearest",
        f"{summary['bits_per_weight']} bits",
        "one scale per 32 inputs",
        "compressed-tensors>=0.18",
    ):
        assert words in card
    assert "compressed-tensors" not in (dense_card(path, tmp_path))


@pytest.mark.parametrize(
    "recipe, words",
    [
        (dict(format="packed"), "import bakron.reader"),
        (dict(format="gptq"), "pip install gptqmodel optimum"),
        (dict(symmetric=False), "quantization_config=CompressedTensorsConfig(dequantize=True)"),
    ],
    ids=str,
)
def test_model_card_says_how_to_load(recipe, words, tmp_path):
    bakron.quantize(save_tiny(tmp_path / "model", "llama"), tmp_path / "out", method="rtn", group_size=32, verify=False, **recipe)
    assert words in (tmp_path / "out" / "README.md").read_text()


def dense_card(path, tmp_path):
    bakron.quantize(path, tmp_path / "dense", method="rtn", group_size=32, format="dense")
    return (tmp_path / "dense" / "README.md").read_text()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("quantized", [False, True])
def test_from_gguf(quantized, format, tmp_path, text):
    original = save_tiny_gguf(tmp_path / "tiny.gguf", quantized=quantized)
    quantize(tmp_path / "tiny.gguf", tmp_path / "out", text, format=format)
    assert_reloads(tmp_path / "out", original, torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    method = {"compressed-tensors": "compressed-tensors", "packed": "bakron"}.get(format)
    assert config.get("quantization_config", {}).get("quant_method") == method
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the fox")["input_ids"]


def test_output_holds_what_is_documented_and_nothing_else(tmp_path, text):
    quantize(save_tiny(tmp_path / "model", "llama"), tmp_path / "out", text, factor=next(iter(FACTORS)))
    found = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert found == [
        "README.md",
        "bakron/codes/block_0000.safetensors",
        "bakron/codes/block_0001.safetensors",
        "bakron/events.jsonl",
        "bakron/recipe.yaml",
        "bakron/run.json",
        "bakron/summary.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not (tmp_path / "out" / "bakron" / "gradients").exists()
