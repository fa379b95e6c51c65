"""Every format's bytes, read by unpackers that share no code with the packers."""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import save_tiny

import bakron
from bakron.errors import OutputError, RecipeError
from bakron.export import FORMATS, Linear, form_of
from bakron.formats import GGUF_TYPES
from bakron.grids import OffsetGrid, UniformGrid, code_range
from bakron.reader import word

CASES = [(name, None) for name in FORMATS if name != "gguf"] + [("gguf", kind) for kind in GGUF_TYPES]


def stream(words, width, count):
    """`[rows, words]` int32 as a little-endian stream of `width` bits a number: `[rows, count]`."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")[:, : count * width]
    return bits.reshape(len(words), count, width).astype(np.int64) @ (1 << np.arange(width))


def per_input(per_group, n):
    return np.repeat(per_group, n // per_group.shape[1], axis=1)


def unpack(format, kind, tensors, config, shape):
    """Weights `[m, n]` in float64, by what the format's own documents say."""
    m, n = shape
    tensors = {name.removeprefix("p."): tensor for name, tensor in tensors.items()}
    arrays = {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in tensors.items()}
    if format == "dense":
        return arrays["weight"].astype(np.float64)
    if format == "gguf":
        return gguf.quants.dequantize(arrays["weight"], gguf.GGMLQuantizationType[kind.upper()]).astype(np.float64)
    if format == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        width, scale = weights["num_bits"], arrays["weight_scale"]
        codes, zero = stream(arrays["weight_packed"], width, n), np.full(scale.shape, 1 << (width - 1))
        assert arrays["weight_shape"].tolist() == [m, n] and arrays["weight_packed"].shape == (m, -(-n * width // 32))
        if not weights["symmetric"]:
            zero = stream(arrays["weight_zero_point"].T, width, m).T
        assert weights["symmetric"] == ("weight_zero_point" not in arrays)
        assert (weights["strategy"], weights.get("group_size")) == (
            ("group", n // scale.shape[1]) if scale.shape[1] > 1 else ("channel", None)
        )
        return (codes - per_input(zero, n)) * per_input(scale.astype(np.float64), n)
    if format == "gptq":
        width, groups = config["bits"], arrays["g_idx"]
        assert width in (2, 3, 4, 8) and arrays["qweight"].shape == (n * width // 32, m) and tensors["scales"].dtype == torch.float16
        zero = stream(arrays["qzeros"], width, m) + (config["checkpoint_format"] == "gptq")
        assert config["checkpoint_format"] == ("gptq" if config["sym"] else "gptq_v2") and config["desc_act"] is False
        assert groups.tolist() == [j // (n if config["group_size"] == -1 else config["group_size"]) for j in range(n)]
        codes = stream(arrays["qweight"].T, width, n)
        return (codes - zero[groups].T) * arrays["scales"].astype(np.float64)[groups].T
    levels, scale, codes = config["levels"], arrays["weight_scale"], []
    for number in (int.from_bytes(row.tobytes(), "little") for row in arrays["weight_packed"]):
        for _ in range(word(levels)[0]):
            number, code = divmod(number, levels)
            codes.append(code)
    assert not any(codes[m * n :])
    zero = np.full(scale.shape, levels // 2) if config["symmetric"] else arrays["weight_zero"].astype(np.int64)
    return (np.reshape(codes[: m * n], (m, n)) - per_input(zero, n)) * per_input(scale.astype(np.float64), n)


def random_linear(kind, levels, symmetric, shape, group, seed, dtype=torch.float16):
    """Codes that are anything but those of rounding to nearest, on scales that the format holds."""
    generator = torch.Generator().manual_seed(seed)
    row = GGUF_TYPES.get(kind)
    W = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    form = row.form if row else "float"
    dtype = getattr(torch, row.scale) if row else dtype
    if form.startswith("super"):
        grid = OffsetGrid.fit_super(W, levels, group or row.group, "absmax", None, int(form[5:]))
    else:
        grid = UniformGrid.fit(W, levels, group, "absmax", symmetric, dtype=dtype, scale_format=form)
    return Linear(torch.randint(grid.low, grid.high + 1, shape, generator=generator, dtype=torch.int32), grid)


def assert_exact(format, kind, linear, dtype=torch.float16):
    form = form_of(format, kind)
    config = form.quantization_config(linear.grid, ["lm_head"])
    json.dumps(config)
    found = unpack(format, kind, form.encode("p", linear, dtype), config, linear.codes.shape)
    expected = linear.grid.values(linear.codes, torch.float64)
    assert np.array_equal(found, (expected.to(dtype).double() if format == "dense" else expected).numpy())


LEVELS = (2, 3, 4, 7, 8, 16, 100, 256)
HELD = [
    (format, kind, levels, symmetric)
    for format, kind in CASES
    for symmetric in (True, False)
    for levels in LEVELS
    if kind is None or levels <= GGUF_TYPES[kind].levels.get(symmetric, 0)
]


@pytest.mark.parametrize("channel", [False, True], ids=["group", "channel"])
@pytest.mark.parametrize("format, kind, levels, symmetric", HELD)
def test_bytes_say_what_was_solved(format, kind, levels, symmetric, channel):
    row = GGUF_TYPES.get(kind)
    linear = random_linear(kind, levels, symmetric, (64, 512), None if channel else 16 if row is None else row.group, levels)
    assert_exact(format, kind, linear)


@pytest.mark.parametrize("format, kind", CASES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_shape_and_any_codes(format, kind, data):
    row = GGUF_TYPES.get(kind)
    unit = row.width if row else 32 if format == "gptq" else 1
    symmetric = data.draw(st.sampled_from(sorted(row.levels) if row else [False, True]))
    levels = data.draw(st.integers(2, row.levels[symmetric] if row else 256))
    m, groups = data.draw(st.integers(1, 3)) * (32 if format == "gptq" else 1), data.draw(st.integers(1, 4))
    size = unit * data.draw(st.integers(1, 3)) if unit > 1 else data.draw(st.integers(1, 40))
    group = None if groups == 1 else row.group if row and row.width == 256 else size
    assert_exact(format, kind, random_linear(kind, levels, symmetric, (m, groups * size), group, data.draw(st.integers(0, 99))))


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("format, kind", [case for case in CASES if case[0] != "dense"])
def test_codes_outside_their_grid_never_spill_over(format, kind, wrong):
    symmetric = True in GGUF_TYPES[kind].levels if kind else True
    linear = random_linear(kind, 7, symmetric, (32, 512), 32, 0)
    linear.codes[3, 5] = linear.grid.low - 1 if wrong < 0 else linear.grid.high + 1
    with pytest.raises(
        OutputError, match=f"a code {int(linear.codes[3, 5])} of p; expected codes from {linear.grid.low} to {linear.grid.high}"
    ):
        form_of(format, kind).encode("p", linear, torch.float16)


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "packed"])
def test_zero_points_outside_their_codes_never_spill_over(format):
    linear = random_linear(None, 7, False, (32, 64), 32, 0)
    linear.grid.zero[2, 1] = 9
    with pytest.raises(OutputError, match="a zero point of p outside its codes; expected 0 to 6"):
        form_of(format, None).encode("p", linear, torch.float16)


@pytest.mark.parametrize(
    "format, kind, dtype", [("gptq", None, None), ("gguf", "q4_0", None), ("compressed-tensors", None, torch.bfloat16)]
)
def test_scales_are_never_rounded_on_the_way(format, kind, dtype):
    linear = random_linear(None, 7, True, (32, 64), 32, 0, torch.float32)
    with pytest.raises(RecipeError, match=f"the scales of p are float32, and {'b' if dtype else ''}float16 cannot hold them"):
        form_of(format, kind).encode("p", linear, dtype)


def test_k_types_refuse_scales_that_are_no_multiples():
    linear = random_linear(None, 8, True, (4, 512), 16, 0)
    for kind in ("q3_k", "q6_k"):
        with pytest.raises(RecipeError, match="no whole multiples.*Quantize again with this --gguf-type"):
            form_of("gguf", kind).encode("p", linear, torch.float16)


def test_q4_1_refuses_minima_that_float16_cannot_hold():
    linear = random_linear(None, 16, False, (4, 64), 32, 0)
    with pytest.raises(RecipeError, match="zero points of p whose product"):
        form_of("gguf", "q4_1").encode("p", linear, torch.float16)


# --- packed -------------------------------------------------------------------------------------------------------------------------------


def test_words_hold_their_codes_and_waste_little():
    for levels in range(2, 257):
        count, size = word(levels)
        assert levels**count <= 256**size and size <= 7
        assert 8 * size / count <= 8
    assert 8 * word(7)[1] / word(7)[0] < 2.83  # log2(7) is 2.81
    assert all(8 * word(2**b)[1] / word(2**b)[0] == b for b in range(1, 9))


@pytest.mark.parametrize("shape", [(64, 64), (17, 3), (192, 576)])
def test_seven_levels_take_less_than_285_hundredths_of_a_bit(shape):
    linear = random_linear(None, 7, True, shape, None, 0)
    packed = form_of("packed", None).encode("p", linear, torch.float16)["p.weight_packed"]
    assert packed.numel() == 6 * math.ceil(linear.codes.numel() / 17)
    assert 8 * packed.numel() / linear.codes.numel() <= (2.85 if linear.codes.numel() > 1000 else 3.0)


# --- from end to end ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels, symmetric, group", [(7, True, 32), (16, True, None), (8, False, 32), (256, False, None)])
@pytest.mark.parametrize("kind", ["llama-bias", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "packed"])
def test_files_of_a_run_unpack_to_its_codes(format, kind, levels, symmetric, group, tmp_path):
    path, out = save_tiny(tmp_path / "model", kind), tmp_path / "out"
    summary = bakron.quantize(path, out, method="rtn", levels=levels, symmetric=symmetric, group_size=group, format=format)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors, before = load_file(out / "model.safetensors"), load_file(path / "model.safetensors")
    low, high = code_range(levels, None, symmetric)
    for i in range(2):
        stored = load_file(out / "bakron" / "codes" / f"block_{i:04d}.safetensors")
        for name in [key.removesuffix(".codes") for key in stored if key.endswith(".codes")]:
            module, codes = f"model.layers.{i}.{name}", stored[f"{name}.codes"].to(torch.int32)
            grid = UniformGrid(stored[f"{name}.scale"], stored.get(f"{name}.zero"), low, high, group)
            own = {
                f"p{key.removeprefix(module)}": tensors.pop(key)
                for key in list(tensors)
                if key.startswith(module + ".") and "bias" not in key
            }
            assert np.array_equal(unpack(format, None, own, config, codes.shape), grid.values(codes, torch.float64).numpy())
            before.pop(f"{module}.weight")
    assert tensors.keys() == before.keys() and all(torch.equal(tensors[name], before[name]) for name in before)
    checked = [line for line in summary["checks"] if line.startswith("verified")]
    assert len(checked) == (1 if format == "gptq" and not has_gptqmodel() else 3)
    assert (out / "quantize_config.json").is_file() == (format == "gptq")
    if format == "gptq":
        assert json.loads((out / "quantize_config.json").read_text()) == config


def has_gptqmodel():
    from importlib.util import find_spec

    return find_spec("gptqmodel") is not None and find_spec("optimum") is not None
