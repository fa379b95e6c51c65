"""What a run works on, made from a recipe: tokens, model, estimator, and the codes it leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import config, formats, ranks, rundir
from bakron import data as corpus
from bakron.errors import OutputError, RecipeError
from bakron.models import layout
from bakron.models import load as models

if TYPE_CHECKING:
    import torch

    from bakron.config import Recipe
    from bakron.export import Content, Linear
    from bakron.grids import UniformGrid
    from bakron.hessian import Estimator
    from bakron.models.walk import Walk
    from bakron.models.weights import Weights
    from bakron.pipeline import Rounded

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]
HELD_SHARE, HELD_LEAST = 8, 2  # one sequence in so many is held out to choose by, and at least so many: a standard error needs two


@dataclass(frozen=True)
class Job:
    """A model, ready to be walked, and the tokens to calibrate it on.

    Attributes:
        recipe: Resolved.
        source: Where the model is.
        tokenizer: Its tokenizer; None if it has none and none is needed.
        tokens: Calibration windows; None for rtn.
        model: Without its weights.
        weights: Where they are.
        walk: The model block by block.
        dtype: In which all that is not quantized is stored.
        fingerprint: SHA-256 of the model's original weights.
    """

    recipe: Recipe
    source: models.Source
    tokenizer: Any
    tokens: corpus.Tokens | None
    model: Any
    weights: Weights
    walk: Walk
    dtype: torch.dtype
    fingerprint: str

    @cached_property
    def held(self) -> int:
        """Sequences that are kept out of the factors until they are chosen between, the last ones: what `gate` and damping `auto` choose by.

        Raises:
            RecipeError: There are too few sequences.
        """
        if not self.recipe.chooses or self.tokens is None:
            return 0
        return held_out(len(self.tokens.ids))

    @property
    def scale_dtype(self) -> torch.dtype:
        """In which scales are stored: the format's, or `dtype`."""
        import torch

        kind = formats.holds(self.recipe.format, self.recipe.gguf_type).scale
        return self.dtype if kind is None else getattr(torch, kind)

    def content(self, target: Path) -> Content:
        """What an export writes, with the codes kept in the output directory `target` of a run."""
        from bakron.export import Content

        linears = stored_linears(self.walk, StoredCodes(target, self.recipe))
        return Content(
            self.model,
            self.weights,
            self.tokenizer,
            self.source,
            self.dtype,
            linears,
            [*self.walk.layout.ignored, *sorted(self.walk.excluded)],
        )


def held_out(sequences: int) -> int:
    """How many of a run's sequences are held out to choose by.

    Raises:
        RecipeError: None would be left.
    """
    if sequences <= HELD_LEAST:
        raise RecipeError(
            f"gate or damping auto with a text of {sequences} sequences, two of which would be held out",
            "at least 3 sequences",
            "Use a longer text",
        )
    return max(HELD_LEAST, sequences // HELD_SHARE)


def prepare(source: models.Source, recipe: Recipe, log: Log, scratch: Path, given: corpus.Tokens | None = None) -> Job:
    """Read the text, look at every weight of the model once, and refuse what cannot work: cheap checks first.

    Args:
        source: From `models.load.find`.
        recipe: Resolved.
        log: Called with one-line messages.
        scratch: Where activations go for which there is no memory.
        given: Ready token ids in place of the recipe's text.

    Returns:
        The job.

    Raises:
        BakronError: Any of its subclasses.
    """
    import torch

    from bakron.export import check_content
    from bakron.grids import check_groups
    from bakron.hessian import LOCAL, check_parts
    from bakron.models.room import Room
    from bakron.models.walk import Walk
    from bakron.pipeline import check_widths

    where = device(recipe.device)
    early = models.early_config(source)
    layout.check_format(str(early["model_type"]), recipe.format, recipe.symmetric)
    check_parts(str(early["model_type"]), LOCAL.get(recipe.hessian or "", ()))
    if not (recipe.include or recipe.exclude):
        widths = layout.widths(early)
        check_groups(widths, recipe.group_size)
        formats.check_shapes(recipe.format, recipe.gguf_type, {name: (None, n) for name, n in widths.items()})
    log(f"loading {source.name}")
    source = models.fetch(source)
    if source.code:
        log("warning: config.json names Python code of its own (auto_map), which is not run")
    tokenizer = models.read_tokenizer(source, required=recipe.method != "rtn" and given is None)
    tokens = given if recipe.method != "rtn" else None
    if recipe.method != "rtn" and tokens is None:
        texts = corpus.load(recipe.data, split="calibration")
        tokens = corpus.windows(texts, tokenizer, length=recipe.length, sequences=recipe.sequences, seed=recipe.seed)
    if tokens is not None:
        log(f"calibration: {tokens.describe()}")
    model, weights = models.open_model(source)
    check_content(recipe.format, model.config, tokenizer, source)
    if tokens is not None:
        models.check_tokens(model, tokens.ids, given=tokens.given)
    room = Room(None if recipe.memory is None else config.size_in_bytes(recipe.memory), scratch / rundir.FOLDER / "spill")
    walk = Walk(model, tokens.ids.shape[1] if tokens else 2, where, recipe.batch, recipe.precision, weights, room)
    if recipe.include or recipe.exclude:
        matches = walk.choose(recipe.include, recipe.exclude)
        count = sum(len(walk.chosen(i)) for i in range(len(walk)))
        told = "; ".join(f"{pattern} matches {found}" for pattern, found in matches.items())
        log(f"layers: {told}; {count} of {count + len(walk.excluded)} linears are to be quantized")
    check_widths(walk, recipe)
    if tokens is not None and len(tokens.ids) - (held_out(len(tokens.ids)) if recipe.chooses else 0) < ranks.size():
        raise RecipeError(f"{ranks.size()} processes for {len(tokens.ids)} sequences", "one at least for each", "Use fewer processes")
    dtype = getattr(torch, models.stored_dtype(source, model) if recipe.dtype == "auto" else recipe.dtype)
    widest = max(walk.linears(i)[name].in_features for i in range(len(walk)) for name in walk.chosen(i))
    if tokens is not None and tokens.ids.numel() < widest:
        log(
            f"warning: {tokens.ids.numel():,} calibration tokens are fewer than the {widest:,} inputs of the widest linear; more sequences would help"
        )
    return Job(recipe, source, tokenizer, tokens, model, weights, walk, dtype, weights.survey(dtype))


def device(name: str) -> torch.device:
    """A device that works here; of several processes on one machine, each has its own GPU.

    Raises:
        RecipeError: It does not.
    """
    import torch

    try:
        found = torch.device(name, ranks.local()) if name == "cuda" and ranks.size() > 1 else torch.device(name)
        float(torch.zeros(1, device=found))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecipeError(f"device {name!r}: {str(error).splitlines()[0]}", "a device that torch can use here, such as cpu") from error
    return found


def make_estimator(job: Job, target: Path, progress: Progress, log: Log = lambda _: None) -> Estimator | None:
    """The recipe's estimator; for backprop this runs the gradient pass.

    Args:
        job: What to work on; the model still has its original weights.
        target: Output directory, which holds the gradient pass unless the recipe names a place.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.

    Returns:
        The estimator; None for rtn.
    """
    import torch

    from bakron.hessian import ESTIMATORS

    recipe = job.recipe
    if job.tokens is None:
        return None
    estimate = ESTIMATORS[recipe.hessian or "backprop"]
    common = {"skip": int(recipe.skip_first), "dtype": getattr(torch, recipe.accumulate or "float32")}
    if recipe.hessian == "input":
        return estimate(job.walk, **common)
    if recipe.hessian != "backprop":
        return estimate(job.walk, factor=recipe.factor, **common)
    store = Path(recipe.factors).expanduser() if recipe.factors else target / rundir.FOLDER / "gradients"
    if not recipe.factors:
        ranks.by_first(lambda: _refuse_damaged(store, log))
    return estimate(
        job.walk,
        job.tokens.ids,
        store,
        factor=recipe.factor or "mixed",
        seed=recipe.seed,
        fingerprint=job.fingerprint,
        labels=recipe.labels or "sampled",
        samples=recipe.samples or 1,
        clip=recipe.clip,
        **common,
        held=job.held,
        gate=recipe.gate,
        every=recipe.factors is not None,
        boundary_memory=None if recipe.boundary_memory is None else config.size_in_bytes(recipe.boundary_memory),
        progress=progress,
    )


def _refuse_damaged(store: Path, log: Log) -> None:
    """Remove the gradient pass if a file of it is damaged."""
    if bad := rundir.first_damaged(store):
        log(f"{bad}. The gradient pass is run again")
        shutil.rmtree(store)


def codes_of(rounded: Mapping[str, Rounded]) -> dict[str, torch.Tensor]:
    """Codes, scales, zero points and offsets of a block as they are kept on disk."""
    import torch

    from bakron.grids import OffsetGrid

    tensors = {}
    for name, one in rounded.items():
        tensors[f"{name}.codes"] = one.codes.to(torch.int8 if one.grid.low < 0 else torch.uint8)
        tensors[f"{name}.scale"] = one.grid.scale
        if one.grid.zero is not None:
            tensors[f"{name}.zero"] = one.grid.zero
        if isinstance(one.grid, OffsetGrid):
            tensors[f"{name}.offset"] = one.grid.offset
    return tensors


class StoredCodes:
    """The codes of a run, read block by block.

    Args:
        target: Output directory of the run.
        recipe: Resolved.
    """

    def __init__(self, target: Path, recipe: Recipe) -> None:
        from bakron.grids import code_range

        self.target, self.recipe = target, recipe
        self.low, self.high = code_range(recipe.levels, None, recipe.symmetric)
        self._block: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    def values(self, i: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Rounded weights of block i by linear, float32."""
        found = {}
        for name in names:
            codes, grid = self.linear(i, name)
            found[name] = grid.values(codes)
        return found

    def linear(self, i: int, name: str) -> tuple[torch.Tensor, UniformGrid]:
        """Codes `[m, n]` int32 and grid of a linear of block i.

        Raises:
            OutputError: They are missing or damaged.
        """
        import torch

        from bakron.grids import OffsetGrid, UniformGrid

        if self._block[0] != i:
            self._block = (i, rundir.read_tensors(rundir.codes_file(self.target, i)))
        stored, groups = self._block[1], self.recipe.group_size
        codes, scale = stored.get(f"{name}.codes"), stored.get(f"{name}.scale")
        file = rundir.codes_file(self.target, i)
        if codes is None or scale is None:
            raise OutputError(f"{file} has no {name}", "codes and scales of every linear")
        if codes.ndim != 2 or list(scale.shape) != [len(codes), codes.shape[1] // groups if groups else 1]:
            raise OutputError(
                f"{file}: codes {list(codes.shape)} and scales {list(scale.shape)} of {name} do not fit", "those of a finished run"
            )
        if (offset := stored.get(f"{name}.offset")) is not None:
            return codes.to(torch.int32), OffsetGrid(scale, None, self.low, self.high, groups, None, offset)
        return codes.to(torch.int32), UniformGrid(scale, stored.get(f"{name}.zero"), self.low, self.high, groups)


class Done:
    """The blocks of a run that are rounded: their codes on disk, and what happened to them, as told by the events that are stored with the codes.

    Args:
        job: What is worked on.
        target: Output directory.
        log: Called with one-line messages.

    Attributes:
        count: Blocks that are done, from the first.
        stored: Their codes.
        quantized: Weights in them.
        scales: Scales of those.
        raised: Linears whose damping was raised.
        chosen: By candidate of the gate, how often it was chosen.
        outlying: What is told of outliers of each linear.
        fallbacks: Linears whose factors could not be used, and what was done instead.
        nearest: Linears of experts that too few tokens reached.
    """

    def __init__(self, job: Job, target: Path, log: Log) -> None:
        self._job, self._target = job, target
        self._events = rundir.Events(target / rundir.FOLDER / "events.jsonl")
        self.count = self.quantized = self.scales = self.raised = 0
        self.chosen: dict[str, int] = {}
        self.outlying: list[dict[str, Any]] = []
        self.fallbacks: dict[str, str] = {}
        self.nearest: list[str] = []
        self.stored = StoredCodes(target, job.recipe)
        events: list[dict[str, Any]] = []
        for i in range(len(job.walk)):
            file = rundir.codes_file(target, i)
            if not file.is_file():
                break
            try:
                tensors, told = rundir.read_tensors(file, "the codes of a block"), json.loads(rundir.read_metadata(file)["events"])
            except (OutputError, KeyError, ValueError) as error:
                log(f"{error if isinstance(error, OutputError) else f'{file} has no events.'} Blocks from {i} on are rounded again")
                break
            self._add(tensors, told)
            events += told
        for i in range(self.count, len(job.walk)):
            rundir.codes_file(target, i).unlink(missing_ok=True)
        self._events.replace(events)

    def keep(self, i: int, rounded: Mapping[str, Rounded]) -> None:
        """Store the next block."""
        self.store(i, codes_of(rounded), [one.event for one in rounded.values()])

    def store(self, i: int, tensors: Mapping[str, torch.Tensor], events: Sequence[Mapping[str, Any]]) -> None:
        """Store the next block, of which these are the tensors of `codes_of` and the events."""
        rundir.write_tensors(rundir.codes_file(self._target, i), tensors, {"events": f"[{', '.join(map(rundir.line, events))}]"})
        for event in events:
            self._events.write(event)
        self._add(tensors, events)

    def _add(self, tensors: Mapping[str, torch.Tensor], events: Iterable[Mapping[str, Any]]) -> None:
        self.count += 1
        for name, tensor in tensors.items():
            self.quantized += tensor.numel() if name.endswith(".codes") else 0
            self.scales += tensor.numel() if name.endswith(".scale") else 0
        for event in events:
            self.raised += event.get("damping_raised", False)
            if "failed" in event:
                self.fallbacks[event["linear"]] = event["fallback"]
            self.outlying.append(event.get("outliers", {}))
            self.nearest += [event["linear"]] if "fallback" in event and "failed" not in event else []
            if "gate" in event:
                self.chosen[event["gate"]["chosen"]] = self.chosen.get(event["gate"]["chosen"], 0) + 1


def stored_linears(walk: Walk, stored: StoredCodes) -> dict[str, Callable[[], Linear]]:
    """By module name, something that reads a linear's codes and grid."""
    from bakron.export import Linear

    return {
        f"{walk.prefix(i)}.{name}": (lambda i=i, name=name: Linear(*stored.linear(i, name)))
        for i in range(len(walk))
        for name in walk.chosen(i)
    }
