import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import save_tiny
from typer.main import get_command

from bakron import __version__
from bakron.cli import app
from bakron.config import Recipe

ROOT = Path(__file__).parent.parent
SMALL = ["--levels", "7", "--group-size", "32", "--sequences", "4", "--length", "32"]
KEYS = {"perplexity", "kl", "agreement", "tokens", "sequences", "length"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; 0123456789.\n" * 60)
    (path / "empty.txt").write_text("")
    (path / "recipe.yaml").write_text("levels: 15\ngroup_size: 16\nsequences: 4\nlength: 32\n")
    (path / "typo.yaml").write_text("levels: 15\ngroup_siz: 16\n")
    return path


class Call:
    """`python -m bakron ARGUMENTS` in a fresh process, without a terminal and without network."""

    def __init__(self, *arguments, cwd=None):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "bakron", *map(str, arguments)], capture_output=True, env=environment, cwd=cwd, timeout=280, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.wall = time.perf_counter() - start
        # On an idle machine the two agree; on a busy one only the processor's time says something about the program.
        self.seconds = min(self.wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        self.status, self.out, self.err = done.returncode, done.stdout.decode(), done.stderr.decode()


def test_help_is_quick_and_names_the_commands():
    calls = [Call("--help") for _ in range(3)]
    assert min(call.seconds for call in calls) < 5  # half a second on an idle machine
    assert {call.status for call in calls} == {0}
    for words in ("quantize", "evaluate", "bakron quantize MODEL OUT", "bakron evaluate OUT --reference MODEL"):
        assert words in " ".join(calls[0].out.split())


def test_commands_come_in_the_order_of_their_use_and_each_has_an_example_that_it_takes():
    group = get_command(app)
    assert list(group.commands) == ["quantize", "plan", "evaluate", "export", "report", "certify", "prepare", "solve", "bench"]
    leaves = {**group.commands, "bench solver": group.commands["bench"].commands["solver"]}
    del leaves["bench"]
    for name, command in leaves.items():
        (example,) = re.findall(r"Example: bakron (.+)", command.help)
        assert example.startswith(f"{name} ")
        command.make_context(name, shlex.split(example.removeprefix(name)))  # raises on what it does not know
    values = {type(one.type).__name__ for leaf in leaves.values() for one in leaf.params if not one.metavar and not one.is_flag}
    assert not values, "options whose help does not say what their value is"


def test_version():
    assert Call("--version").out == f"{__version__}\n"


def test_every_field_of_the_recipe_is_a_flag_with_its_description():
    call = Call("quantize", "--help")
    assert call.status == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", call.out).split())
    flags = re.findall(r"--[a-z-]+", text)
    for name, field in Recipe.model_fields.items():
        assert "--" + name.replace("_", "-") in flags, name
        assert field.description.split(":")[0].split(",")[0].split(". ")[0][:30] in text, name
    for flag in ("--recipe", "--quiet", "--asymmetric"):
        assert flag in flags
    assert "rtn|gptq|bakron" in text and "shampoo:K|mixed|sequence" in text.replace(" ", "")


# --- bad input: a line that says what to do, soon -----------------------------------------------------------------------------------------

BAD = {
    "missing model": (["quantize", "{place}/none", "{out}"], "no file or directory {place}/none; expected a Hugging Face directory"),
    "missing model by a short name": (["quantize", "none", "{out}"], "no file or directory none; expected"),
    "model not on the hub": (
        ["quantize", "no-such/model", "{out}", "--method", "rtn"],
        "no-such/model is no directory here, and cannot be had from the hub",
    ),
    "unknown method": (
        ["quantize", "{model}", "{out}", "--method", "bakrom"],
        "method is 'bakrom'; expected rtn, gptq, bakron, boa, yaqa, bakron-mlp-local, bakron-fully-local or bakron-backprop. Perhaps bakron is meant.",
    ),
    "group size": (["quantize", "{model}", "{out}", "--group-size", "64"], "group size 64 does not divide the 96 inputs of down_proj; "),
    "empty text": (["quantize", "{model}", "{out}", "--data", "{place}/empty.txt"], "{place}/empty.txt is empty; expected text."),
    "missing text": (["quantize", "{model}", "{out}", "--data", "{place}/none.txt"], "there is no file {place}/none.txt"),
    "output not empty": (["quantize", "{model}", "{place}"], "{place} is not empty; expected a new or empty directory."),
    "unknown key": (
        ["quantize", "{model}", "{out}", "--recipe", "{place}/typo.yaml"],
        "{place}/typo.yaml: unknown key 'group_siz'. Perhaps group_size is meant.",
    ),
    "missing recipe": (["quantize", "{model}", "{out}", "--recipe", "{place}/none.yaml"], "there is no recipe file {place}/none.yaml"),
    "contradiction": (
        ["quantize", "{model}", "{out}", "--levels", "7", "--bits", "4"],
        "levels is 7 and bits is 4, which means 16 levels. Give one of the two.",
    ),
    "idle flag": (["quantize", "{model}", "{out}", "--method", "gptq", "--damp-b", "1"], "damp_b would do nothing with method gptq"),
    "device": (["quantize", "{model}", "{out}", "--device", "gpu"], "device 'gpu': "),
    "evaluate missing model": (["evaluate", "{place}/none"], "no file or directory {place}/none; expected"),
    "evaluate missing reference": (["evaluate", "{model}", "--reference", "{place}/none"], "no file or directory {place}/none; expected"),
    "evaluate empty text": (["evaluate", "{model}", "--data", "{place}/empty.txt"], "{place}/empty.txt is empty; expected text."),
    "evaluate bad json": (
        ["evaluate", "{model}", "--json", "{place}/none/result.json"],
        "--json {place}/none/result.json cannot be written; expected a file in an existing directory.",
    ),
    "evaluate json a directory": (["evaluate", "{model}", "--json", "{place}"], "--json {place} cannot be written; expected a file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_soon_in_one_line(name, place, tmp_path):
    arguments, message = BAD[name]
    known = dict(place=place, model=place / "model", out=tmp_path / "out")
    call = Call(*[argument.format(**known) for argument in arguments], cwd=tmp_path)
    assert call.status == 2
    assert call.seconds < 30  # seconds on any machine; a few on an idle one
    assert call.err.startswith("error: ") and call.err.endswith(".\n") and call.err.count("\n") == 1
    assert message.format(**known) in call.err
    assert call.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["quantize"], "Missing argument 'MODEL'"),
        (["quantise", "a", "b"], "Did you mean 'quantize'?"),
        (["quantize", "a", "b", "--levles", "7"], "--levels"),
        (["quantize", "a", "b", "--levels", "many"], "Invalid value for '--levels'"),
    ],
    ids=["no model", "no command", "unknown flag", "no number"],
)
def test_wrong_usage_says_what(arguments, words):
    call = Call(*arguments)
    assert call.status == 2 and words in call.err and "Traceback" not in call.err


# --- a whole run -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(place):
    """Quantized by a recipe file with flags over it, in plain lines."""
    call = Call(
        "quantize", place / "model", place / "out", "--recipe", place / "recipe.yaml", "--levels", "7", "--data", place / "text.txt"
    )
    assert call.status == 0, call.err
    return call


def test_flags_win_over_the_recipe_file(run, place):
    recipe = json.loads((place / "out" / "bakron" / "summary.json").read_text())["recipe"]
    assert (recipe["levels"], recipe["group_size"], recipe["sequences"], recipe["method"]) == (7, 16, 4, "bakron")


def test_plain_lines_without_a_terminal(run, place):
    assert "\r" not in run.err + run.out and "\x1b" not in run.err + run.out
    lines = run.err.splitlines()
    assert lines[0] == f"loading {place / 'model'}"
    assert lines[1].startswith("calibration: 4 of 4 sequences of 32 tokens; ")
    assert any(line.startswith("quantize blocks: 2 of 2, ") for line in lines)
    assert len(lines) < 15  # none of transformers' bars and notes
    figures = r"61,440 weights \(78\.62 % of all parameters\) at 4\.8074 bits \(5\.0 as stored\); \d+ s, of it \d+ s Hessians, \d+ s solving \([\d.]+ %\)"
    assert re.fullmatch(re.escape(str(place / "out")) + ": " + figures + "\n", run.out)


def test_evaluate_prints_and_writes_its_figures(run, place, tmp_path):
    options = [
        "--reference",
        place / "model",
        "--data",
        place / "text.txt",
        "--length",
        "32",
        "--sequences",
        "3",
        "--json",
        tmp_path / "r.json",
    ]
    call = Call("evaluate", place / "out", *options)
    assert call.status == 0, call.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.keys() == KEYS
    assert 0 < result["kl"] < 1 and 0 < result["agreement"] <= 1
    assert (result["tokens"], result["sequences"], result["length"]) == (93, 3, 32)
    assert call.out == (
        f"perplexity {result['perplexity']:.4f}\nkl         {result['kl']:.5f} nats per token\n"
        f"agreement  {100 * result['agreement']:.2f} %\ntokens     93 in 3 windows of 32\n"
    )
    assert "\r" not in call.err and "Warning" not in call.err and len(call.err.splitlines()) < 5


def inside(monkeypatch, *arguments):
    """Exit status of the command, run in this process."""
    from bakron import cli

    monkeypatch.setattr("sys.argv", ["bakron", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


LONG, DEEP = "x" * 300, "/".join(["x" * 200] * 30)


@pytest.mark.parametrize("name", [LONG, DEEP, f"{LONG}/out", "~nobody-of-this-name/out"], ids=["long", "deep", "below", "home"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "MODEL", "NAME", *SMALL),
        ("quantize", "NAME", "OUT", *SMALL),
        ("quantize", "MODEL", "OUT", *SMALL, "--data", "NAME"),
        ("quantize", "MODEL", "OUT", *SMALL, "--recipe", "NAME"),
        ("quantize", "MODEL", "OUT", *SMALL, "--factors", "NAME"),
        ("quantize", "MODEL", "OUT", *SMALL, "--json", "NAME"),
        ("prepare", "MODEL", "NAME", "--inputs", "original"),
        ("solve", "NAME", "--shard", "1/2"),
        ("evaluate", "MODEL", "--reference", "NAME"),
        ("export", "NAME", "OUT", "--format", "dense"),
        ("export", "MODEL", "NAME", "--format", "dense"),
        ("certify", "NAME"),
        ("report", "NAME"),
        ("report", "MODEL", "-o", "NAME"),
        ("bench", "solver", "--json", "NAME"),
    ],
    ids=" ".join,
)
def test_names_that_no_file_can_have_end_in_one_line(arguments, name, place, tmp_path, monkeypatch, capsys):
    names = {"NAME": name, "MODEL": place / "model", "OUT": tmp_path / "out"}
    assert inside(monkeypatch, *(names.get(word, word) for word in arguments)) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 600
    assert not (tmp_path / "out").exists()


def test_a_quiet_plan_prints_its_problems_only(place, tmp_path, monkeypatch, capsys):
    assert (
        inside(monkeypatch, "plan", place / "model", "-q", "--method", "rtn", "--group-size", "32", "--json", tmp_path / "plan.json") == 0
    )
    assert capsys.readouterr() == ("", "") and json.loads((tmp_path / "plan.json").read_text())["problems"] == []
    assert inside(monkeypatch, "plan", place / "model", "-q", "--method", "rtn", "--group-size", "48") == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("problem: group size 48")


def test_counts_and_nouns_agree():
    from bakron.cli import _many

    assert [_many(count, "linear") for count in (0, 1, 2)] == ["0 linears", "1 linear", "2 linears"]


def test_quiet_run_prints_nothing(place, tmp_path):
    call = Call("quantize", place / "model", tmp_path / "out", *SMALL, "--data", place / "text.txt", "-q")
    assert (call.status, call.out, call.err) == (0, "", "")
    assert (tmp_path / "out" / "bakron" / "summary.json").is_file()


def test_asymmetric_flag(place, tmp_path):
    arguments = ["--method", "rtn", "--levels", "7", "--group-size", "-1", "--asymmetric", "--format", "dense", "-q"]
    call = Call("quantize", place / "model", tmp_path / "out", *arguments)
    assert (call.status, call.err) == (0, "")
    recipe = json.loads((tmp_path / "out" / "bakron" / "summary.json").read_text())["recipe"]
    assert (recipe["symmetric"], recipe["group_size"], recipe["format"], recipe["method"]) == (False, None, "dense", "rtn")


def test_bench_solver_prints_and_writes_its_figures(tmp_path):
    file = tmp_path / "bench.json"
    call = Call("bench", "solver", "--sizes", "64,48x96", "--methods", "tiled", "--repeats", "1", "--json", file)
    assert call.status == 0, call.err
    rows = [row for row in json.loads(file.read_text())["rows"] if row["name"] == "tiled"]
    assert {(row["m"], row["n"]) for row in rows} == {(64, 64), (48, 96)}
    assert all(row["violations"] == 0 and row["seconds"] > 0 for row in rows) and "tiled" in call.out


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--sizes", "12y"], "size '12y'"), (["--sizes", "8", "--methods", "magic"], "solver method 'magic'")]
)
def test_bench_solver_refuses_what_is_no_size_or_method(arguments, words):
    call = Call("bench", "solver", *arguments)
    assert call.status == 2 and words in call.err and "Traceback" not in call.err
