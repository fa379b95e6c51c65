import io
import json
import re

import pytest
from rich.console import Console
from tiny import save_tiny
from typer.testing import CliRunner

import bakron
from bakron import display as room
from bakron.cli import app
from bakron.display import Display

SENTENCE = "the quick brown fox jumps over the lazy dog; 0123456789.\n"
MEMORY = {"current": 1_500_000_000, "peak": 2_250_000_000}


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False, soft_wrap=True, color_system=None)


def event(block, name, loss, nearest):
    return {"linear": f"model.layers.{block}.{name}", "block": block, "loss": loss, "nearest_loss": nearest, "memory": MEMORY}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    return now


def play(display, clock):
    display.observe({"stage": "load", "memory": MEMORY})
    display.observe({"blocks": 3, "tokens": 1000})
    display.observe({"stage": "solve", "memory": MEMORY})
    display.progress("quantize", 0, 3)
    display.observe(event(0, "self_attn.q_proj", 1.0, 4.0))
    display.observe(event(0, "mlp.up_proj", 4.0, 4.0))
    clock[0] += 40
    display.progress("quantize", 1, 3)
    clock[0] += 40
    display.progress("quantize", 2, 3)


def test_plain_lines_tell_all_figures_and_no_more_often_than_half_a_minute(clock):
    shown = console(False)
    with Display(console=shown) as display:
        play(display, clock)
        clock[0] += 10
        display.progress("quantize", 2, 3)
        display.progress("quantize", 3, 3)
    lines = shown.file.getvalue().splitlines()
    figures = "loss 0.500 of nearest rounding's, {} tokens/s through a block, 1.50 GB, peak 2.25 GB"  # the geometric mean of 1/4 and 1
    assert lines == [
        "quantize blocks: 0 of 3, 0 s, 1.50 GB, peak 2.25 GB",
        "quantize blocks: 1 of 3, 40 s, about 80 s left, " + figures.format(25),
        "quantize blocks: 2 of 3, 80 s, about 40 s left, " + figures.format(25),
        "quantize blocks: 3 of 3, 90 s, " + figures.format(33),
    ]


def test_terminal_shows_stage_block_linear_speed_loss_memory_and_time_left(clock):
    shown = console(True)
    with Display(console=shown) as display:
        play(display, clock)
        display.observe(event(2, "mlp.down_proj", 1.0, 1.0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue())
    last = [line for line in text.splitlines() if "rounding" in line][-1]
    assert last.rstrip() == (
        "rounding · block 3 of 3 · model.layers.2.mlp.down_proj done · loss 0.630 of nearest rounding's · 25 tokens/s through a block · "
        "1.50 GB, peak 2.25 GB"
    )
    assert re.search(r"quantize blocks\s+\S+\s+2/3 \d+:\d\d:\d\d left \S+", text)


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_nothing(terminal, clock):
    shown = console(terminal)
    shown.quiet = True
    with Display(quiet=True, console=shown) as display:
        play(display, clock)
        display.log("a line")
    assert shown.file.getvalue() == ""


def test_pace_is_that_of_the_steps_seen(clock):
    shown = console(False)
    display = Display(console=shown)
    display.observe({"blocks": 9, "tokens": 1000})
    display.progress("quantize", 5, 9)  # such as in a run that is gone on with
    clock[0] += 40
    display.progress("quantize", 6, 9)
    assert shown.file.getvalue().splitlines()[-1] == "quantize blocks: 6 of 9, 40 s, about 120 s left, 25 tokens/s through a block"


def test_rounding_to_nearest_has_no_loss_to_show(clock):
    display = Display(console=console(False))
    display.observe({"blocks": 3, "tokens": 0})
    display.observe(event(0, "mlp.up_proj", None, None))
    display.progress("quantize", 1, 3)
    assert display.figures() == ["1.50 GB, peak 2.25 GB"]


def test_text_is_shown_as_it_is():
    shown = console(False)
    with Display(console=shown) as display:
        display.log("[red]loading[/red] [link=file:///]x")
    assert shown.file.getvalue() == "[red]loading[/red] [link=file:///]x\n"


# --- what a run tells ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("display")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text(SENTENCE * 40)
    return path


def test_run_tells_of_each_linear_as_it_is_rounded(place, tmp_path):
    seen = []
    options = dict(method="gptq", levels=4, group_size=32, sequences=2, length=32, data=str(place / "text.txt"))
    bakron.quantize(place / "model", tmp_path / "out", observe=seen.append, **options)
    lines = [json.loads(line) for line in (tmp_path / "out" / "bakron" / "events.jsonl").read_text().splitlines()]
    assert [one for one in seen if "linear" in one] == lines and len(lines) == 14
    assert {"blocks": 2, "tokens": 64} in seen
    assert [one["stage"] for one in seen if "stage" in one][:3] == ["load", "load", "hessian"]
    for one in lines:
        assert 0 < one["loss"] < one["nearest_loss"]
        assert 0 < one["memory"]["current"] and 0 < one["memory"]["peak"]
    assert [one["elapsed"] for one in lines] == sorted(one["elapsed"] for one in lines) and lines[0]["elapsed"] > 0


def test_nearest_loss_is_that_of_the_same_grid_and_hessian(place, tmp_path):
    import torch

    from bakron.config import Recipe
    from bakron.grids import UniformGrid
    from bakron.kron import Kron
    from bakron.pipeline import damped, round_linear

    torch_random = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(16, 8, bias=False)
    W = torch.randn(8, 16, generator=torch_random)
    linear.weight.data.copy_(W)
    X, G = (torch.randn(64, n, generator=torch_random) @ torch.randn(n, n, generator=torch_random) for n in (16, 8))
    kron, recipe = Kron(X.T @ X, G.T @ G), Recipe(levels=4, group_size=8).resolve()
    made = round_linear(linear, kron, recipe, torch.float32, "x").event
    grid = UniformGrid.fit(W, 4, 8, recipe.scale, True, damped(kron, recipe, "x")[0], dtype=torch.float32)
    expected = damped(kron, recipe, "x")[0].loss(grid.project(W)[1] - W)
    assert made["nearest_loss"] == pytest.approx(expected, rel=1e-4) and made["loss"] < expected


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_summary_as_json(place, tmp_path):
    options = ["--method", "rtn", "--group-size", "32"]
    run = invoke("quantize", place / "model", tmp_path / "out", *options, "--json", "-")
    stored = json.loads((tmp_path / "out" / "bakron" / "summary.json").read_text())
    assert run.exit_code == 0 and json.loads(run.stdout) == stored and "quantize blocks: 2 of 2" in run.stderr
    run = invoke("quantize", place / "model", tmp_path / "second", *options, "-q", "--json", tmp_path / "s.json")
    assert (run.exit_code, run.output) == (0, "")
    assert json.loads((tmp_path / "s.json").read_text())["recipe"]["method"] == "rtn"
    run = invoke("quantize", place / "model", tmp_path / "third", *options, "--json", tmp_path / "none" / "s.json")
    assert "s.json cannot be written; expected a file in an existing directory." in str(run.exception)
    assert not (tmp_path / "third").exists()
    run = invoke("evaluate", tmp_path / "out", "--length", "32", "--data", place / "text.txt", "--json", "-")
    result = json.loads(run.stdout)
    record = json.loads((tmp_path / "out" / "bakron" / "evaluation.json").read_text())
    assert record == result | {"data": str(place / "text.txt"), "data_sha256": record["data_sha256"], "reference": None}
