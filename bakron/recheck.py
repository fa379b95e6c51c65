"""Certify a finished run: make its Hessians again and check every stored value against its own target, and the checkpoint against the stored codes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, Field

from bakron import data as corpus
from bakron import recipes, rundir
from bakron.errors import DataError, ModelError, OutputError
from bakron.job import Job, StoredCodes, make_estimator, prepare
from bakron.models import load as models

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.config import Recipe
    from bakron.hessian import Estimator
    from bakron.kron import Factor, Kron
    from bakron.models.linears import Linear as LinearView
    from bakron.pipeline import Rounded

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]
Damping = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Gate(BaseModel):
    """What is needed of a choice between Hessians."""

    chosen: str
    damp_a: Damping
    damp_b: Damping | None


class Event(BaseModel):
    """What is needed of a line of events.jsonl."""

    linear: str
    gate: Gate | None = None
    failed: bool = False
    fallback: Literal["one-sided", "nearest"] | None = None


class Versions(BaseModel):
    """What is needed of the versions that made a run."""

    bakron: str


class Parameters(BaseModel):
    """What is needed of a run's counts of weights."""

    quantized_percent: float


class Summary(BaseModel):
    """What is needed of summary.json, here and to export the run once more."""

    model: str
    model_sha256: str
    calibration: dict[str, Any] | None
    dtype: Literal["float32", "bfloat16", "float16"]
    bits_per_weight: float
    versions: Versions
    parameters: Parameters


def certify_run(
    run: str | Path,
    *,
    model: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Tensor | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Certify every linear of a finished run against the Hessians that its recipe gives. Costs the run's time without the solves.

    Args:
        run: Output directory of `bakron.quantize`.
        model: The original model, also one in memory; default: where the run found it.
        tokenizer: Of a model in memory.
        data: The token ids `[N, T]` that the run was given, if it was not given a text.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.

    Returns:
        `{"linears", "weights", "violations", "max_gap", "worst", "differing"}`: counts, the largest excess distance over the nearest grid point in units
        of the entry's scale, the linear that has it, and the linears whose tensors in the checkpoint are not those of the stored codes.

    Raises:
        OutputError: No finished run there, or one of another number of linears.
        ModelError: The model's weights are not those that the run started from.
        DataError: The calibration text is not the run's.
        BakronError: Whatever making the Hessians can raise.
    """
    from bakron.export import differing
    from bakron.pipeline import Clock
    from bakron.pipeline import run as walk_blocks

    target = rundir.path_of(run)
    summary, events = read_records(target)
    recipe = recipes.load(target / rundir.FOLDER / "recipe.yaml").resolve()
    if recipe.refit or recipe.polish:
        raise OutputError(
            f"{target} is a run with {'refit' if recipe.refit else 'polish'}, after which values are no nearest-plane rounding any more",
            "a run without refit and polish",
        )
    source, given = original(summary, model, tokenizer), None if data is None else corpus.given(data)
    if given is None and recipe.method != "rtn":
        corpus.check(recipe.data)
    stored = StoredCodes(target, recipe)
    found: dict[str, dict[str, Any]] = {}

    def keep(_: int, rounded: dict[str, Rounded]) -> None:
        found.update({one.event["linear"]: one.event for one in rounded.values()})

    with tempfile.TemporaryDirectory(prefix="bakron-certify-") as scratch:
        job = prepare(source, recipe, log or (lambda _: None), Path(scratch), given)
        _same_inputs(job, summary)
        estimator = make_estimator(job, Path(scratch), progress or (lambda *_: None))
        treat = _Recheck(job, stored, events, estimator)
        if treat.places.keys() != events.keys():
            raise OutputError(
                f"events.jsonl of {target} tells of {len(events)} linears, the run has {len(treat.places)}", "the same linears"
            )
        walk_blocks(
            job.walk,
            # what was chosen for each linear is in the events; the sequences to choose by stay out of the factors all the same
            recipe.model_copy(update={"gate": False, "damp_a": 0.0, "damp_b": 0.0} if recipe.chooses else {}),
            dtype=job.scale_dtype,
            clock=Clock(),
            ids=None if job.tokens is None else job.tokens.ids,
            estimator=estimator,
            keep=keep,
            treat=treat,
            progress=progress or (lambda *_: None),
        )
    worst = max(found, key=lambda name: found[name]["max_gap"])
    return {
        "linears": len(found),
        "weights": sum(event["shape"][0] * event["shape"][1] for event in found.values()),
        "violations": sum(event["violations"] for event in found.values()),
        "max_gap": found[worst]["max_gap"],
        "worst": worst,
        "differing": differing(target, recipe.format, recipe.gguf_type, job.content(target)),
    }


class _Recheck:
    """Stands in for rounding in the block loop: puts the stored values in place and certifies them."""

    def __init__(self, job: Job, stored: StoredCodes, events: dict[str, Event], estimator: Estimator | None) -> None:
        self.job, self.stored, self.events, self.estimator = job, stored, events, estimator
        self.places = {f"{job.walk.prefix(i)}.{name}": (i, name) for i in range(len(job.walk)) for name in job.walk.chosen(i)}

    def __call__(self, linear: LinearView, kron: Kron | None, recipe: Recipe, dtype: torch.dtype, name: str) -> Rounded:
        import torch

        from bakron.kron import Kron
        from bakron.pipeline import Rounded, damped
        from bakron.solver import certify

        i, within = self.places[name]
        codes, grid = self.stored.linear(i, within)
        values, W = grid.values(codes), linear.weight.detach().float().cpu()
        if kron is None:
            kron = Kron(torch.eye(W.shape[1]))
        else:
            event = self.events[name]
            if event.gate is None and event.fallback is None and self.job.recipe.chooses:
                raise OutputError(
                    f"events.jsonl of {self.stored.target} does not say what was chosen for {name}", "the records of one run with a choice"
                )
            gate = event.gate or Gate.model_construct(chosen="two-sided", damp_a=recipe.damp_a, damp_b=recipe.damp_b)
            if event.failed:
                kron = Kron(torch.eye(W.shape[1])) if event.fallback == "nearest" else Kron(kron.A)
            elif gate.chosen == "unweighted":
                kron = Kron(self._unweighted(name, within))
            elif gate.damp_b is None or recipe.method != "bakron":
                kron = Kron(kron.A)
            recipe = recipe.model_copy(update={"damp_a": gate.damp_a, "damp_b": gate.damp_b})
            kron, _ = damped(kron, recipe, name)
        proof = certify(values, W, kron, grid, order=recipe.order or "natural")
        linear.weight.data.copy_(values)
        told = {"linear": name, "shape": list(W.shape), "violations": proof.violations, "max_gap": proof.max_gap}
        return Rounded(values, codes, grid, told)

    def _unweighted(self, name: str, within: str) -> Factor:
        found = getattr(self.estimator, "unweighted", {}).get(within)
        if found is None:
            raise OutputError(
                f"events.jsonl of {self.stored.target} says that {name} was rounded with an unweighted A, which its recipe does not try",
                "the records of one run",
            )
        return found


def _same_inputs(job: Job, summary: dict[str, Any]) -> None:
    """Refuse a model or text that is not the run's."""
    if job.fingerprint != summary["model_sha256"]:
        raise ModelError(f"{job.source.name} has other weights than the run started from", "the same model", "Name it with --model")
    text = (summary["calibration"] or {}).get("sha256")
    if job.tokens is not None and job.tokens.sha256 != text:
        raise DataError(f"the calibration text {job.recipe.data} has changed since the run", "the same text")


def original(
    summary: dict[str, Any], model: str | Path | PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> models.Source:
    """The model that a run started from, where it was then or where it is now.

    Args:
        summary: Of the run.
        model: The original model, or None for where the run found it.
        tokenizer: Of a model in memory.

    Raises:
        ModelError: It was in memory then, and is not named now; or whatever `find` raises.
    """
    if model is None and summary.get("in_memory"):
        raise ModelError("a run that started from a model in memory", "that model, or a directory it is saved in", "Name it with --model")
    return models.find(summary["model"] if model is None else model, tokenizer)


def read_records(target: Path) -> tuple[dict[str, Any], dict[str, Event]]:
    """Summary and events by linear of a finished run.

    Raises:
        OutputError: The run is not finished, or what is needed of its records is not there; the first such entry is named.
    """
    folder = target / rundir.FOLDER
    if not (folder / "summary.json").is_file():
        raise OutputError(
            f"{target} is no finished run: it has no {rundir.FOLDER}/summary.json",
            "an output directory of bakron quantize",
            "If it was cut short, give its quantize command again",
        )
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        Summary.model_validate(summary)
        events = [Event.model_validate(event) for event in rundir.Events.read(folder / "events.jsonl")]
        return summary, {event.linear: event for event in events}
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{error.title.lower()}, {'.'.join(map(str, first['loc'])) or 'as a whole'}"
        raise OutputError(
            f"the records in {folder} cannot be read: {where}: {first['msg']}", "an output directory of bakron quantize"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(f"the records in {folder} cannot be read: {error}", "an output directory of bakron quantize") from error
