"""Job arrays: stored Hessians, shares solved by independent jobs in any order, and the files of a run in one process at the end."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_resume import BLOCKS, TEXT, Cut, assert_equal_runs, cut_after, start
from tiny import save_tiny

import bakron
from bakron import hessian, ranks, rundir, shards
from bakron.errors import FactorError, OutputError, RecipeError

COMMON = dict(levels=7, group_size=32, sequences=4, length=32, inputs="original")
RECIPES = {
    "bakron": {},
    "yaqa": dict(method="yaqa", refit=True),
    "fully-local": dict(hessian="fully-local", order="diagonal"),
    "float64": dict(accumulate="float64", exclude="*.o_proj,*.1.*"),
    "asymmetric": dict(method="gptq", symmetric=False, format="dense"),
}
LINEARS = 7 * BLOCKS


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama", num_hidden_layers=BLOCKS)
    save_tiny(path / "experts", "mixtral", num_hidden_layers=2)
    (path / "text.txt").write_text(TEXT)
    return path


def options(place, name="bakron", **changes):
    return {**COMMON, "data": str(place / "text.txt"), **RECIPES[name], **changes}


@pytest.fixture(scope="module")
def whole(place):
    bakron.quantize(place / "model", place / "whole", **options(place))
    return place / "whole"


@pytest.fixture(scope="module")
def hessians(place):
    bakron.prepare(place / "model", place / "hessians", **options(place))
    return place / "hessians"


@pytest.fixture
def prepared(hessians, tmp_path):
    return Path(shutil.copytree(hessians, tmp_path / "out"))


# --- the same files -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_shards_end_in_the_files_of_one_process(name, place, tmp_path):
    out, told = tmp_path / "out", []
    found = bakron.prepare(place / "model", out, **options(place, name))
    for shard in (3, 1, 2):
        told.append(bakron.solve_shard(out, shard, 3))
    assert [one["solved"] for one in told] == [one["linears"] for one in told]
    assert sum(one["linears"] for one in told) == found["linears"] == told[-1]["all_solved"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessian.InputEstimator, "block", lambda *_: pytest.fail("a Hessian is made again"))
        patch.setattr(hessian.BackpropEstimator, "__init__", lambda *_, **__: pytest.fail("a gradient pass is run again"))
        patch.setattr(shards, "_read", lambda *_: pytest.fail("a linear is solved again"))
        bakron.quantize(place / "model", out, **options(place, name))
    bakron.quantize(place / "model", tmp_path / "whole", **options(place, name))
    assert_equal_runs(out, tmp_path / "whole")
    assert {path.name for path in (out / "bakron").iterdir()} == {path.name for path in (tmp_path / "whole" / "bakron").iterdir()}


def test_experts_that_few_tokens_reach_are_rounded_as_in_one_process(place, tmp_path):
    recipe = options(place, sequences=2, length=16)
    bakron.prepare(place / "experts", tmp_path / "out", **recipe)
    bakron.solve_shard(tmp_path / "out", 1, 1)
    summary = bakron.quantize(place / "experts", tmp_path / "out", **recipe)
    expected = bakron.quantize(place / "experts", tmp_path / "whole", **recipe)
    assert summary["rounded_to_nearest"] == expected["rounded_to_nearest"]
    assert_equal_runs(tmp_path / "out", tmp_path / "whole")


def test_lost_and_missing_shards_cost_what_they_had_not_solved(prepared, place, whole):
    with pytest.raises(Cut):
        bakron.solve_shard(prepared, 2, 3, progress=cut_after("shard", 2))
    bakron.solve_shard(prepared, 1, 3)
    log, solved = [], []
    repeated = bakron.solve_shard(prepared, 2, 3, observe=solved.append)
    assert repeated["solved"] == len(solved) == repeated["linears"] - 2 and repeated["all_solved"] < LINEARS
    again = []
    file = next((prepared / "bakron" / "solved").iterdir())
    told = {key: value for key, value in rundir.read_metadata(file).items() if key != rundir.CHECKSUM}
    rundir.write_tensors(file, load_file(file), told | {"seconds": "1e6"})
    summary = bakron.quantize(place / "model", prepared, log=log.append, observe=again.append, **options(place))
    left = LINEARS - repeated["all_solved"]
    assert any(f"{left} of {LINEARS} linears are not solved by any shard yet" in line for line in log)
    assert sum("linear" in event for event in again) == left
    assert all(1e6 <= summary["seconds"][stage] < 1.1e6 for stage in ("solve", "total"))  # those of shards count
    assert_equal_runs(prepared, whole)


def test_two_shards_at_the_same_time_in_the_same_directory(prepared, place, whole):
    jobs = [start("solve", prepared, "--shard", shard) for shard in ("1/2", "2/2", "2/3")]
    for job in jobs:
        _, told = job.communicate(timeout=250)
        assert job.returncode == 0, told
    assert not list(prepared.rglob("*.tmp"))
    bakron.quantize(place / "model", prepared, **options(place))
    assert_equal_runs(prepared, whole)


def test_prepare_cut_short_goes_on_and_a_run_may_do_without_it(place, whole, tmp_path):
    for out in ("again", "alone"):
        with pytest.raises(Cut):
            bakron.prepare(place / "model", tmp_path / out, progress=cut_after("store", 2), **options(place))
        with pytest.raises(OutputError, match="has no stored Hessians of all linears; .*Give the bakron prepare command again"):
            bakron.solve_shard(tmp_path / out, 1, 1)
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "again" / "bakron" / "hessians").iterdir()}
    bakron.prepare(place / "model", tmp_path / "again", **options(place))
    after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "again" / "bakron" / "hessians").iterdir()}
    assert len(before) == LINEARS / 2 and before.items() <= after.items() and len(after) == LINEARS + 1
    bakron.solve_shard(tmp_path / "again", 1, 1)
    for out in ("again", "alone"):
        bakron.quantize(place / "model", tmp_path / out, **options(place))
        assert_equal_runs(tmp_path / out, whole)


def test_shares_are_balanced_by_the_cost_of_a_solve_and_cover_all():
    shapes = {f"block_{i:04d}.{name}": shape for i in range(3) for name, shape in {"q": (64, 64), "k": (32, 64), "down": (64, 96)}.items()}
    cost = {name: m * n * (m + n) for name, (m, n) in shapes.items()}
    for count in (1, 2, 4, 20):
        parts = [shards._share(shapes, shard, count) for shard in range(1, count + 1)]
        assert sorted(name for part in parts for name in part) == sorted(shapes)
        assert max(sum(cost[name] for name in part) for part in parts) <= sum(cost.values()) / count + max(cost.values())
    assert ranks.owners(shapes, 2) == ranks.owners(shapes, 2)


# --- refused in words ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(inputs="quantized"), "inputs is quantized: .* expected inputs original. Give --inputs original"),
        (dict(inputs=None), "inputs is quantized: .* expected inputs original"),
        (dict(gate=True), "gate chooses by gradients of sequences held out"),
        (dict(damp_b="auto"), "damp_b auto chooses by gradients"),
    ],
    ids=str,
)
def test_recipes_whose_hessians_cannot_be_stored(change, words, place, tmp_path):
    with pytest.raises(RecipeError, match=words):
        bakron.prepare("no model is looked for", tmp_path / "out", **options(place, **change))
    assert not (tmp_path / "out").exists()


def test_rounding_to_nearest_has_nothing_to_store(tmp_path):
    with pytest.raises(RecipeError, match="method rtn, which rounds without Hessians"):
        bakron.prepare("model", tmp_path / "out", method="rtn")


@pytest.mark.parametrize("shard, of", [(0, 2), (3, 2), (1, 0), (-1, 2)])
def test_a_shard_out_of_range(shard, of, tmp_path):
    with pytest.raises(RecipeError, match=re.escape(f"shard {shard}/{of}; expected i/n with i from 1 to n, such as 1/4")):
        bakron.solve_shard(tmp_path, shard, of)


def test_a_directory_without_hessians_and_a_finished_run(whole, tmp_path):
    with pytest.raises(OutputError, match="has no stored Hessians of all linears; expected a directory that bakron prepare has filled"):
        bakron.solve_shard(tmp_path / "nowhere", 1, 2)
    with pytest.raises(OutputError, match="holds a finished run; .* There is nothing left to solve"):
        bakron.solve_shard(whole, 1, 2)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_hessian_is_named_and_made_again(damage, prepared, place, whole):
    file = shards.hessian_file(prepared, "block_0001.mlp.up_proj")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content if damage == "flipped" else content[:-100])
    if damage == "gone":
        file.unlink()
    with pytest.raises(OutputError) as caught:
        bakron.solve_shard(prepared, 1, 1)
    assert str(file) in str(caught.value) and str(caught.value).endswith("Give the bakron prepare command again.")
    log = []
    bakron.prepare(place / "model", prepared, log=log.append, **options(place))
    assert any(str(file) in line and "The Hessians of block 1 are made again" in line for line in log) == (damage != "gone")
    bakron.solve_shard(prepared, 1, 1)
    bakron.quantize(place / "model", prepared, **options(place))
    assert_equal_runs(prepared, whole)


def test_damaged_codes_of_a_linear_are_solved_again(prepared, place, whole):
    bakron.solve_shard(prepared, 1, 1)
    file = shards.solved_file(prepared, "block_0000.mlp.down_proj")
    file.write_bytes(file.read_bytes()[:-10])
    log = []
    bakron.quantize(place / "model", prepared, log=log.append, **options(place))
    assert any(str(file) in line and "This linear is solved again" in line for line in log)
    assert_equal_runs(prepared, whole)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"scale_dtype": "int8", "shapes": {}}',
        '{"scale_dtype": "float32", "shapes": {"a": 1}}',
        '{"scale_dtype": "float32", "shapes": {"block_0000.a": [1e400, 2]}}',
        '{"scale_dtype": "float32", "shapes": {"block_0000.a": [-1, 2]}}',
        '{"scale_dtype": "float32", "shapes": {"../../x": [1, 2]}}',
    ],
)
def test_a_damaged_manifest_is_named(content, prepared):
    (prepared / "bakron" / "hessians" / "manifest.json").write_text(content)
    with pytest.raises(OutputError, match=r"manifest\.json is damaged"):
        bakron.solve_shard(prepared, 1, 1)


def test_a_manifest_of_another_model_is_refused(prepared, place):
    file = prepared / "bakron" / "hessians" / "manifest.json"
    told = json.loads(file.read_text())
    told["shapes"].popitem()
    file.write_text(json.dumps(told))
    with pytest.raises(OutputError, match=r"manifest\.json is damaged: it is of another model"):
        bakron.quantize(place / "model", prepared, **options(place))


def test_a_factor_that_cannot_be_used_stops_its_shard_and_falls_back_if_prepared_so(prepared, place, monkeypatch):
    from bakron import pipeline

    def fails(*_):
        raise FactorError("a factor")

    monkeypatch.setattr(pipeline, "damped", fails)
    with pytest.raises(FactorError, match="--on-failure fallback goes on without it"):
        bakron.solve_shard(prepared, 1, 1)
    bakron.prepare(place / "model", prepared, on_failure="fallback", **options(place))
    bakron.solve_shard(prepared, 1, 1)
    monkeypatch.undo()
    summary = bakron.quantize(place / "model", prepared, **options(place))
    assert len(summary["fallbacks"]) == LINEARS and set(summary["fallbacks"].values()) == {"nearest"}


def test_shards_share_the_directory_with_each_other_only(prepared, place):
    with rundir.held(prepared), pytest.raises(OutputError, match="another process is working in"):
        bakron.solve_shard(prepared, 1, 1)
    with rundir.held(prepared, together=True):
        bakron.solve_shard(prepared, 1, 2)
        for command in (bakron.prepare, bakron.quantize):
            with pytest.raises(OutputError, match="another process is working in"):
                command(place / "model", prepared, **options(place))


def test_a_full_disk_is_seen_before_hessians_are_made(place, tmp_path, monkeypatch):
    from bakron import plan

    found = []
    monkeypatch.setattr(plan, "free", lambda _: found.append(1) or (10**9 if len(found) == 1 else 10**5))
    with pytest.raises(OutputError, match="bytes are free on the disk"):
        bakron.prepare(place / "model", tmp_path / "out", **options(place))
    assert not (tmp_path / "out").exists()


# --- the command line ---------------------------------------------------------------------------------------------------------------------


def test_the_commands(place, tmp_path, monkeypatch, capsys):
    from bakron import cli

    flags = [word for name, value in options(place).items() for word in ("--" + name.replace("_", "-"), str(value))]
    out = str(tmp_path / "out")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["bakron", *words])
        try:
            cli.main()
        except SystemExit as end:
            return end.code
        return None

    for wrong in ("0/2", "3/2"):
        assert run("solve", out, "--shard", wrong) == 2
        assert f"error: shard {wrong}; expected i/n with i from 1 to n" in capsys.readouterr().err
    for wrong in ("1", "1/2/3", "a/b", "-1/2", "²/2"):
        assert run("solve", out, f"--shard={wrong}") == 2
        assert f"error: --shard {wrong}; expected i/n" in capsys.readouterr().err
    assert not run("prepare", str(place / "model"), out, *flags, "--json", str(tmp_path / "prepared.json"))
    told = capsys.readouterr().out
    assert f"{out}: Hessians of {LINEARS} linears" in told and f"bakron solve {out} --shard i/n" in told
    assert json.loads((tmp_path / "prepared.json").read_text())["linears"] == LINEARS
    assert not run("solve", out, "--shard", "1/2")
    assert "ends the run" not in capsys.readouterr().out
    assert not run("solve", out, "--shard", "2/2")
    assert f"{LINEARS} of all {LINEARS} are; bakron quantize, as given to prepare, ends the run" in capsys.readouterr().out
    assert not run("solve", out, "--shard", "2/2", "--quiet")
    assert capsys.readouterr().out == ""
    assert not run("quantize", str(place / "model"), out, *flags)
