"""The command line: flags to recipes, results to the screen. Everything it does can be done with `bakron.quantize` and `bakron.evaluate`."""

from __future__ import annotations

import inspect
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from bakron import __version__, ranks, rundir
from bakron.config import Format, GgufType, Recipe
from bakron.errors import BakronError, OutputError, RecipeError

app = typer.Typer(
    help="Quantize language models against a two-sided Hessian (BaKron), at the order of cost of GPTQ.\n\n"
    "First run: bakron quantize MODEL OUT, then bakron evaluate OUT --reference MODEL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
STDOUT = Path("-")
FELL_BACK = 3  # exit status of a run that ended well but for layers that were rounded without their Hessian
GROUPS = {
    "What to quantize to": ("levels", "bits", "group_size", "symmetric", "scale", "format", "gguf_type", "dtype", "verify"),
    "How to round": (
        "method",
        "hessian",
        "factor",
        "labels",
        "samples",
        "clip",
        "skip_first",
        "damping",
        "damp_a",
        "damp_b",
        "order",
        "refit",
        "polish",
        "inputs",
        "gate",
    ),
    "Calibration": ("data", "sequences", "length", "seed"),
    "Layers": ("include", "exclude", "on_failure"),
    "Machine": ("device", "batch", "precision", "accumulate", "memory", "boundary_memory", "factors", "diagnostics"),
}


METAVARS = {  # what stands for a value in help, where its type does not say it
    "data": "TEXT", "device": "DEVICE", "include": "PATTERNS", "exclude": "PATTERNS", "memory": "SIZE", "boundary_memory": "SIZE", "factors": "FOLDER",
    int: "N", float: "NUMBER",
}  # fmt: skip


class Interrupted(Exception):
    """An interrupt that has been seen to; not a KeyboardInterrupt, of which typer would make an answer of its own."""


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def quantize(model: str, out: str, recipe: str | None, json_file: Path | None, quiet: bool, **flags: Any) -> None:
    """Quantize MODEL (a Hugging Face directory, hub name or GGUF file) into the new directory OUT. Cut short, the same command goes on where it was.

    OUT becomes a Hugging Face directory; OUT/bakron/ holds the effective recipe, one line per linear in events.jsonl, and summary.json.
    Flags win over the recipe file. Example: bakron quantize ./Qwen3-0.6B ./Qwen3-0.6B-3bit --levels 7
    """
    from bakron import api
    from bakron.display import Display

    given = {name: value for name, value in flags.items() if value is not None}
    _check_json(json_file)
    told = ranks.launched().rank == 0
    with Display(quiet or not told) as display, _interruptible(display.progress, display.log) as progress:
        watch = {"progress": progress, "log": display.log, "observe": display.observe}
        try:
            summary = api.quantize(model, out, recipe=recipe, **watch, **given)
        except KeyboardInterrupt:
            kept = f" The same command goes on from here: what is done is kept in {out}." if Path(out).expanduser().is_dir() else ""
            raise Interrupted(f"interrupted.{kept}") from None
    if not told:
        return
    seconds = summary["seconds"]
    _write_json(json_file, summary)
    if not quiet and json_file != STDOUT:
        typer.echo(
            f"{out}: {summary['parameters']['quantized']:,} weights ({summary['parameters']['quantized_percent']} % of all parameters) at "
            f"{summary['bits_per_weight']} bits ({summary['stored_bits_per_weight']} as stored); {seconds['total']:.0f} s, of it "
            f"{seconds['hessian']:.0f} s Hessians, {seconds['solve']:.0f} s solving ({100 * summary['core_share']:.1f} %)"
        )
    if summary["fallbacks"]:
        raise typer.Exit(FELL_BACK)


def prepare(model: str, out: str, recipe: str | None, json_file: Path | None, quiet: bool, **flags: Any) -> None:
    """For job arrays: store the Hessian of every linear in OUT. Then bakron solve OUT --shard i/n, any number of jobs, and bakron quantize as here to end the run.

    Takes what bakron quantize takes, and needs --inputs original: other Hessians depend on weights that are rounded already. Cut short, the same command goes on.
    Example: bakron prepare ./Qwen3-0.6B ./run --levels 7 --inputs original
    """
    from bakron import api
    from bakron.display import Display

    given = {name: value for name, value in flags.items() if value is not None}
    _check_json(json_file)
    told = ranks.launched().rank == 0
    with Display(quiet or not told) as display, _interruptible(display.progress, display.log) as progress:
        try:
            found = api.prepare(model, out, recipe=recipe, progress=progress, log=display.log, observe=display.observe, **given)
        except KeyboardInterrupt:
            raise Interrupted("interrupted. The same command goes on from here.") from None
    if not told:
        return
    _write_json(json_file, found)
    if not quiet and json_file != STDOUT:
        typer.echo(
            f"{out}: Hessians of {_many(found['linears'], 'linear')}, {found['bytes'] / 1e6:,.1f} MB; now bakron solve {out} --shard i/n"
        )


def plan(model: str, out: str | None, recipe: str | None, json_file: Path | None, quiet: bool, **flags: Any) -> None:
    """Say what bakron quantize would take with the same arguments: memory by stage, disk, passes and time, or what would stop it.

    Reads the text and every weight once, and does the work of one block on a few sequences. Exit status 1 if there is a problem.
    Example: bakron plan ./Qwen3-0.6B ./Qwen3-0.6B-3bit --levels 7
    """
    from bakron import api
    from bakron.display import Display
    from bakron.plan import show

    given = {name: value for name, value in flags.items() if value is not None}
    _check_json(json_file)
    with Display(quiet) as display:
        found = api.plan(model, out, recipe=recipe, log=display.log, **given)
    _write_json(json_file, asdict(found))
    if json_file != STDOUT and not quiet:
        typer.echo(show(found))
    elif quiet:
        for problem in found.problems:
            typer.echo(f"problem: {problem}", err=True)
    if found.problems:
        raise typer.Exit(1)


def solve(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory in which bakron prepare has stored Hessians.")],
    shard: Annotated[str, typer.Option(metavar="i/n", help="Which of n shares to round, from 1/n to n/n.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Round one of n shares of the linears of RUN from stored Hessians, for job arrays: at the same time as the others, in any order, on any machine that sees RUN.

    Reads neither model nor text. A shard that was lost is repeated with the same command; what it had solved is passed over. Example: bakron solve ./run --shard 1/8
    """
    from bakron.display import Display
    from bakron.shards import solve_shard

    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if not found:
        raise RecipeError(f"--shard {shard}", "i/n with i from 1 to n, such as 1/4")
    with Display(quiet) as display:
        did = solve_shard(run, int(found[1]), int(found[2]), progress=display.progress, log=display.log, observe=display.observe)
    if not quiet:
        end = "; bakron quantize, as given to prepare, ends the run" if did["all_solved"] == did["all"] else ""
        typer.echo(
            f"{run}: shard {shard} is solved, {did['solved']} of its {did['linears']} linears now; {did['all_solved']} of all {did['all']} are{end}"
        )


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face directory (also a quantized one), hub name, or GGUF file.")],
    reference: Annotated[str | None, typer.Option(metavar="MODEL", help="The original model, for KL divergence and agreement.")] = None,
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="Text: a .txt, .jsonl or .parquet file, a hub data set, or builtin (its evaluation part).")
    ] = "builtin",
    length: Annotated[int, typer.Option(metavar="N", help="Tokens per window.")] = 512,
    sequences: Annotated[int | None, typer.Option(metavar="N", help="Windows, from the start of the text. Default: all.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda, ...")] = "cpu",
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tasks of lm-evaluation-harness too, separated by commas (extra eval).")
    ] = None,
    task_folder: Annotated[str | None, typer.Option(metavar="FOLDER", help="Directory with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Examples per task. Default: all.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file; - for standard output.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Perplexity of MODEL and, with --reference, KL divergence from the original (nats per token) and agreement of the most likely token.

    Where MODEL is a run, the figures also go to MODEL/bakron/evaluation.json, for bakron report, in place of earlier ones.
    Example: bakron evaluate ./Qwen3-0.6B-3bit --reference ./Qwen3-0.6B
    """
    from bakron.display import Display
    from bakron.measure import evaluate as measure

    _check_json(json_file)
    with Display(quiet) as display:
        result = measure(
            model,
            reference=reference,
            data=data,
            length=length,
            sequences=sequences,
            device=device,
            tasks=[name.strip() for name in tasks.split(",")] if tasks else (),
            task_folder=task_folder,
            limit=limit,
            progress=display.progress,
            log=display.log,
        )
    _write_json(json_file, result)
    if json_file == STDOUT:
        return
    typer.echo(f"perplexity {result['perplexity']:.4f}")
    if result["kl"] is not None:
        typer.echo(f"kl         {result['kl']:.5f} nats per token\nagreement  {100 * result['agreement']:.2f} %")
    typer.echo(f"tokens     {result['tokens']:,} in {result['sequences']} windows of {result['length']}")
    for task, metrics in result.get("tasks", {}).items():
        original = result.get("reference_tasks", {}).get(task, {})
        for metric, value in metrics.items():
            typer.echo(f"{task} {metric} {value:.4f}" + (f" (original {original[metric]:.4f})" if metric in original else ""))


def certify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Output directory of bakron quantize.")],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The original model. Default: where the run found it.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Prove that every weight of a finished run is the grid point nearest to its target, by making its Hessians again, and that the checkpoint holds just that.

    Costs the time of the run without its solves. Exit status 1 if a weight is not. Example: bakron certify ./Qwen3-0.6B-3bit
    """
    from bakron.display import Display
    from bakron.recheck import certify_run

    with Display(quiet) as display:
        found = certify_run(run, model=model, progress=display.progress, log=display.log)
    typer.echo(
        f"{_many(found['violations'], 'violation')} in {found['weights']:,} weights of {_many(found['linears'], 'linear')}; largest gap "
        f"{found['max_gap']:.2e} of a step, at {found['worst']}"
    )
    if found["differing"]:
        count = len(found["differing"])
        typer.echo(
            f"{_many(count, 'linear')} of the checkpoint {'is' if count == 1 else 'are'} not as the codes say, first {found['differing'][0]}"
        )
    if found["violations"] or found["differing"]:
        raise typer.Exit(1)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Output directory of bakron quantize.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New or empty directory, or an earlier export, which is replaced.")],
    format: Annotated[str, typer.Option(metavar="|".join(get_args(Format)), help="How to write it; see bakron quantize.")],
    gguf_type: Annotated[
        str | None, typer.Option(metavar="|".join(get_args(GgufType)), help="Only with format gguf. Default: what fits the run's levels.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The original model. Default: where the run found it.")] = None,
    verify: Annotated[bool, typer.Option(help="Load the export again and compare it with the codes.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages.")] = False,
) -> None:
    """Write the codes of a finished run in another format. Nothing is rounded: a format that cannot hold them exactly is refused.

    Example: bakron export ./Qwen3-0.6B-3bit ./Qwen3-0.6B-dense --format dense
    """
    from bakron.display import Display
    from bakron.reexport import export_run

    with Display(quiet) as display:
        export_run(run, out, format=format, gguf_type=gguf_type, model=model, verify=verify, log=display.log)


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Output directories of bakron quantize, up to eight, also unfinished ones.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about one or more runs: figures side by side, and losses, choices, Hessians, time and memory layer by layer.

    Perplexity and KL divergence are in it for a run that bakron evaluate was run on. Example: bakron report ./Qwen3-0.6B-3bit -o report.html
    """
    from bakron.report import write

    write(runs, out)
    typer.echo(f"{out}: {_many(len(runs), 'run')}, {out.expanduser().stat().st_size:,} bytes")


bench = typer.Typer(help="Time bakron on this machine.", no_args_is_help=True)


@bench.command("solver")
def bench_solver(
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes: N for a square weight, MxN for M outputs and N inputs; separated by commas.")
    ] = "512,1024,2048,4096",
    methods: Annotated[str | None, typer.Option(metavar="NAMES", help="Schedules, separated by commas. Default: all but naive.")] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs that a median is taken of.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file; - for standard output.")
    ] = None,
) -> None:
    """Time the solver's schedules beside one matrix product of the same size; every result is certified before its time is printed.

    Example: bakron bench solver --sizes 512,1024 --repeats 3
    """
    from bakron import bench as benchmark

    _check_json(json_file)
    parsed = [_size(text) for text in sizes.split(",")]
    report = typer.echo if json_file != STDOUT else lambda line: typer.echo(line, err=True)
    found = benchmark.run(parsed, methods.split(",") if methods else None, repeats=repeats, report=report)
    if found["exponents"]:
        report("seconds grow with size to the power of: " + ", ".join(f"{name} {value}" for name, value in found["exponents"].items()))
    _write_json(json_file, found)


def _size(text: str) -> int | tuple[int, int]:
    parts = text.strip().lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) <= 65536 for part in parts):
        raise RecipeError(f"size {text!r}", "N or MxN, whole numbers up to 65536, such as 1024 or 1536x576")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _many(count: int, what: str) -> str:
    """A count and a noun that agree."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _check_json(json_file: Path | None) -> None:
    if json_file is not None and json_file != STDOUT and (rundir.path_of(json_file).is_dir() or not json_file.absolute().parent.is_dir()):
        raise OutputError(f"--json {json_file} cannot be written", "a file in an existing directory")


def _write_json(json_file: Path | None, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=1)
    if json_file == STDOUT:
        typer.echo(text)
    elif json_file is not None:
        try:
            json_file.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise OutputError(f"--json {json_file} cannot be written: {error.strerror}", "a file that can be written") from error


def main() -> None:
    """Entry point: an error that bakron knows ends in one line and exit status 2, an interrupt in 130."""
    try:
        app()
    except BakronError as error:
        sys.stderr.write(f"{_who()}error: {error}\n")
        sys.exit(2)
    except Interrupted as interrupt:
        sys.stderr.write(f"{interrupt}\n")
        sys.exit(130)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted.\n")
        sys.exit(130)


def _who() -> str:
    """Which of several processes speaks."""
    try:
        place = ranks.launched()
    except RecipeError:
        return ""
    return f"process {place.rank} of {place.size}: " if place.size > 1 else ""


@contextmanager
def _interruptible(progress: Callable[[str, int, int], None], log: Callable[[str], None]) -> Iterator[Callable[[str, int, int], None]]:
    """Put an interrupt off to the next step of the work, where what was done last is on disk; a second one is not put off."""
    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        log("interrupted: stopping after this step, at once if interrupted again")

    def step(stage: str, done: int, total: int) -> None:
        progress(stage, done, total)
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield step
    finally:
        signal.signal(signal.SIGINT, before)


def _with_recipe_flags(function: Callable[..., None], out: str, needed: bool, told: str) -> Callable[..., None]:
    """Give a function one option for each field of `Recipe`, with the field's own description as help, so that the two cannot drift apart.

    Args:
        function: Called with model, out, recipe, json_file, quiet and the fields.
        out: Help of the argument OUT.
        needed: Whether OUT must be given.
        told: What --json writes.
    """
    parameters = {
        "model": Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face directory, hub name, or GGUF file.")],
        "out": Annotated[str if needed else str | None, typer.Argument(metavar="OUT", help=out)],
    }
    options: dict[str, Any] = {
        "recipe": Annotated[str | None, typer.Option(metavar="FILE", help="YAML file with any of the settings below; flags win over it.")],
    }
    for title, name in ((title, name) for title, names in GROUPS.items() for name in names):
        field = Recipe.model_fields[name]
        kinds = [part for part in get_args(field.annotation) if part is not NoneType] if _optional(field.annotation) else [field.annotation]
        kind = kinds[0] if len(kinds) == 1 else str  # such as a number or a word: the recipe reads it
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        extra = field.json_schema_extra
        forms = choices or (extra["forms"] if isinstance(extra, dict) and "forms" in extra else ())
        flag = "--" + name.replace("_", "-")
        declared = (flag + {"symmetric": "/--asymmetric", "verify": "/--no-verify"}.get(name, ""),)
        default = "" if field.default is None or isinstance(field.default, bool) else f" (default: {field.default})"
        options[name] = Annotated[
            (str if choices else kind) | None,  # type: ignore[operator]
            typer.Option(
                *declared,
                help=(field.description or "") + default,
                metavar="|".join(forms) if forms else METAVARS.get(name, METAVARS.get(kind)),
                rich_help_panel=title,
                show_default=False,
            ),
        ]
    options["json_file"] = Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help=f"Write {told} to this file; - for standard output.")
    ]
    options["quiet"] = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")]
    ordinary = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, ordinary, annotation=kind, default=None if name == "out" and not needed else inspect.Parameter.empty)
            for name, kind in parameters.items()
        ]
        + [inspect.Parameter(name, ordinary, annotation=kind, default=False if name == "quiet" else None) for name, kind in options.items()]
    )
    function.__annotations__ = parameters | options | {"return": None}
    return function


def _optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


_quantize = _with_recipe_flags(
    quantize,
    "New or empty directory, or one with an unfinished run, which is gone on with.",
    True,
    "the summary, as in OUT/bakron/summary.json,",
)
_plan = _with_recipe_flags(plan, "Where the run would go, to check the disk.", False, "the plan")
_prepare = _with_recipe_flags(prepare, "New or empty directory, or one with an unfinished run of the same recipe.", True, "what is stored")
for _command in (_quantize, _plan, evaluate, export, report, certify, _prepare, solve):  # the order of `bakron --help`: that of their use
    app.command()(_command)
app.add_typer(bench, name="bench")
