"""A run that is cut short, anywhere, and asked for again ends in the files of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny

import bakron
from bakron import rundir
from bakron.errors import BakronError, FactorError, OutputError, RecipeError
from bakron.hessian import backprop, gradients
from bakron.models import load
from bakron.models.room import Room
from bakron.models.walk import Walk

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(120))
BLOCKS = 4
RECIPES = {
    "rtn": dict(method="rtn", levels=7, group_size=32),
    "gptq": dict(method="gptq", levels=7, group_size=32, sequences=4, length=32),
    "bakron": dict(levels=7, group_size=32, sequences=4, length=32),
    "original": dict(inputs="original", levels=7, group_size=32, sequences=4, length=32),
    "gate": dict(gate=True, levels=7, group_size=32, sequences=8, length=32),
    "bfloat16": dict(levels=7, group_size=32, sequences=4, length=32, dtype="bfloat16"),
    "asymmetric": dict(method="gptq", levels=7, group_size=32, sequences=4, length=32, symmetric=False, format="dense"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of four blocks, a text, and for each recipe, when it is first asked for, an uninterrupted run."""
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama", num_hidden_layers=BLOCKS)
    save_tiny(path / "other", "llama", seed=1, num_hidden_layers=BLOCKS)
    (path / "text.txt").write_text(TEXT)
    (path / "other.txt").write_text(TEXT[::-1])
    return path


def options(place, name, **changes):
    recipe = {**RECIPES[name], **changes}
    return recipe if recipe.get("method") == "rtn" else {"data": str(place / "text.txt")} | recipe


def whole(place, name):
    out = place / f"whole-{name}"
    if not out.is_dir():
        bakron.quantize(place / "model", out, **options(place, name))
    return out


class Cut(Exception):
    pass


def cut_after(stage, number):
    """A progress function that raises when `number` steps of a stage are done."""

    def progress(*step):
        if step[:2] == (stage, number):
            raise Cut

    return progress


def contents(out):
    """What must be equal to the byte, and of the events all but seconds."""
    files = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    records = {name: files.pop(name) for name in ("bakron/summary.json", "bakron/run.json", "bakron/events.jsonl", "README.md")}
    codes = {name: load_file(out / name) for name in files if "/codes/" in name}
    for name in codes:
        del files[name]
    events = [json.loads(line) for line in records["bakron/events.jsonl"].splitlines()]
    for event in events:
        for key in ("seconds", "elapsed", "memory"):
            del event[key]
        event.get("gate", {}).pop("seconds", None)
    return files, events, {f"{name} {key}": tensor for name, tensors in codes.items() for key, tensor in tensors.items()}


def assert_equal_runs(one, other):
    (files, events, codes), (expected_files, expected_events, expected_codes) = contents(one), contents(other)
    assert files.keys() == expected_files.keys()
    assert [name for name in files if files[name] != expected_files[name]] == []
    for event, expected in zip(events, expected_events, strict=True):
        assert {key: (event.get(key), expected.get(key)) for key in {**event, **expected} if event.get(key) != expected.get(key)} == {}
    assert codes.keys() == expected_codes.keys() and all(torch.equal(codes[name], expected_codes[name]) for name in codes)


# --- a run is gone on with where it was -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, stage, number",
    [
        *[(name, "quantize", 1) for name in RECIPES],
        ("bakron", "quantize", 4),
        ("rtn", "quantize", 4),
        ("bakron", "forward", 2),
        ("bakron", "head", 128),
        ("bakron", "backward", 4),
        ("gate", "backward", 2),
    ],
)
def test_a_run_cut_short_ends_as_one_that_was_not(name, stage, number, place, tmp_path):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", tmp_path / "out", progress=cut_after(stage, number), **options(place, name))
    assert (tmp_path / "out").exists() == (stage in ("backward", "quantize"))  # nothing is left of a run that has nothing to show
    told, log = [], []
    summary = bakron.quantize(
        place / "model", tmp_path / "out", progress=lambda *step: told.append(step), log=log.append, **options(place, name)
    )
    assert_equal_runs(tmp_path / "out", whole(place, name))
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "out" / "bakron" / "gradients").exists()
    expected = json.loads((whole(place, name) / "bakron" / "summary.json").read_text())
    for key in ("parameters", "bits_per_weight", "damping_raised", "gate", "recipe", "model_sha256"):
        assert summary[key] == expected[key]
    if stage == "quantize":
        assert not any(step[0] in ("forward", "head", "backward") for step in told)
        assert summary["sessions"] == 2 and summary["gradient_pass"] is None
        assert any(f"{number} of {BLOCKS} blocks are rounded" in line for line in log) == (number < BLOCKS)
    if stage == "backward":  # the blocks whose gradients are on disk are not run backward again
        assert summary["gradient_pass"]["backward"] == BLOCKS - number
        assert "head" not in {step[0] for step in told}


def test_a_failing_export_costs_the_export_only(place, tmp_path, monkeypatch):
    original = rundir.stream_tensors

    def no_room(path, *rest):
        if path.parent == tmp_path / "out":
            raise OutputError(f"{path} cannot be written: No space left on device", "a writable directory with room on its disk")
        original(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "stream_tensors", no_room)
        with pytest.raises(OutputError, match="No space left on device"):
            bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert not (tmp_path / "out" / "config.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Walk, "apply", lambda *_: pytest.fail("a block is run again"))
        bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no events"])
def test_a_damaged_block_is_named_and_rounded_again(damage, place, tmp_path):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", tmp_path / "out", progress=cut_after("quantize", 3), **options(place, "bakron"))
    file = rundir.codes_file(tmp_path / "out", 1)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    if damage == "no events":
        save_file(load_file(file), file)
    else:
        file.write_bytes({"cut": content[:-100], "flipped": content, "empty": b""}[damage])
    log = []
    bakron.quantize(place / "model", tmp_path / "out", log=log.append, **options(place, "bakron"))
    (line,) = [line for line in log if "rounded again" in line]
    assert str(file) in line and "Blocks from 1 on are rounded again" in line
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


def test_half_a_file_of_a_killed_writer_is_no_obstacle(place, tmp_path):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", tmp_path / "out", progress=cut_after("quantize", 2), **options(place, "bakron"))
    file = rundir.codes_file(tmp_path / "out", 2)
    file.with_name(file.name + ".tmp").write_bytes(b"half")
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


@pytest.mark.parametrize("stage, number", [("backward", 2), ("backward", 4), ("quantize", 1)])
def test_damaged_gradients_are_named_and_made_again(stage, number, place, tmp_path):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", tmp_path / "out", progress=cut_after(stage, number), **options(place, "bakron"))
    file = gradients.block_file(tmp_path / "out" / "bakron" / "gradients", 3)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    log = []
    bakron.quantize(place / "model", tmp_path / "out", log=log.append, **options(place, "bakron"))
    assert any(str(file) in line and "its checksum is wrong" in line and "The gradient pass is run again" in line for line in log)
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


def test_seconds_add_up_over_sessions(place, tmp_path):
    out, record = tmp_path / "out", tmp_path / "out" / "bakron" / "run.json"
    told = {}

    def progress(stage, done, _total):
        if (stage, done) in (("backward", 1), ("quantize", 1)):  # what a kill from here on would leave
            told[stage] = json.loads(record.read_text())["seconds"]
        if (stage, done) == ("quantize", 2):
            raise Cut

    with pytest.raises(Cut):
        bakron.quantize(place / "model", out, progress=progress, **options(place, "bakron"))
    found = json.loads(record.read_text())
    assert told["backward"]["hessian"] > 0 and "solve" not in told["backward"]  # of a stage that was still under way
    assert told["backward"]["total"] < told["quantize"]["total"] < found["seconds"]["total"]
    assert set(found["seconds"]) == {"load", "calibrate", "hessian", "solve", "write", "total"} and min(found["seconds"].values()) >= 0
    before = {"load": 1e6, "calibrate": 2e6, "hessian": 3e6, "solve": 4e6, "write": 5e6, "total": 16e6}  # no machine is as slow as this
    record.write_text(json.dumps(found | {"seconds": before}))
    summary = bakron.quantize(place / "model", out, **options(place, "bakron"))
    assert all(0 <= summary["seconds"][stage] - before[stage] < 1e5 for stage in before)
    assert summary["core_share"] == pytest.approx(4 / 16, abs=0.01) and summary["sessions"] == 2
    events = [json.loads(line) for line in (out / "bakron" / "events.jsonl").read_text().splitlines()]
    assert [event["elapsed"] > 16e6 for event in events] == [event["block"] >= 2 for event in events]
    assert_equal_runs(out, whole(place, "bakron"))


@pytest.mark.parametrize("sessions", ["x", None, 0, 1e400])
def test_sessions_that_are_none_are_refused(sessions, place, unfinished, tmp_path):
    rundir.write_text(tmp_path / "bakron" / "run.json", json.dumps(rundir.begun(unfinished) | {"sessions": sessions}))
    with pytest.raises(OutputError, match=r"run\.json cannot be read: sessions that are none"):
        bakron.quantize(place / "model", tmp_path, **options(place, "bakron"))


@pytest.mark.parametrize("seconds", [[], {"load": "1"}, {"load": -1}, {"total": float("inf")}, {"total": float("nan")}])
def test_seconds_that_are_none_are_refused(seconds, place, unfinished, tmp_path):
    rundir.write_text(tmp_path / "bakron" / "run.json", json.dumps(rundir.begun(unfinished) | {"seconds": seconds}))
    with pytest.raises(OutputError, match=r"run\.json cannot be read: seconds that are none"):
        bakron.quantize(place / "model", tmp_path, **options(place, "bakron"))


# --- of this run, and of no other --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unfinished(place):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", place / "unfinished", progress=cut_after("quantize", 1), **options(place, "bakron"))
    return place / "unfinished"


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(levels=15, seed=2), "levels (7 there, 15 here); seed (0 there, 2 here)"),
        (dict(damp_b=0.5), "damp_b (1.0 there, 0.5 here)"),
        (dict(data="other.txt"), "data ("),
        (dict(method="rtn", sequences=64, length=512), "method (bakron there, rtn here); hessian (backprop there, not given here)"),
    ],
    ids=str,
)
def test_another_recipe_is_refused_with_both_values(change, words, place, unfinished, monkeypatch):
    monkeypatch.setattr(load, "open_model", lambda *_: pytest.fail("too late"))
    if "data" in change:
        change = {"data": str(place / "other.txt")}
    recipe = options(place, "bakron", **change)
    if change.get("method") == "rtn":
        recipe = {"method": "rtn", "levels": 7, "group_size": 32}
    with pytest.raises(RecipeError) as caught:
        bakron.quantize(place / "model", unfinished, **recipe)
    assert words in str(caught.value) and "holds an unfinished run of another kind" in str(caught.value)


def test_another_model_or_text_is_refused(place, unfinished, tmp_path):
    with pytest.raises(RecipeError, match="model_sha256"):
        bakron.quantize(place / "other", unfinished, **options(place, "bakron"))
    before = (place / "text.txt").read_text()
    (place / "text.txt").write_text(before[::-1])
    try:
        with pytest.raises(RecipeError, match="tokens_sha256"):
            bakron.quantize(place / "model", unfinished, **options(place, "bakron"))
    finally:
        (place / "text.txt").write_text(before)
    assert rundir.codes_file(unfinished, 0).is_file()


def test_what_does_not_touch_the_result_may_change(place, tmp_path):
    with pytest.raises(Cut):
        bakron.quantize(place / "model", tmp_path / "out", progress=cut_after("quantize", 2), **options(place, "bakron"))
    bakron.quantize(place / "model", tmp_path / "out", memory="50kB", **options(place, "bakron"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (whole(place, "bakron") / "model.safetensors").read_bytes()


def test_a_finished_run_is_left_alone(place):
    out = whole(place, "rtn")
    before = contents(out)[0]
    with pytest.raises(OutputError, match="holds a finished run; expected a new or empty directory, or an unfinished run"):
        bakron.quantize(place / "model", out, **options(place, "rtn"))
    assert contents(out)[0] == before


def test_a_record_that_cannot_be_read_is_named(place, tmp_path):
    rundir.write_text(tmp_path / "out" / "bakron" / "run.json", "{")
    with pytest.raises(OutputError, match=r"run\.json cannot be read"):
        bakron.quantize(place / "model", tmp_path / "out", **options(place, "rtn"))


def test_one_process_a_directory(place, tmp_path):
    with rundir.held(tmp_path / "out"), pytest.raises(OutputError, match="another process is working in"):
        bakron.quantize(place / "model", tmp_path / "out", **options(place, "rtn"))
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "rtn"))


def test_a_second_process_leaves_the_records_of_the_first_alone(place, tmp_path):
    out, stages = tmp_path / "out", []

    def progress(stage, _done, _total):
        stages.append(stage)
        if len(stages) == 1:  # nothing is worth keeping yet
            with pytest.raises(OutputError, match="another process is working in"):
                bakron.quantize(place / "model", out, **options(place, "bakron"))
            assert (out / "bakron" / "run.json").is_file()

    bakron.quantize(place / "model", out, progress=progress, **options(place, "bakron"))
    assert stages[0] == "forward" and (out / "bakron" / "recipe.yaml").is_file()


def test_an_error_in_the_first_block_leaves_the_gradient_pass_to_go_on_from(place, tmp_path, monkeypatch):
    from bakron import pipeline

    def fails(*_):
        raise FactorError("a factor")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "round_linear", fails)
        with pytest.raises(FactorError):
            bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
        with pytest.raises(FactorError):
            bakron.quantize(place / "model", tmp_path / "gptq", **options(place, "gptq"))
    assert not (tmp_path / "gptq").exists()
    monkeypatch.setattr(backprop, "gradient_pass", lambda *_, **__: pytest.fail("a second gradient pass"))
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


# --- from outside ------------------------------------------------------------------------------------------------------------------------


def start(*arguments):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "bakron", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_asked_again(kind, place, tmp_path):
    """The signal comes when the first block is on disk, at whatever point the run has reached by then; it may even be finished."""
    flags = ["--levels", "7", "--group-size", "32", "--sequences", "4", "--length", "32", "--data", place / "text.txt"]
    process = start("quantize", place / "model", tmp_path / "out", *flags)
    deadline = time.monotonic() + 250
    while not rundir.codes_file(tmp_path / "out", 0).is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(kind)
    _, told = process.communicate(timeout=250)
    finished = (tmp_path / "out" / "bakron" / "summary.json").is_file()
    if not finished:
        if kind == signal.SIGINT:
            assert process.returncode == 130
            assert told.splitlines()[-1] == f"interrupted. The same command goes on from here: what is done is kept in {tmp_path / 'out'}."
        bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert_equal_runs(tmp_path / "out", whole(place, "bakron"))


# --- activations beyond the memory for them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bakron", "gptq", "gate"])
def test_activations_that_wait_in_files_change_nothing(name, place, tmp_path, monkeypatch):
    rooms = []
    made = Room.__init__
    monkeypatch.setattr(Room, "__init__", lambda self, *args: (rooms.append(self), made(self, *args))[1])
    spilled = []
    mapped = Room._map
    monkeypatch.setattr(Room, "_map", lambda self, size: (spilled.append(size), mapped(self, size))[1])
    bakron.quantize(place / "model", tmp_path / "out", memory="40kB", **options(place, name))
    one = 4 * 32 * 64 * 4 * (2 if name == "gate" else 1)
    assert spilled and set(spilled) <= {one, one * 6 // 8, one * 2 // 8} and rooms[0].held + rooms[0].spilled <= 2 * one
    assert not (tmp_path / "out" / "bakron" / "spill").exists()
    base = whole(place, name)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_room_counts_what_is_alive(tmp_path):
    room = Room(1000, tmp_path / "spill")
    first, second = room.empty((10, 20)), room.empty((10, 10))
    assert (room.held, room.spilled) == (800, 400)
    second.fill_(3.0)
    room.release()
    assert bool((second == 3.0).all()) and not list((tmp_path / "spill").iterdir())
    view = first[2:]
    del first
    assert room.held == 800
    del view, second
    assert (room.held, room.spilled, room.peak) == (0, 0, 1200)


def test_no_room_for_activations_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="400 bytes of activations do not fit"):
        Room(0, tmp_path / "file" / "spill").empty((10, 10))


# --- the model is never in memory as a whole ------------------------------------------------------------------------------------------------


def test_one_block_is_in_memory_at_a_time(place, tmp_path, monkeypatch):
    """Counted, not measured: parameters that are not on the meta device, whenever a block runs, and at the end."""
    walks, most = [], []
    run, made = Walk.run, Walk.__init__
    monkeypatch.setattr(Walk, "__init__", lambda self, *args, **options: (walks.append(self), made(self, *args, **options))[1])

    def counted(self, i, hidden):
        resident = {name for name, parameter in self.model.named_parameters() if not parameter.is_meta}
        most.append(len(resident))
        assert resident and all(name.startswith(f"model.layers.{i}.") for name in resident)
        return run(self, i, hidden)

    monkeypatch.setattr(Walk, "run", counted)
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "bakron"))
    assert set(most) == {9}
    assert all(parameter.is_meta for parameter in walks[0].model.parameters())


def test_a_hub_name_is_read_from_the_hubs_cache(place, tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in (place / "model").iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = load.fetch(load.find("org/tiny"))
    assert (found.name, found.identity, found.hub) == ("org/tiny", "org/tiny", True) and found.config["model_type"] == "llama"
    _, weights = load.open_model(found)
    assert torch.equal(weights.get("lm_head.weight"), load_file(place / "model" / "model.safetensors")["lm_head.weight"])
    with pytest.raises(BakronError, match="cannot be had from the hub"):
        load.fetch(load.find("org/none"))


def test_shards_are_written_one_tensor_at_a_time_and_load(place, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from bakron.export import checkpoint

    monkeypatch.setattr(checkpoint, "SHARD", 60_000)
    bakron.quantize(place / "model", tmp_path / "out", **options(place, "rtn", format="dense"))
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
