"""Runs as functions: `quantize` a model into a directory, `prepare` that for job arrays, `plan` it. The command line is a thin layer over these."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import config, formats, ranks, recipes, rundir, shards
from bakron import data as corpus
from bakron.errors import OutputError, RecipeError
from bakron.job import Done, Job, StoredCodes, make_estimator
from bakron.job import prepare as load
from bakron.models import load as models
from bakron.plan import Plan, check_disk
from bakron.process import memory, peak_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.config import Recipe
    from bakron.pipeline import Clock

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]
Observe = Callable[[dict[str, Any]], None]
LASTING = ("backward", "quantize", "store", "shard")  # stages each of whose steps leaves something on disk


def plan(
    model: str | Path | PreTrainedModel,
    out: str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: Recipe | str | Path | None = None,
    log: Log | None = None,
    **overrides: Any,
) -> Plan:
    """What `quantize` with the same arguments would take.

    Args:
        model: Hugging Face directory, hub name, GGUF file, or a model in memory.
        out: Where the run would go, to check the disk; None to leave that out.
        tokenizer: Of a model in memory.
        recipe: A recipe or the path of a YAML file.
        log: Called with one-line messages.
        **overrides: Fields of the recipe that win over it; `data` may be token ids, as for `quantize`.

    Returns:
        The plan, or the problems found, of which one may hide another; see `bakron.plan`.

    Raises:
        RecipeError: The recipe itself is wrong.
        DataError: `data` is a tensor that cannot be token ids.
    """
    from bakron import plan as plans

    settled, given = _recipe(recipe, overrides)
    return plans.plan(model, out, settled, log or (lambda _: None), tokenizer=tokenizer, given=given)


@dataclass(frozen=True)
class Watch:
    """Who is told of what a run does."""

    progress: Progress
    log: Log
    observe: Observe


def quantize(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: Recipe | str | Path | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    observe: Observe | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Quantize every linear of a model's decoder blocks; embeddings and head are left alone.

    A run that was cut short, by whatever, is gone on with when it is asked for again: the same call gives the files that it would have given uninterrupted.
    Started by torchrun, its processes share the work of the one run: every one of them must make the same call.

    Args:
        model: Hugging Face directory, hub name, GGUF file, or a causal language model of transformers in memory, on any device and in any dtype of 16 bits or
            more. It is not changed, and not copied as a whole; the files are those that its directory would give, were it saved.
        out: New or empty directory, or one with an unfinished run of the same recipe: becomes a Hugging Face directory, plus `out/bakron/` with `recipe.yaml`,
            `events.jsonl`, `summary.json` and the codes.
        tokenizer: Of a model in memory: for the text, and written beside the checkpoint. None if `data` is ready token ids.
        recipe: A recipe or the path of a YAML file.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.
        observe: Called with what happens, for a display: `{"stage": ...}` when a stage begins, `{"blocks": ..., "tokens": ...}` once they are known,
            `{"memory": ...}` now and then, and with every line of `events.jsonl` as soon as its linear is rounded.
        **overrides: Fields of the recipe that win over it, such as `levels=7`. `data` may also be ready token ids, an integer tensor `[N, T]` without padding,
            which settles `sequences` and `length`.

    Returns:
        What is written to `summary.json`.

    Raises:
        BakronError: Any of its subclasses; nothing is written for mistakes that can be found before the work starts.
    """
    with ranks.started():
        resolved, given = _recipe(recipe, overrides)
        return _started(model, out, tokenizer, resolved, given, _work, progress, log, observe)


def prepare(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: Recipe | str | Path | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    observe: Observe | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Store the Hessian of every linear in a run's directory, for any number of `solve_shard` to round them; `quantize` with the same arguments ends the run.

    Args:
        model: Hugging Face directory, hub name, GGUF file, or a model in memory.
        out: New or empty directory, or one with an unfinished run of the same recipe.
        tokenizer: Of a model in memory.
        recipe: A recipe or the path of a YAML file, with inputs original.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.
        observe: Called with what happens, as in `quantize`.
        **overrides: Fields of the recipe that win over it.

    Returns:
        `{"linears", "bytes"}`: how many linears, and the size of what is stored of them.

    Raises:
        RecipeError: The recipe's Hessians depend on rounded weights, such as with inputs quantized, or are chosen among.
        BakronError: Any of its subclasses, as `quantize`.
    """
    with ranks.started():
        resolved, given = _recipe(recipe, overrides)
        shards.check(resolved)
        return _started(model, out, tokenizer, resolved, given, _prepare, progress, log, observe)


Work = Callable[[Job, Path, "Clock", Watch, list[str]], dict[str, Any]]


def _started(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    recipe: Recipe,
    given: corpus.Tokens | None,
    work: Work,
    progress: Progress | None,
    log: Log | None,
    observe: Observe | None,
) -> dict[str, Any]:
    """Look at everything that can be wrong, then do the work with the output directory held."""
    begun = time.perf_counter()
    progress, observe = progress or (lambda *_: None), observe or (lambda _: None)
    warnings: list[str] = []
    log = _collecting(log or (lambda _: None), warnings)
    source = models.find(model, tokenizer)
    target = rundir.check_output(out)
    seconds = dict((_same_run(target, recipe=recipe) or {}).get("seconds", {}))  # of earlier sessions
    if recipe.factors:
        rundir.check_store(recipe.factors)
    if recipe.method != "rtn" and given is None:
        corpus.check(recipe.data)

    from bakron.pipeline import Clock

    def note() -> None:
        if ranks.first():
            rundir.note(target, seconds={stage: round(value, 3) for stage, value in clock.so_far().items()})

    def shown(stage: str, *step: int) -> None:
        observe({"memory": memory()})
        if stage in LASTING:
            note()
        progress(stage, *step)

    begun -= seconds.pop("total", 0.0)
    clock = Clock(seconds, lambda stage: observe({"stage": stage, "memory": memory()}), begun)
    with clock.stage("load"):
        job = load(source, recipe, log, target, given)
        check_disk(job, target)
    observe({"blocks": len(job.walk), "tokens": 0 if job.tokens is None else job.tokens.ids.numel()})
    ranks.meet()  # before anything is written, every process has found the output directory and the recipe fit to be used
    with rundir.held(target) if ranks.first() else nullcontext():
        try:
            return work(job, target, clock, Watch(shown, log, observe), warnings)
        finally:  # while the directory is held: what another process has there is not ours to remove
            if ranks.first() and not rundir.worth_keeping(target):
                rundir.discard(target)
            with suppress(OutputError):  # what ended the work, such as a full disk, is what matters
                note()


def _prepare(job: Job, target: Path, clock: Clock, watch: Watch, warnings: list[str]) -> dict[str, Any]:
    """Everything that `prepare` writes."""
    check_disk(job, target, shards.size(job))
    ranks.by_first(lambda: _begin(job, target))
    linears = shards.store(job, target, clock, watch.progress, watch.log)
    ranks.by_first(lambda: rundir.discard_scratch(target, "gradients", "spill"))
    return {"linears": linears, "bytes": sum(file.stat().st_size for file in (target / rundir.FOLDER / "hessians").iterdir())}


def _work(job: Job, target: Path, clock: Clock, watch: Watch, warnings: list[str]) -> dict[str, Any]:
    """Everything that `quantize` writes: rounds what is not rounded yet, then the checkpoint, then the records of a finished run."""
    sessions = ranks.by_first(lambda: _begin(job, target))
    done = Done(job, target, watch.log) if ranks.first() else None
    count, passes = ranks.told(done and done.count), None
    if count and count < len(job.walk):
        watch.log(f"going on with the run in {target}: {count} of {len(job.walk)} blocks are rounded")
    if count < len(job.walk) and ranks.by_first(lambda: shards.stored(target)):
        with clock.stage("solve"):
            shards.finish(job, target, done, count, clock, watch.progress, watch.log, watch.observe)
    elif count < len(job.walk):
        passes = _round(job, target, clock, done, count, watch)
    return ranks.by_first(lambda: _finish(job, target, clock, watch, warnings, done, sessions, passes))


def _finish(
    job: Job,
    target: Path,
    clock: Clock,
    watch: Watch,
    warnings: list[str],
    done: Done | None,
    sessions: int,
    passes: dict[str, int] | None,
) -> dict[str, Any]:
    """The checkpoint, and the records of a finished run."""
    from bakron.export.card import model_card
    from bakron.hessian.outliers import warning as outliers_warning

    assert done is not None
    rundir.discard_scratch(target)
    with clock.stage("write"):
        exported = _export(target, job, watch.log)
    if done.nearest:
        names = ", ".join(done.nearest)
        watch.log(f"warning: too few tokens reached {len(done.nearest)} linears of experts, which were rounded to nearest: {names}")
    if alarm := outliers_warning(done.outlying):
        watch.log(alarm)
    if done.fallbacks:
        named = ", ".join(f"{name} ({how})" for name, how in done.fallbacks.items())
        watch.log(f"warning: {len(done.fallbacks)} linears were rounded without a factor that could not be used: {named}")
    if done.raised:
        count = f"{done.raised} {'linear' if done.raised == 1 else 'linears'}"
        watch.log(f"warning: damping had to be raised for {count} (damping_raised in events.jsonl); more sequences would help")
    summary = _summary(job, done, exported, clock.so_far()) | {
        "gradient_pass": passes,
        "passes": job.walk.runs,
        "rounded_to_nearest": done.nearest,
        "gate": {"held_out_sequences": job.held, "chosen": done.chosen} if job.held else None,
        "fallbacks": done.fallbacks,
        "sessions": sessions,
        "warnings": warnings,
    }
    rundir.write_text(target / "README.md", model_card(summary, tokenizer=job.tokenizer is not None))
    rundir.write_text(target / rundir.FOLDER / "summary.json", json.dumps(summary, indent=1))
    return summary


def _same_run(target: Path, *, recipe: Recipe, **others: Any) -> dict[str, Any] | None:
    """What was begun in the output directory, if anything; refused if it is not this run."""
    found = rundir.begun(target)
    if found is not None:
        flat = {**found["recipe"], **{key: value for key, value in found.items() if key != "recipe"}}
        here = {key: value for key, value in recipe.model_dump().items() if key not in config.OF_THE_MACHINE}
        rundir.same_run(target, flat, here | others)
    return found


def _begin(job: Job, target: Path) -> int:
    """Record what this run is, unless it is there; returns how often it was started."""
    what = {"model_sha256": job.fingerprint, "tokens_sha256": None if job.tokens is None else job.tokens.digest}
    found = _same_run(target, recipe=job.recipe, **what)
    sessions = 1 if found is None else found.get("sessions", 1) + 1
    record = {"recipe": job.recipe.model_dump(), **what, "sessions": sessions, "seconds": (found or {}).get("seconds", {})}
    rundir.write_text(target / rundir.FOLDER / "run.json", json.dumps(record, indent=1))
    rundir.write_text(target / rundir.FOLDER / "recipe.yaml", recipes.dump(job.recipe))
    return sessions


def _round(job: Job, target: Path, clock: Clock, done: Done | None, count: int, watch: Watch) -> dict[str, int] | None:
    """Run estimator and block loop over the blocks that are not done; leaves codes and events. Returns what the gradient pass did, if there was one."""
    from bakron.pipeline import ready, run

    recipe = job.recipe
    with clock.stage("load"):
        ready(recipe)
    with clock.stage("hessian"):
        estimator = make_estimator(job, target, watch.progress, watch.log)
    stored = StoredCodes(target, recipe)
    run(
        job.walk,
        recipe,
        dtype=job.scale_dtype,
        clock=clock,
        ids=None if job.tokens is None else job.tokens.ids,
        estimator=estimator,
        keep=done.keep if done else lambda *_: None,
        stored=lambda i: stored.values(i, job.walk.chosen(i)) if i < count else None,
        progress=watch.progress,
        observe=watch.observe,
    )
    job.walk.unload()
    return getattr(estimator, "passes", None)


def _collecting(log: Log, warnings: list[str]) -> Log:
    """A log that also keeps warnings, for the record of the run."""

    def both(message: str) -> None:
        if message.startswith("warning: "):
            warnings.append(message.removeprefix("warning: "))
        log(message)

    return both


def _recipe(recipe: Recipe | str | Path | None, overrides: dict[str, Any]) -> tuple[Recipe, corpus.Tokens | None]:
    """The resolved recipe, and the calibration tokens where `data` is not the name of a text but ready token ids."""
    given = None
    if not isinstance(data := overrides.get("data", "builtin"), str | Path):
        given = corpus.given(data)
        settled = {"data": given.source, "sequences": given.kept, "length": given.ids.shape[1]}
        for name in ("sequences", "length"):
            if overrides.get(name, settled[name]) != settled[name]:
                raise RecipeError(
                    f"{name} {overrides[name]} beside token ids {list(given.ids.shape)}", f"{settled[name]}", f"Drop {name}, or cut the ids"
                )
        overrides = overrides | settled
    source = recipe if recipe is None or isinstance(recipe, str | Path) else recipe.model_dump(exclude_unset=True)
    return recipes.resolved(source, overrides), given


def _export(target: Path, job: Job, log: Log) -> dict[str, Any]:
    """Write the checkpoint from the stored codes; returns what the summary tells of it."""
    from bakron import export

    format, kind = job.recipe.format, job.recipe.gguf_type
    content, form = job.content(target), export.form_of(format, kind)
    export.write(target, format, kind, content)
    grid = content.sample.grid
    bits = form.bits(grid, job.dtype)
    log(export.sizes(target, content, bits))
    if caveat := form.caveat(grid):
        log(f"note: {caveat}")
    checks = export.verify(target, format, kind, content) if job.recipe.verify else ["not verified: --no-verify was given"]
    for line in checks:
        log(line)
    return {"stored_bits_per_weight": round(bits, 4), "checks": checks}


def _summary(job: Job, done: Done, exported: dict[str, Any], spent: dict[str, float]) -> dict[str, Any]:
    import torch

    import bakron
    from bakron.pipeline import bits_per_weight

    recipe = job.recipe
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    seconds = {stage: round(spent.get(stage, 0.0), 3) for stage in ("load", "calibrate", "hessian", "solve", "write", "total")}
    beside = formats.holds(recipe.format, recipe.gguf_type).beside or torch.finfo(job.scale_dtype).bits + (0 if recipe.symmetric else 8)
    return {
        "model": job.source.identity,
        "in_memory": job.source.live is not None,
        "model_sha256": job.fingerprint,
        "recipe": recipe.model_dump(),
        "calibration": None if job.tokens is None else job.tokens.record(),
        "seconds": seconds,
        "core_share": round(spent.get("solve", 0.0) / spent["total"], 5),
        "bits_per_weight": round(bits_per_weight(recipe.levels or 0, beside, done.quantized, done.scales), 4),
        **exported,
        "parameters": {
            "quantized": done.quantized,
            "kept": parameters - done.quantized,
            "quantized_percent": round(100 * done.quantized / parameters, 2),
            "kept_percent": round(100 - 100 * done.quantized / parameters, 2),
        },
        "damping_raised": done.raised,
        "peak_memory_bytes": peak_memory(),
        "dtype": str(job.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processes": ranks.size(),
        "versions": {
            "bakron": bakron.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "transformers", "numba")},
        },
    }
