"""Write a finished run once more, in another format, from its stored codes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import formats, recipes, rundir
from bakron.errors import ModelError, OutputError, RecipeError
from bakron.job import StoredCodes, stored_linears
from bakron.models import load as models
from bakron.recheck import original, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.config import Recipe
    from bakron.export import Content
    from bakron.models.load import Source

Log = Callable[[str], None]
RECORD = "export.json"  # within the folder of records; marks a directory that may be replaced


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str,
    gguf_type: str | None = None,
    model: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    verify: bool = True,
    log: Log | None = None,
) -> dict[str, Any]:
    """Write the codes of a finished run in another format. Nothing is rounded: a format that cannot hold them exactly is refused.

    Args:
        run: Output directory of `bakron.quantize`.
        out: New or empty directory, or that of an earlier export, which is replaced when the new one is complete.
        format: A name in `bakron.FORMATS`.
        gguf_type: Type of tensors, for gguf only; default: what fits the run's levels.
        model: The original model, also one in memory; default: where the run found it.
        tokenizer: Of a model in memory.
        verify: Load the export again and compare it with the codes.
        log: Called with one-line messages.

    Returns:
        What is written to `out/bakron/export.json`: run, format, bits, and what was verified.

    Raises:
        RecipeError: The format cannot hold the run's grids.
        OutputError: No finished run there, or `out` is something else than said above.
        ModelError: The model's weights are not those that the run started from, or the format has no words for it.
    """
    log = log or (lambda _: None)
    origin, target = rundir.path_of(run), rundir.path_of(out)
    summary, events = read_records(origin)
    recipe = recipes.load(origin / rundir.FOLDER / "recipe.yaml").resolve()
    gguf_type = _settled(recipe, format, gguf_type)
    _check_target(origin, target)

    from bakron import export

    content = _content(origin, recipe, summary, events.keys(), original(summary, model, tokenizer), format, gguf_type, log)
    form = export.form_of(format, gguf_type)
    grid = content.sample.grid
    bits = form.bits(grid, content.dtype)
    with _replacing(target) as fresh:
        export.write(fresh, format, gguf_type, content)
        log(export.sizes(fresh, content, bits))
        if caveat := form.caveat(grid):
            log(f"note: {caveat}")
        checks = export.verify(fresh, format, gguf_type, content) if verify else ["not verified: --no-verify was given"]
        for line in checks:
            log(line)
        record = {"model": summary["model"], "model_sha256": summary["model_sha256"], "format": format, "gguf_type": gguf_type}
        record |= {"stored_bits_per_weight": round(bits, 4), "checks": checks, "recipe": recipe.model_dump()}  # as it was run
        written = recipe.model_dump() | {"format": format, "gguf_type": gguf_type}
        rundir.write_text(fresh / rundir.FOLDER / RECORD, json.dumps(record, indent=1))
        rundir.write_text(
            fresh / "README.md", export.model_card(summary | record | {"recipe": written}, tokenizer=content.tokenizer is not None)
        )
    return record


def _settled(recipe: Recipe, format: str, gguf_type: str | None) -> str | None:
    """The type of GGUF tensors; refuses a format that cannot hold the run's grids."""
    if format not in formats.FORMATS and format != "gguf":
        raise RecipeError(f"format {format!r}", recipes.allowed("format"))
    if gguf_type is not None and gguf_type not in formats.GGUF_TYPES:
        raise RecipeError(f"gguf_type {gguf_type!r}", recipes.allowed("gguf_type"))
    if gguf_type is not None and format != "gguf":
        raise RecipeError(f"gguf_type {gguf_type} with format {format}", "format gguf")
    levels, own = recipe.levels or 0, formats.holds(recipe.format, recipe.gguf_type).form
    if own.startswith("super") and format != "dense" and gguf_type not in (None, recipe.gguf_type):
        raise RecipeError(
            f"a run with gguf_type {recipe.gguf_type}, whose levels have offsets", f"gguf_type {recipe.gguf_type}, or format dense"
        )
    if own.startswith("super") and format not in ("dense", "gguf"):
        raise RecipeError(f"a run with gguf_type {recipe.gguf_type}, whose levels have offsets, in format {format}", "format gguf or dense")
    if format == "gguf" and gguf_type is None:
        gguf_type = recipe.gguf_type or formats.gguf_type_of(levels, recipe.symmetric)
    formats.check(format, gguf_type, levels, recipe.symmetric, recipe.group_size)
    return gguf_type


def _content(
    origin: Path,
    recipe: Recipe,
    summary: dict[str, Any],
    names: Collection[str],
    source: Source,
    format: str,
    gguf_type: str | None,
    log: Log,
) -> Content:
    """The original model and the run's codes; refuses a model that is not the run's, or that the format cannot write."""
    import torch

    from bakron.export import Content, check_content
    from bakron.models.layout import check_format
    from bakron.models.walk import Walk

    log(f"loading {source.name}")
    source = models.fetch(source)
    loaded, weights = models.open_model(source)
    dtype = getattr(torch, summary["dtype"])
    if weights.survey(dtype) != summary["model_sha256"]:
        raise ModelError(f"{source.name} has other weights than the run started from", "the same model", "Name it with --model")
    tokenizer = models.read_tokenizer(source, required=False)
    check_format(loaded.config.model_type, format, recipe.symmetric)
    check_content(format, loaded.config, tokenizer, source)
    walk = Walk(loaded, 2, weights=weights)
    walk.choose(recipe.include, recipe.exclude)
    shapes = {f"{walk.prefix(i)}.{name}": tuple(walk.linears(i)[name].weight.shape) for i in range(len(walk)) for name in walk.chosen(i)}
    if shapes.keys() != names:
        raise OutputError(f"recipe.yaml of {origin} names {len(shapes)} linears, events.jsonl tells of {len(names)}", "the same linears")
    formats.check_shapes(format, gguf_type, shapes)
    linears = stored_linears(walk, StoredCodes(origin, recipe))
    return Content(loaded, weights, tokenizer, source, dtype, linears, [*walk.layout.ignored, *sorted(walk.excluded)])


def _check_target(origin: Path, target: Path) -> None:
    """The output directory must be absent, empty, or an earlier export."""
    if target.is_dir() and (target / rundir.FOLDER / RECORD).is_file() and target.resolve() != origin.resolve():
        return
    if rundir.begun(target) is not None:
        raise OutputError(f"{target} holds a run", "a new or empty directory, or an earlier export", "Choose another output directory")
    rundir.check_output(target)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its place when the with statement ends well, and vanishes when it does not."""
    target = target.resolve()
    if not target.name or target.is_mount():
        raise OutputError(f"{target} cannot be replaced as a whole", "a directory within another one", "Choose another directory")
    fresh, old = (target.with_name(f".{target.name}.{word}") for word in ("new", "old"))
    if old.exists() and not target.exists():  # killed between the two renames
        old.rename(target)
    for left in (fresh, old):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        try:
            fresh.mkdir(parents=True)
        except OSError as error:
            raise OutputError(f"{fresh} cannot be made: {error.strerror}", "a writable directory", "Choose another directory") from error
        yield fresh
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
