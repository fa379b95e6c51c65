import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from test_security import BYTES, json_file, lines
from tiny import save_tiny
from typer.testing import CliRunner

import bakron
from bakron import plots, report
from bakron.cli import app
from bakron.errors import BakronError, OutputError

HOSTILE = '<script>document.title="taken"</script><img src=x onerror=alert(1)>"\'&{{ 7*7 }}'
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs and their evaluations, one run without."""
    path = tmp_path_factory.mktemp("report")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; 0123456789.\n" * 60)
    shared = dict(levels=7, group_size=32, sequences=8, length=32, data=str(path / "text.txt"))
    bakron.quantize(path / "model", path / "two-sided", gate=True, diagnostics=True, **shared)
    bakron.quantize(path / "model", path / "gptq", method="gptq", **(shared | {"levels": 5}))
    bakron.quantize(path / "model", path / "nearest", method="rtn", levels=7, group_size=32)
    for name in ("two-sided", "gptq"):
        bakron.evaluate(path / name, reference=path / "model", data=str(path / "text.txt"), length=32, sequences=3)
    return path


class Page(HTMLParser):
    """Tags, attributes and text of a page; every tag must be closed."""

    EMPTY = ("meta", "line", "polyline", "circle", "i")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)
        self.words = " ".join(" ".join(self.text).split())
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag == "p" and self.open[-1] != "p":
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def page(*paths):
    return Page(report.render([report.read_run(path, color=color) for color, path in enumerate(paths)]))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def copied(place, tmp_path, name="two-sided"):
    shutil.copytree(place / name / "bakron", tmp_path / name / "bakron", ignore=shutil.ignore_patterns("codes"))
    return tmp_path / name


# --- what it shows ---------------------------------------------------------------------------------------------------------------------------


def test_comparison_has_the_figures_of_each_run(place):
    words = page(place / "two-sided", place / "gptq", place / "nearest").words
    for name in ("two-sided", "gptq", "nearest"):
        summary = json.loads((place / name / "bakron" / "summary.json").read_text())
        evaluation = place / name / "bakron" / "evaluation.json"
        row = [name, summary["recipe"]["method"], str(summary["recipe"]["levels"]), f"{summary['bits_per_weight']:.3f}"]
        if evaluation.is_file():
            found = json.loads(evaluation.read_text())
            row += [f"{found['perplexity']:.3f}", f"{found['kl']:.4f}", f"{100 * found['agreement']:.2f} %"]
        else:
            row += ["–", "–", "–"]
        row += [f"{summary['seconds']['total']:,.0f}", f"{100 * summary['core_share']:.1f} %", plots.memory(summary["peak_memory_bytes"])]
        assert re.search(r"\s".join(map(re.escape, [row[0]])) + r".*?" + ".*?".join(map(re.escape, row[1:])), words), row
    assert f"Evaluated on {place / 'text.txt'}: 93 tokens in windows of 32." in words
    assert "KL (nats) over bits per weight" in words


def test_page_has_every_part(place):
    found = page(place / "two-sided")
    for title in (
        "Comparison", "Warnings and fallbacks", "Loss against rounding to nearest", "Loss against the weight", "Choice of the gate",
        "Correlation in the Hessians", "Spectrum of the Hessians", "Effective sample size", "Time", "Memory over time", "Recipe", "All 14 layers",
    ):  # fmt: skip
        assert title in found.words, title
    events = [json.loads(line) for line in (place / "two-sided" / "bakron" / "events.jsonl").read_text().splitlines()]
    for event in events:
        assert f"two-sided, block {event['block']}: {event['loss'] / event['nearest_loss']:.4g}" in found.words
        assert f"two-sided A, block {event['block']}: {event['rho_a']:.4g}" in found.words
        assert f"two-sided A, block {event['block']}: {event['top_decile']['a']:.4g}" in found.words
        assert f"{plots.memory(event['memory']['current'])} after {event['elapsed']:.0f} s, {event['linear']}" in found.words
    chosen = [event["gate"]["chosen"] for event in events]
    for name in set(chosen):
        assert f"{name}: {chosen.count(name)}" in found.words
    assert found.tags.count("svg") == 7 * 5 + 1
    seconds = json.loads((place / "two-sided" / "bakron" / "summary.json").read_text())["seconds"]
    assert f"solve {plots.number(seconds['solve'])} s" in found.words


def test_a_run_without_hessians_or_evaluation_has_what_there_is(place):
    found = page(place / "nearest")
    for title in ("Loss against", "Choice of the gate", "Correlation", "Spectrum", "Effective sample size"):
        assert title not in found.words
    assert "Memory over time" in found.words and found.tags.count("svg") == 1


def test_settings_that_differ_are_marked(place):
    text = report.render([report.read_run(place / name) for name in ("two-sided", "gptq")])
    marked = re.findall(r'<tr class="differs"><td class="name">(\w+)</td>', text)
    assert {"method", "hessian", "levels", "gate"} <= set(marked) and not {"seed", "group_size"} & set(marked)


def test_warnings_and_fallbacks_are_listed(place, tmp_path):
    run = copied(place, tmp_path)
    assert "None." in page(run).words
    file = run / "bakron" / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    events[0] |= {"damping_raised": True, "dead": {"a": 3, "b": 0}, "fallback": "nearest"}
    for event in events[2:9]:
        event["fallback"] = "identity"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    change(run / "bakron" / "summary.json", warnings=["64 calibration tokens are fewer than the 96 inputs"])
    words = page(run).words
    first, third = events[0]["linear"], events[2]["linear"]
    assert "64 calibration tokens are fewer than the 96 inputs" in words
    assert f"damping raised above the recipe's for {first}" in words
    assert f"fallback nearest for {first}" in words and f"fallback identity for 7 linears: {third}, " in words
    assert f"inputs or outputs without curvature in {first} (3 in, 0 out)" in words
    change(run / "bakron" / "evaluation.json", tokens=1)
    assert "The runs were evaluated on different texts" in page(run, place / "gptq").words


def test_warnings_of_a_run_are_kept_for_the_report(place, tmp_path):
    log = []
    shared = dict(levels=7, group_size=32, sequences=1, length=32, data=str(place / "text.txt"))
    summary = bakron.quantize(place / "model", tmp_path / "short", method="gptq", log=log.append, **shared)
    assert summary["warnings"] and ["warning: " + line for line in summary["warnings"]] == [
        line for line in log if line.startswith("warning")
    ]
    assert summary["warnings"][0] in page(tmp_path / "short").words


def test_unfinished_run(place, tmp_path):
    run = copied(place, tmp_path)
    (run / "bakron" / "summary.json").unlink()
    file = run / "bakron" / "events.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
    words = page(run).words
    assert "this run is not finished" in words and "All 7 layers" in words and "group_size 32" in words


def test_time_goes_on_in_a_run_that_was_continued(place):
    run = report.read_run(place / "gptq")
    later = [event.model_copy(update={"linear": event.linear + "x", "elapsed": 1.0 + i}) for i, event in enumerate(run.events)]
    both = report.Run(run.name, 0, run.summary, run.recipe, run.events + later, None)
    xs = [float(point.split(",")[0]) for point in report.memories([both]).lines[0]["path"].split()]
    assert xs == sorted(xs)


# --- the page is safe -------------------------------------------------------------------------------------------------------------------------


def test_text_from_models_and_data_is_escaped(place, tmp_path):
    run = copied(place, tmp_path)
    summary = json.loads((run / "bakron" / "summary.json").read_text())
    summary |= {"model": HOSTILE, "dtype": HOSTILE, "warnings": [HOSTILE], "versions": {HOSTILE: HOSTILE}}
    summary["recipe"] |= {"data": HOSTILE, "hessian": HOSTILE, HOSTILE: HOSTILE}
    summary["calibration"] |= {"source": HOSTILE, "length": HOSTILE}
    (run / "bakron" / "summary.json").write_text(json.dumps(summary))
    change(run / "bakron" / "evaluation.json", data=HOSTILE)
    file = run / "bakron" / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for event in events:
        event |= {"linear": event["linear"] + HOSTILE, "fallback": HOSTILE, "damping": {"a": [[1.0, HOSTILE]]}, "gate": {"chosen": HOSTILE}}
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    hostile = tmp_path / HOSTILE.replace("/", "|")
    run.rename(hostile)
    plain, found = page(place / "two-sided", place / "gptq"), page(hostile, place / "gptq")
    assert set(found.tags) == set(plain.tags) and "script" not in found.tags and "img" not in found.tags
    assert {name for name, _ in found.attributes} == {name for name, _ in plain.attributes}
    assert found.words.count(HOSTILE) > 30


def test_page_asks_nobody_for_anything(place):
    text = report.render([report.read_run(place / "two-sided")])
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|\bsrc=|\bhref=|\bon[a-z]+=", text)


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json", "evaluation.json"])
def test_damaged_records_end_in_an_error_of_bakrons_own(name, place, tmp_path):
    run = copied(place, tmp_path)
    file = run / "bakron" / name
    content = file.read_bytes()
    refused = 0
    for case in range(60):
        chance = random.Random(f"{name} {case}")
        way = chance.choice([*BYTES, *[json_file] * 6, lines])
        if name == "events.jsonl" and way is json_file:
            rows = content.splitlines(keepends=True)
            row = chance.randrange(len(rows))
            rows[row] = json_file(rows[row], chance) + b"\n"
            damaged = b"".join(rows)
        else:
            damaged = way(content, chance)
        file.write_bytes(damaged)
        try:
            report.render([report.read_run(run)])
        except BakronError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"case {case}, {way.__name__}: {type(error).__name__}: {error}") from error
    assert refused > 6


def test_refusals(place, tmp_path):
    def refusal(*arguments):
        with pytest.raises(OutputError) as caught:
            report.write(*arguments)
        return str(caught.value)

    assert (
        refusal([tmp_path], tmp_path / "a.html")
        == f"{tmp_path} holds no run; expected an output directory of bakron quantize. Check the path."
    )
    (tmp_path / "begun" / "bakron").mkdir(parents=True)
    (tmp_path / "begun" / "bakron" / "run.json").write_text("{}")
    assert "a run of which no block is rounded yet" in refusal([tmp_path / "begun"], tmp_path / "a.html")
    assert refusal([place / "gptq"], tmp_path) == f"{tmp_path} cannot be written; expected a file in an existing directory."
    assert "cannot be written" in refusal([place / "gptq"], tmp_path / "none" / "a.html")
    assert refusal([place / "gptq"] * 9, tmp_path / "a.html") == "9 runs for one page; expected at most 8. Make several reports."
    run = copied(place, tmp_path)
    (run / "bakron" / "summary.json").write_text('{"model": 3}')
    assert "summary.json is damaged (model: Input should be a valid string)" in refusal([run], tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_runs_of_one_name_are_told_apart(place, tmp_path):
    run = copied(place, tmp_path, "gptq")
    report.write([run, place / "gptq"], tmp_path / "a.html")
    assert f"{run}, {place / 'gptq'}" in Page((tmp_path / "a.html").read_text()).words


# --- axes -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0, 0), (5, 5), (-3, 12), (1e-9, 2e-9), (0, 1e12), (0.1, 0.3), (-1e30, 1e30), (1e-300, 2e-300)]
)
def test_ticks_hold_the_range(low, high):
    first, last, places = plots.ticks(low, high)
    room = 1e-9 * max(abs(low), abs(high))
    assert first <= low + room and high <= last + room and 2 <= len(places) <= 7 and places == sorted(places)


@pytest.mark.parametrize("low, high", [(-3, 2), (0, 0), (-0.2, 0.1), (-300, 30)])
def test_log_ticks_hold_the_range(low, high):
    first, last, places = plots.log_ticks(low, high)
    assert first <= low and high <= last and 1 <= len(places) <= 8 and all(first <= place <= last for place in places)


def test_points_lie_where_they_should():
    drawn = plots.panel("x", [plots.Series("a", 0, [(0.0, 0.0, ""), (10.0, 1.0, ""), (5.0, 0.5, "")])], zero=True)
    left, right, bottom, top = plots.LEFT, plots.WIDTH - plots.RIGHT, plots.HEIGHT - plots.BOTTOM, plots.TOP
    assert drawn.lines[0]["path"] == f"{left}.0,{bottom}.0 {right}.0,{top}.0 {(left + right) / 2},{(bottom + top) / 2}".replace(
        ".0.0", ".0"
    )
    assert plots.panel("x", [plots.Series("a", 0, [(0.0, -1.0, "")])], log=True) is None


# --- a real browser --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(width, place, tmp_path):
    """No message on the console, nothing wider than the window, and the hostile names stay text; the picture is kept in pytest's directory."""
    run = copied(place, tmp_path)
    change(run / "bakron" / "summary.json", model=HOSTILE, warnings=[HOSTILE])
    call = CliRunner().invoke(app, ["report", str(run), str(place / "gptq"), str(place / "nearest"), "-o", str(tmp_path / "page.html")])
    assert call.exit_code == 0 and call.output.startswith(f"{tmp_path / 'page.html'}: 3 runs, ")
    browse = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"]
    browse += ["--enable-logging=stderr", f"--window-size={width},5000", f"--screenshot={tmp_path / 'page.png'}"]
    done = subprocess.run([*browse, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    picture = (tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") == width
    assert len(picture) > 50_000  # not an empty page
    # A window has a least width of its own, a frame has not.
    measured = (tmp_path / "page.html").read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    script = "<script>console.log(`${document.documentElement.scrollWidth} wide, ${document.title}`)</script>"
    (tmp_path / "measured.html").write_text(measured.replace("</body>", script + "</body>"))
    (tmp_path / "frame.html").write_text(f'<iframe src="measured.html" style="width: {width}px; height: 900px; border: 0"></iframe>')
    browse[-2:] = ["--window-size=1400,1000", f"--screenshot={tmp_path / 'frame.png'}"]
    done = subprocess.run([*browse, f"file://{tmp_path / 'frame.html'}"], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'"(\d+) wide, bakron report: two-sided, gptq, nearest"', done.stderr)
    assert found and width - 20 <= int(found[1]) <= width, done.stderr[-2000:]
