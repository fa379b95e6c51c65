import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_bpe
from typer.testing import CliRunner

import bakron
from bakron import export
from bakron.cli import app
from bakron.errors import BakronError, ModelError, OutputError, RecipeError
from bakron.models.load import find, read

RECIPE = dict(method="rtn", levels=7, group_size=32, dtype="bfloat16", verify=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a run with bfloat16 scales (which float16 holds too), and one with zero points."""
    path = tmp_path_factory.mktemp("reexport")
    save_tiny(path / "model", "llama", tokenizer=tiny_bpe(), dtype=torch.bfloat16)
    bakron.quantize(path / "model", path / "run", **RECIPE)
    bakron.quantize(path / "model", path / "asymmetric", **{**RECIPE, "symmetric": False, "group_size": 16, "dtype": "float32"})
    return path


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("format", export.FORMATS)
def test_a_run_in_another_format_is_what_it_would_have_been(format, place, tmp_path):
    lines = []
    record = bakron.export_run(place / "run", tmp_path / "out", format=format, log=lines.append)
    bakron.quantize(place / "model", tmp_path / "direct", **{**RECIPE, "format": format})
    ours, direct = tree(tmp_path / "out"), tree(tmp_path / "direct")
    names = {name for name in direct if not name.startswith("bakron/")}
    assert {name for name in ours if not name.startswith("bakron/")} == names
    if format in ("compressed-tensors", "packed", "dense"):  # the others round their scales to float16 before they solve
        assert all(ours[name] == direct[name] for name in names - {"README.md"})
    assert json.loads(ours["bakron/export.json"])["format"] == format == record["format"]
    assert record["checks"] == [line for line in lines if "verified: " in line]
    assert record["checks"][0] == "verified: the bytes of all 14 linears are their codes"
    assert any(f"{record['stored_bits_per_weight']:.3f} bits" in line and " MB; 61,440 quantized weights" in line for line in lines)
    assert f"`{format}`" in (tmp_path / "out" / "README.md").read_text()


def test_zero_points_go_where_they_can(place, tmp_path):
    lines = []
    bakron.export_run(place / "asymmetric", tmp_path / "out", format="compressed-tensors", log=lines.append)
    assert any("CompressedTensorsConfig(dequantize=True)" in line for line in lines)
    loaded = read(find(str(tmp_path / "out"), quantized=True), torch.float32)
    bakron.export_run(place / "asymmetric", tmp_path / "dense", format="dense")
    dense = read(find(str(tmp_path / "dense")), torch.float32)
    assert all(
        torch.equal(ours, dense.get_parameter(name)) for name, ours in loaded.named_parameters() if name in dict(dense.named_parameters())
    )


@pytest.mark.parametrize(
    "run, given, kind, message",
    [
        (
            "asymmetric",
            dict(format="gptq"),
            RecipeError,
            r"the scales of model\.layers\.0\.self_attn.* are float32, and float16 cannot hold them",
        ),
        ("asymmetric", dict(format="gguf"), RecipeError, "group size 16 in format gguf, type q4_1; expected a multiple of 32"),
        ("run", dict(format="gguf", gguf_type="q3_k"), RecipeError, "the 64 inputs of .* expected a multiple of 256"),
        ("run", dict(format="gguf", gguf_type="q4_1"), RecipeError, "symmetric levels in format gguf, type q4_1"),
        ("run", dict(format="gguf", gguf_type="q9"), RecipeError, "gguf_type 'q9'; expected q4_0, "),
        ("run", dict(format="awq"), RecipeError, "format 'awq'; expected compressed-tensors, gptq, "),
        ("run", dict(format="dense", gguf_type="q4_0"), RecipeError, "gguf_type q4_0 with format dense"),
        ("model", dict(format="dense"), OutputError, "is no finished run"),
    ],
    ids=str,
)
def test_what_a_format_cannot_hold_is_refused(run, given, kind, message, place, tmp_path):
    with pytest.raises(kind, match=message):
        bakron.export_run(place / run, tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused(place, tmp_path):
    other = save_tiny(tmp_path / "other", "llama", seed=1, tokenizer=tiny_bpe(), dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="has other weights than the run started from"):
        bakron.export_run(place / "run", tmp_path / "out", format="dense", model=other)
    shutil.copytree(place / "model", tmp_path / "moved")
    bakron.export_run(place / "run", tmp_path / "out", format="dense", model=tmp_path / "moved", verify=False)


def test_an_earlier_export_is_replaced_whole_or_not_at_all(place, tmp_path, monkeypatch):
    out = tmp_path / "out"
    bakron.export_run(place / "run", out, format="gguf", verify=False)
    before = tree(out)
    with pytest.raises(RecipeError):
        bakron.export_run(place / "run", out, format="gguf", gguf_type="q3_k")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(export, "verify", fail)
    with pytest.raises(OSError):
        bakron.export_run(place / "run", out, format="packed")
    assert tree(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / ".out.new").mkdir()  # what a killed run leaves
    (tmp_path / ".out.new" / "junk").write_text("")
    bakron.export_run(place / "run", out, format="packed", verify=False)
    assert "model.safetensors" in tree(out) and not any(name.endswith(".gguf") or "junk" in name for name in tree(out))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_else_is_ever_replaced(place, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for out in (tmp_path / "mine", place / "run", place / "model"):
        before = tree(out)
        with pytest.raises(OutputError, match="is not empty|holds a run"):
            bakron.export_run(place / "run", out, format="dense")
        assert tree(out) == before


@pytest.mark.parametrize(
    "format, file", [("compressed-tensors", "model.safetensors"), ("packed", "model.safetensors"), ("gguf", "model-Q4_0.gguf")]
)
def test_a_flipped_bit_is_found(format, file, place, tmp_path, monkeypatch):
    write = export.write

    def damaged(out, *arguments):
        write(out, *arguments)
        content = arguments[-1]
        name = next(iter(content.linears))
        encoded = export.form_of(*arguments[:2]).encode(name, content.linears[name](), content.dtype)
        whole = bytearray((out / file).read_bytes())
        row = next(iter(encoded.values()))[-1].contiguous().view(torch.uint8).numpy().tobytes()
        whole[whole.index(row)] ^= 1
        (out / file).write_bytes(whole)

    monkeypatch.setattr(export, "write", damaged)
    with pytest.raises(OutputError, match="1 linears in .* are not what their codes say, first model.layers.0.self_attn.q_proj"):
        bakron.export_run(place / "run", tmp_path / "out", format=format)
    assert list(tmp_path.iterdir()) == []


def test_sharded_output_has_an_index_and_loads(place, tmp_path, monkeypatch):
    monkeypatch.setattr("bakron.export.checkpoint.SHARD", 20_000)
    record = bakron.export_run(place / "run", tmp_path / "out", format="packed")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert set(index["weight_map"]) == {name for shard in shards for name in load_file(shard)}
    assert len(record["checks"]) == 3


def test_command(place, tmp_path):
    result = CliRunner().invoke(
        app, ["export", str(place / "run"), str(tmp_path / "out"), "--format", "gguf", "--gguf-type", "q8_0", "--no-verify"]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model-Q8_0.gguf").is_file()
    assert json.loads((tmp_path / "out" / "bakron" / "export.json").read_text())["checks"] == ["not verified: --no-verify was given"]
    result = CliRunner().invoke(app, ["export", str(place / "run"), str(tmp_path / "other"), "--format", "awq"])
    assert isinstance(result.exception, BakronError)
