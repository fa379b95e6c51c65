"""One HTML page about one or more runs: how they compare, and what happened in each, layer by layer. It holds all it needs, and asks nobody for anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from bakron import rundir
from bakron.errors import OutputError
from bakron.plots import BOTTOM, HEIGHT, LEFT, RIGHT, WIDE, Panel, Series, memory, number, panel

Figure = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e10)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
STAGES = ("load", "calibrate", "hessian", "solve", "write")
COLORS = 8  # that the page has; runs beyond them are refused


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Sides(_Record):
    """A figure of A and one of B."""

    a: Figure | None = None
    b: Figure | None = None


class Gate(_Record):
    """Which Hessian the gate kept."""

    chosen: str


class Memory(_Record):
    """Bytes."""

    current: Bytes | None = None
    peak: Bytes | None = None


class Event(_Record):
    """A line of events.jsonl, as far as the report shows it."""

    linear: str
    block: int = Field(ge=0, le=1_000_000)
    method: str = ""
    shape: tuple[int, int] | None = None
    loss: Figure | None = None
    nearest_loss: Figure | None = None
    relative_loss: Figure | None = None
    rho_a: Figure | None = None
    rho_b: Figure | None = None
    top_decile: Sides | None = None
    effective_tokens: Sides | None = None
    damping: dict[str, list[tuple[Figure, str]]] = {}
    damping_raised: bool = False
    dead: dict[str, int] = {}
    fallback: str | None = None
    gate: Gate | None = None
    seconds: dict[str, Figure] = {}
    elapsed: Seconds | None = None
    memory: Memory | None = None

    @property
    def kind(self) -> str:
        """Name of the linear within its block."""
        return self.linear.split(f".{self.block}.", 1)[-1]

    @property
    def ratio(self) -> float | None:
        """Loss as a share of that of rounding to nearest."""
        return self.loss / self.nearest_loss if self.loss is not None and self.nearest_loss else None


class Evaluation(_Record):
    """evaluation.json."""

    perplexity: Figure
    kl: Figure | None = None
    agreement: Figure | None = None
    tokens: int
    length: int
    data: str = ""


class Summary(_Record):
    """summary.json, as far as the report shows it."""

    model: str
    dtype: str
    recipe: dict[str, Any]
    seconds: dict[str, Figure]
    core_share: Figure
    bits_per_weight: Figure
    stored_bits_per_weight: Figure
    peak_memory_bytes: int
    parameters: dict[str, Figure]
    calibration: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    warnings: list[str] = []


@dataclass(frozen=True)
class Run:
    """What a run directory tells; `summary` is None while the run is not finished."""

    name: str
    color: int
    summary: Summary | None
    recipe: dict[str, Any]
    events: list[Event]
    evaluation: Evaluation | None

    def warnings(self) -> list[str]:
        """What the run warned of, and what happened otherwise than the recipe says."""
        found = list(self.summary.warnings) if self.summary else ["this run is not finished"]
        raised = [one.linear for one in self.events if one.damping_raised]
        if raised:
            found.append(f"damping raised above the recipe's for {_list(raised)}")
        for fallback in sorted({one.fallback for one in self.events if one.fallback}):
            found.append(f"fallback {fallback} for {_list([one.linear for one in self.events if one.fallback == fallback])}")
        dead = [f"{one.linear} ({one.dead.get('a', 0)} in, {one.dead.get('b', 0)} out)" for one in self.events if any(one.dead.values())]
        if dead:
            found.append(f"inputs or outputs without curvature in {_list(dead)}")
        return found


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{len(names)} linears: {shown}{', ...' if len(names) > 4 else ''}" if len(names) > 1 else names[0]


def read_run(path: str | Path, name: str | None = None, color: int = 0) -> Run:
    """Read the records of a run.

    Args:
        path: Output directory of `bakron quantize`.
        name: On the page; None = that of the directory.
        color: Number of its color on the page.

    Raises:
        OutputError: It is no run directory, or a record in it is damaged.
    """
    folder = rundir.path_of(path) / rundir.FOLDER
    if (folder / "run.json").is_file() and not (folder / "events.jsonl").is_file():
        raise OutputError(
            f"{path} holds a run of which no block is rounded yet", "at least one block", "Give its bakron quantize command first"
        )
    if not (folder / "events.jsonl").is_file():
        raise OutputError(f"{path} holds no run", "an output directory of bakron quantize", "Check the path")
    summary = _read(folder / "summary.json", Summary)
    recipe = dict(summary.recipe) if summary else _recipe(folder / "recipe.yaml")
    lines = _text(folder / "events.jsonl").splitlines()
    events = {event.linear: event for number, line in enumerate(lines, 1) if (event := _event(folder, number, line))}
    return Run(
        name or Path(path).expanduser().resolve().name,
        color,
        summary,
        recipe,
        list(events.values()),
        _read(folder / "evaluation.json", Evaluation),
    )


def _event(folder: Path, number: int, line: str) -> Event | None:
    with_place = f"{folder / 'events.jsonl'}, line {number}"
    return _parse(with_place, line, Event) if line.strip() else None


def _read(file: Path, kind: type[Any]) -> Any:
    return _parse(str(file), _text(file), kind) if file.is_file() else None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise OutputError(f"{file} cannot be read: {error}", "a record of a run") from error


def _parse(where: str, text: str, kind: type[Any]) -> Any:
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise OutputError(f"{where} is damaged ({key + ': ' if key else ''}{first['msg']})", "a record of a run") from error


def _recipe(file: Path) -> dict[str, Any]:
    from bakron import recipes

    return recipes.load(file).model_dump() if file.is_file() else {}


def kinds(runs: Sequence[Run]) -> list[str]:
    """Names of linears within a block, in the order they come."""
    return list(dict.fromkeys(event.kind for run in runs for event in run.events))


def by_kind(runs: Sequence[Run], figures: dict[str, Callable[[Event], float | None]], **options: Any) -> list[Panel]:
    """One plot for each kind of linear: figures over blocks, a color a run, a second figure dashed."""
    made = []
    for kind in kinds(runs):
        series = []
        for run in runs:
            for place, (label, figure) in enumerate(figures.items()):
                own = [(event, figure(event)) for event in run.events if event.kind == kind]
                name = " ".join(filter(None, [run.name, label]))
                points = [(float(e.block), y, f"{name}, block {e.block}: {y:.4g}") for e, y in own if y is not None]
                series.append(Series(name, run.color, points, place > 0))
        made.append(panel(kind, series, **options))
    return [one for one in made if one is not None]


def stages(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Bars of the time of each run: stage, share of the longest run in percent, seconds."""
    done = [run for run in runs if run.summary]
    longest = max((run.summary.seconds.get("total", 0.0) for run in done if run.summary), default=0.0) or 1.0
    bars = []
    for run in done:
        assert run.summary is not None
        seconds = {stage: run.summary.seconds.get(stage, 0.0) for stage in STAGES}
        seconds["other"] = max(0.0, run.summary.seconds.get("total", 0.0) - sum(seconds.values()))
        bars.append({"run": run, "parts": [(stage, 100 * value / longest, value) for stage, value in seconds.items()]})
    return bars


def memories(runs: Sequence[Run]) -> Panel | None:
    """Memory over time, current and largest so far; a run that was continued goes on where it stopped."""
    series = []
    for run in runs:
        offset = last = 0.0
        points: dict[str, list[tuple[float, float, str]]] = {"": [], "peak": []}
        for event in run.events:
            if event.memory is None or event.elapsed is None:
                continue
            offset += last if event.elapsed < last else 0.0
            last = event.elapsed
            for label, value in (("", event.memory.current), ("peak", event.memory.peak)):
                if value is not None:
                    text = f"{run.name} {label} {memory(value)} after {offset + last:.0f} s, {event.linear}"
                    points[label].append((offset + last, float(value), text))
        series += [Series(f"{run.name} {label}".strip(), run.color, own, bool(label)) for label, own in points.items()]
    return panel("over seconds since the start", series, zero=True, unit=memory, width=WIDE)


def bits(runs: Sequence[Run]) -> Panel | None:
    """KL divergence over bits, a point a run; None for fewer than two."""
    points = [(run, run.summary.bits_per_weight, run.evaluation.kl) for run in runs if run.summary and run.evaluation and run.evaluation.kl]
    series = [Series(run.name, run.color, [(x, y, f"{run.name}: {x:.3f} bits, KL {y:.4g}")]) for run, x, y in points]
    return panel("KL (nats) over bits per weight", series, log=True) if len(points) > 1 else None


def gates(run: Run) -> dict[str, Any] | None:
    """What the gate kept, as rows of kinds over blocks, and how often; None without a gate."""
    chosen = {(event.kind, event.block): event.gate.chosen for event in run.events if event.gate}
    if not chosen:
        return None
    counts = {name: list(chosen.values()).count(name) for name in sorted(set(chosen.values()))}
    order = sorted(counts, key=lambda name: -counts[name])
    blocks = sorted({block for _, block in chosen})
    rows = [(kind, [(block, chosen.get((kind, block))) for block in blocks]) for kind in kinds([run]) if any(k == kind for k, _ in chosen)]
    return {"counts": [(name, counts[name]) for name in order], "place": {name: i for i, name in enumerate(order)}, "rows": rows}


def settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the recipe: name, value in each run, whether they differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.recipe))
    rows = [{"name": name, "values": [_setting(run.recipe.get(name)) for run in runs]} for name in names]
    return [row | {"differs": len(set(row["values"])) > 1} for row in rows]


def _setting(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def render(runs: Sequence[Run]) -> str:
    """The page.

    Args:
        runs: At least one; those of one report share their colors with the plots.
    """
    import bakron

    return _template().render(
        runs=runs,
        version=bakron.__version__,
        geometry={"height": HEIGHT, "left": LEFT, "bottom": HEIGHT - BOTTOM, "right": RIGHT},
        ratio=by_kind(runs, {"": lambda e: e.ratio}, zero=True, top=1.0),
        relative=by_kind(runs, {"": lambda e: e.relative_loss}, log=True),
        rho=by_kind(runs, {"A": lambda e: e.rho_a, "B": lambda e: e.rho_b}, zero=True, top=1.0),
        spectrum=by_kind(
            runs, {"A": lambda e: e.top_decile and e.top_decile.a, "B": lambda e: e.top_decile and e.top_decile.b}, zero=True, top=1.0
        ),
        effective=by_kind(
            runs,
            {"A": lambda e: e.effective_tokens and e.effective_tokens.a, "B": lambda e: e.effective_tokens and e.effective_tokens.b},
            log=True,
        ),
        bits=bits(runs),
        memories=memories(runs),
        stages=stages(runs),
        gates=[(run, gate) for run in runs if (gate := gates(run))],
        settings=settings(runs),
        evaluated_on=sorted({(run.evaluation.data, run.evaluation.tokens, run.evaluation.length) for run in runs if run.evaluation}),
    )


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bakron", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "memory": memory}
    return environment.get_template("report.html")


def write(paths: Sequence[str | Path], out: str | Path) -> None:
    """Write a report.

    Args:
        paths: Run directories, at most eight.
        out: The HTML file.

    Raises:
        OutputError: A directory holds no run, a record is damaged, or the file cannot be written.
    """
    if len(paths) > COLORS:
        raise OutputError(f"{len(paths)} runs for one page", f"at most {COLORS}", "Make several reports")
    file = rundir.path_of(out)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise OutputError(f"{out} cannot be written", "a file in an existing directory")
    short = [rundir.path_of(path).resolve().name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    rundir.write_text(file, render([read_run(path, name, color) for color, (path, name) in enumerate(zip(paths, names))]))
