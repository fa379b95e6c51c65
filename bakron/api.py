"""The two jobs as functions: `quantize` a model into a directory, `evaluate` one. The command line is a thin layer over these."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import config, rundir
from bakron import data as corpus
from bakron.errors import RecipeError
from bakron.models import load as models

if TYPE_CHECKING:
    import torch

    from bakron.config import Recipe
    from bakron.hessian import Estimator
    from bakron.models.walk import Walk
    from bakron.pipeline import Clock, Rounded

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Quantize every linear of a model's decoder blocks; embeddings and head are left alone.

    Args:
        model: Hugging Face directory, hub name, or GGUF file.
        out: New or empty directory: becomes a Hugging Face directory, plus `out/bakron/` with `recipe.yaml`, `events.jsonl`, `summary.json` and the codes.
        recipe: A recipe or the path of a YAML file.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.
        **overrides: Fields of the recipe that win over it, such as `levels=7`.

    Returns:
        What is written to `summary.json`.

    Raises:
        BakronError: Any of its subclasses; nothing is written for mistakes that can be found before the work starts.
    """
    start = time.perf_counter()
    progress, log = progress or (lambda *_: None), log or (lambda _: None)
    recipe = _recipe(recipe, overrides)
    source = models.find(str(model))
    target = rundir.check_output(out)
    if recipe.factors:
        rundir.check_store(recipe.factors)
    if recipe.method != "rtn":
        corpus.check(recipe.data)

    import torch

    from bakron.export.card import model_card
    from bakron.grids import check_groups
    from bakron.models.walk import Walk
    from bakron.pipeline import Clock, check_widths, run

    device = _device(recipe.device)
    clock = Clock()
    with clock.stage("load"):
        check_groups(models.widths(models.early_config(source)), recipe.group_size)
        tokenizer = models.read_tokenizer(source, required=recipe.method != "rtn")
        tokens = None
        if recipe.method != "rtn":
            texts = corpus.load(recipe.data, split="calibration")
            tokens = corpus.windows(texts, tokenizer, length=recipe.length, sequences=recipe.sequences, seed=recipe.seed)
            log(f"calibration: {tokens.describe()}")
        loaded = models.read(source, torch.float32)
        walk = Walk(loaded, tokens.ids.shape[1] if tokens else 2, device, recipe.batch, recipe.precision)
        check_widths(walk, recipe)
        dtype = getattr(torch, models.stored_dtype(source, loaded) if recipe.dtype == "auto" else recipe.dtype)
        models.check_range(loaded, dtype)
    ids = None if tokens is None else tokens.ids
    if tokens is not None and recipe.method != "rtn" and (narrow := _too_few(walk, tokens.ids.numel())):
        log(
            f"warning: {tokens.ids.numel():,} calibration tokens are fewer than the {narrow:,} inputs of the widest linear; more sequences would help"
        )
    with clock.stage("hessian"):
        estimator, temporary = _estimator(recipe, walk, ids, target, loaded, progress)
    rundir.write_text(target / rundir.FOLDER / "recipe.yaml", config.dump(recipe))
    events = rundir.Events(target / rundir.FOLDER / "events.jsonl")
    counts = {"quantized": 0, "scales": 0, "raised": 0}
    chosen: dict[str, int] = {}

    def keep(i: int, rounded: dict[str, Rounded]) -> None:
        rundir.write_tensors(rundir.codes_file(target, i), _stored(rounded))
        for one in rounded.values():
            events.write(one.event)
            if "gate" in one.event:
                chosen[one.event["gate"]["chosen"]] = chosen.get(one.event["gate"]["chosen"], 0) + 1
            counts["quantized"] += one.codes.numel()
            counts["scales"] += one.grid.scale.numel()
            counts["raised"] += one.event.get("damping_raised", False)
        if temporary is not None:
            (temporary / f"block_{i:04d}.safetensors").unlink(missing_ok=True)

    held = _held(recipe, ids)
    used = None if ids is None else ids[: len(ids) - held]
    run(walk, recipe, dtype=dtype, clock=clock, ids=used, estimator=estimator, keep=keep, progress=progress)
    with clock.stage("write"):
        if temporary is not None:
            (temporary / "manifest.json").unlink(missing_ok=True)
            temporary.rmdir()
        stored_bits = _export(target, recipe, source, walk, tokenizer, dtype)
    if counts["raised"]:
        log(f"warning: damping had to be raised for {counts['raised']} linears (damping_raised in events.jsonl); more sequences would help")
    passes = getattr(estimator, "passes", None)
    summary = _summary(recipe, str(model), tokens, loaded, counts, stored_bits, dtype, clock, time.perf_counter() - start) | {
        "gradient_pass": passes,
        "gate": {"held_out_sequences": held, "chosen": chosen} if held else None,
    }
    rundir.write_text(target / rundir.FOLDER / "summary.json", json.dumps(summary, indent=1))
    rundir.write_text(target / "README.md", model_card(summary))
    return summary


def evaluate(
    model: str | Path,
    *,
    reference: str | Path | None = None,
    data: str = "builtin",
    length: int = 512,
    sequences: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Perplexity of a model on text and, with the original as reference, KL divergence and agreement.

    Args:
        model: Hugging Face directory (also a quantized one), hub name, or GGUF file.
        reference: The original model.
        data: Text: a file, a hub data set, or "builtin" (its evaluation part).
        length: Tokens per window.
        sequences: Windows from the start of the text; None = all.
        device: Where to compute.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.

    Returns:
        `{"perplexity", "kl", "agreement", "tokens", "sequences", "length"}`, see `bakron.evaluation.compare`.

    Raises:
        BakronError: Any of its subclasses.
    """
    log = log or (lambda _: None)
    if length < 2:
        raise RecipeError(f"length {length}", "at least 2 tokens")
    if sequences is not None and sequences < 1:
        raise RecipeError(f"sequences {sequences}", "at least 1")
    source = models.find(str(model), quantized=True)
    original = None if reference is None else models.find(str(reference), quantized=True)
    corpus.check(data)

    import torch

    from bakron import evaluation

    where = _device(device)
    tokenizer = models.read_tokenizer(source)
    tokens = corpus.windows(corpus.load(data, split="evaluation"), tokenizer, length=length, sequences=sequences, seed=None)
    log(f"evaluation: {tokens.describe()}")
    loaded = models.read(source, torch.float32)
    models.check_length(loaded, length)
    base = None if original is None else models.read(original, torch.float32)
    return evaluation.compare(loaded, tokens.ids, base, device=where, progress=progress or (lambda *_: None))


def _recipe(recipe: Recipe | str | Path | None, overrides: dict[str, Any]) -> Recipe:
    if recipe is None or isinstance(recipe, str | Path):
        return config.load(recipe, **overrides).resolve()
    return config.from_dict({**recipe.model_dump(exclude_unset=True), **overrides}).resolve()


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecipeError(
            f"device {name!r}: {str(error).splitlines()[0]}", "a device that torch can use here, such as cpu or cuda"
        ) from error
    return device


def _too_few(walk: Walk, tokens: int) -> int | None:
    widest = max(linear.in_features for linear in walk.linears(0).values())
    return widest if tokens < widest else None


def _estimator(
    recipe: Recipe, walk: Walk, ids: torch.Tensor | None, target: Path, model: Any, progress: Progress
) -> tuple[Estimator | None, Path | None]:
    """The recipe's estimator, and the directory of the gradient pass if it is to be removed afterwards."""
    from bakron.hessian import ESTIMATORS

    if recipe.method == "rtn" or ids is None:
        return None, None
    estimate = ESTIMATORS[recipe.hessian or "backprop"]
    skip = int(recipe.skip_first)
    if recipe.hessian == "input":
        return estimate(walk, skip=skip), None
    if recipe.hessian != "backprop":
        return estimate(walk, factor=recipe.factor, skip=skip), None
    store = Path(recipe.factors).expanduser() if recipe.factors else target / rundir.FOLDER / "gradients"
    estimator = estimate(
        walk,
        ids,
        store,
        factor=recipe.factor or "mixed",
        seed=recipe.seed,
        fingerprint=models.fingerprint(model),
        labels=recipe.labels or "sampled",
        clip=recipe.clip,
        skip=skip,
        held=_held(recipe, ids),
        boundary_memory=None if recipe.boundary_memory is None else config.size_in_bytes(recipe.boundary_memory),
        progress=progress,
    )
    return estimator, None if recipe.factors else store


def _held(recipe: Recipe, ids: torch.Tensor | None) -> int:
    """Sequences that the gate keeps out of the factors.

    Raises:
        RecipeError: There is only one.
    """
    if not recipe.gate or ids is None:
        return 0
    if len(ids) < 2:
        raise RecipeError("gate with a text of one sequence, which it would hold out", "at least 2 sequences", "Use a longer text")
    return max(1, len(ids) // 8)


def _stored(rounded: dict[str, Rounded]) -> dict[str, torch.Tensor]:
    """Codes, scales and zero points of a block as they are kept on disk."""
    import torch

    tensors = {}
    for name, one in rounded.items():
        signed = one.grid.low < 0
        tensors[f"{name}.codes"] = one.codes.to(torch.int8 if signed else torch.uint8)
        tensors[f"{name}.scale"] = one.grid.scale
        if one.grid.zero is not None:
            tensors[f"{name}.zero"] = one.grid.zero
    return tensors


def _export(target: Path, recipe: Recipe, source: models.Source, walk: Walk, tokenizer: Any, dtype: torch.dtype) -> float:
    """Write the checkpoint from the stored codes; returns stored bits per quantized weight."""
    import torch

    from bakron.export import FORMATS, Linear, write_checkpoint
    from bakron.grids import UniformGrid, code_range

    low, high = code_range(recipe.levels, None, recipe.symmetric)
    cache: dict[int, dict[str, torch.Tensor]] = {}

    def fetch(i: int, name: str) -> Linear:
        if i not in cache:
            cache.clear()
            cache[i] = rundir.read_tensors(rundir.codes_file(target, i))
        grid = UniformGrid(cache[i][f"{name}.scale"], cache[i].get(f"{name}.zero"), low, high, recipe.group_size)
        return Linear(cache[i][f"{name}.codes"].to(torch.int32), grid)

    linears = {
        f"{walk.prefix(i)}.{name}": (lambda i=i, name=name: fetch(i, name)) for i in range(len(walk)) for name in walk.layout.linears
    }
    form = FORMATS[recipe.format]
    sample = next(iter(linears.values()))().grid
    where = source.path if source.path is not None and source.gguf is None else None
    write_checkpoint(
        target, walk.model, tokenizer, where, dtype, linears, form.encode, form.quantization_config(sample, [walk.layout.head])
    )  # type: ignore[arg-type]
    return form.bits(sample, dtype)


def _summary(
    recipe: Recipe,
    name: str,
    tokens: corpus.Tokens | None,
    model: Any,
    counts: dict[str, int],
    stored_bits: float,
    dtype: torch.dtype,
    clock: Clock,
    total: float,
) -> dict[str, Any]:
    import torch

    import bakron
    from bakron.pipeline import bits_per_weight, peak_memory

    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = {stage: round(clock.seconds.get(stage, 0.0), 3) for stage in ("load", "calibrate", "hessian", "solve", "write")}
    zero_bits = 0 if recipe.symmetric else 8
    return {
        "model": name,
        "recipe": recipe.model_dump(),
        "calibration": None if tokens is None else tokens.record(),
        "seconds": seconds | {"total": round(total, 3)},
        "core_share": round(clock.seconds["solve"] / total, 5),
        "bits_per_weight": round(
            bits_per_weight(recipe.levels or 0, torch.finfo(dtype).bits, zero_bits, counts["quantized"], counts["scales"]), 4
        ),
        "stored_bits_per_weight": round(stored_bits, 4),
        "parameters": {
            "quantized": counts["quantized"],
            "kept": parameters - counts["quantized"],
            "quantized_percent": round(100 * counts["quantized"] / parameters, 2),
            "kept_percent": round(100 - 100 * counts["quantized"] / parameters, 2),
        },
        "damping_raised": counts["raised"],
        "peak_memory_bytes": peak_memory(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "bakron": bakron.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "transformers", "numba")},
        },
    }
