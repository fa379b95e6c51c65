"""What a recipe leaves open, and what it refuses: choices that contradict each other, and choices that would do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bakron import formats
from bakron.errors import RecipeError

if TYPE_CHECKING:
    from bakron.config import Recipe

OF_HESSIANS = (  # fields that rounding to nearest does not heed
    "hessian", "factor", "damping", "damp_a", "damp_b", "inputs", "diagnostics", "skip_first", "order", "refit", "polish", "accumulate",
)  # fmt: skip
OF_GRADIENTS = ("factors", "labels", "samples", "clip", "gate", "boundary_memory")  # fields that only a gradient pass heeds
LOCAL_FACTORS = ("kfac", "shampoo", "mixed")  # those that local Hessians know
DAMPINGS = {"damp_a": (0.1, 0.03, 0.3), "damp_b": (1.0, 0.3, 3.0)}  # the default, and what else auto tries


def filled(recipe: Recipe) -> dict[str, Any]:
    """Values of the fields that a recipe leaves open and that have a meaning for its method.

    Args:
        recipe: One that `refuse` lets pass.

    Raises:
        RecipeError: Levels and bits contradict each other, or the format cannot hold the levels.
    """
    levels, bits = _levels(recipe.levels, recipe.bits)
    formats.check(recipe.format, recipe.gguf_type, levels, recipe.symmetric, recipe.group_size)
    found: dict[str, Any] = {
        "levels": levels,
        "bits": bits,
        "scale": recipe.scale or ("absmax" if recipe.method == "rtn" else "curvature"),
    }
    if recipe.method != "rtn":
        found["hessian"] = recipe.hessian or ("input" if recipe.method == "gptq" else "backprop")
        found["damping"] = recipe.damping or "diagonal"
        found["order"] = recipe.order or "natural"
        found["accumulate"] = recipe.accumulate or "float32"
        found["damp_a"] = DAMPINGS["damp_a"][0] if recipe.damp_a is None else recipe.damp_a
        if found["hessian"] != "input":
            found["factor"] = recipe.factor or "mixed"
        if found["hessian"] == "backprop":
            found["labels"] = recipe.labels or "sampled"
            found["samples"] = recipe.samples or 1
        found["inputs"] = recipe.inputs or ("original" if recipe.factor == "sequence" else "quantized")
    if recipe.method == "bakron":
        found["damp_b"] = DAMPINGS["damp_b"][0] if recipe.damp_b is None else recipe.damp_b
    return found


def open_for_gguf(recipe: Recipe) -> dict[str, Any]:
    """What a GGUF type settles that was not given: levels, kind and group size; or the type that these settle."""
    if recipe.gguf_type is None:
        return {"gguf_type": formats.gguf_type_of(_levels(recipe.levels, recipe.bits)[0], recipe.symmetric)}
    row = formats.GGUF_TYPES[recipe.gguf_type]
    settled: dict[str, Any] = {"symmetric": True in row.levels, "group_size": row.group}
    if recipe.levels is None and recipe.bits is None:
        settled["levels"] = max(row.levels.values())
    return {name: value for name, value in settled.items() if name not in recipe.model_fields_set or name == "levels"}


def _levels(levels: int | None, bits: int | None) -> tuple[int, int | None]:
    if levels is not None and bits is not None and levels != 2**bits:
        raise RecipeError(f"levels is {levels} and bits is {bits}, which means {2**bits} levels", do="Give one of the two")
    levels = levels or 2 ** (bits or 4)
    return levels, levels.bit_length() - 1 if levels >= 4 and levels & (levels - 1) == 0 else None


def refuse(recipe: Recipe) -> None:
    """Refuse choices that contradict each other or would do nothing.

    Args:
        recipe: Without a preset for its method.

    Raises:
        RecipeError: The first of them.
    """
    method = recipe.method
    given = [
        name for name in (*OF_HESSIANS, "memory", *OF_GRADIENTS) if getattr(recipe, name) is not None and getattr(recipe, name) is not False
    ]
    if method == "rtn" and given:
        raise RecipeError(
            f"{_and(given)} would do nothing with method rtn, which rounds without a Hessian",
            do=f"Drop {_and(given)}, or choose another method",
        )
    if method == "rtn" and recipe.scale == "curvature":
        raise RecipeError("scale is curvature, but method rtn has no Hessian to take curvature from", "scale absmax or mse")
    if method == "bakron" and recipe.hessian == "input":
        raise RecipeError(
            "method bakron with hessian input has no output factor, so it would be GPTQ",
            "hessian backprop",
            do="For GPTQ choose method gptq",
        )
    hessian = recipe.hessian or ("backprop" if method == "bakron" else "input")
    useless = {"input": ("factor", *OF_GRADIENTS), "backprop": ()}.get(hessian, OF_GRADIENTS)
    if idle := [name for name in useless if name in given]:
        raise RecipeError(
            f"{_and(idle)} would do nothing with hessian {hessian}, which takes no gradients",
            do=f"Drop {_and(idle)}, or choose hessian backprop",
        )
    if hessian.endswith("-local") and recipe.factor not in (None, *LOCAL_FACTORS):
        raise RecipeError(
            f"factor {recipe.factor} with hessian {hessian}",
            f"{', '.join(LOCAL_FACTORS[:-1])} or {LOCAL_FACTORS[-1]}",
            "For other factorisations choose hessian backprop",
        )
    if recipe.labels == "empirical" and (recipe.samples or 1) > 1:
        raise RecipeError(
            f"samples {recipe.samples} with labels empirical, of which a token has one", "samples 1", "Or choose labels sampled"
        )
    if recipe.clip is not None and recipe.factor == "kfac":
        raise RecipeError("clip would do nothing with factor kfac, which weighs all tokens alike", do="Drop clip, or choose another factor")
    if recipe.factor == "sequence" and recipe.inputs == "quantized":
        raise RecipeError(
            "inputs is quantized, but factor sequence takes inputs and gradients together, both of the original model",
            "inputs original",
        )
    if recipe.gate and method == "gptq":
        raise RecipeError(
            "gate would do nothing with method gptq, which has no output factor to choose", do="Drop gate, or choose method bakron"
        )
    if recipe.autos and hessian != "backprop":
        raise RecipeError(
            f"{_and(recipe.autos)} auto with hessian {hessian}, which leaves no gradients to choose by",
            "a number",
            "Or choose hessian backprop",
        )
    if recipe.chooses and recipe.sequences < 3:
        raise RecipeError(f"{_chooser(recipe)} with sequences {recipe.sequences}, two of which it would hold out", "at least 3 sequences")
    if method == "gptq" and "damp_b" in given:
        raise RecipeError(
            "damp_b would do nothing with method gptq, whose output factor is the identity", do="Drop damp_b, or choose method bakron"
        )
    if recipe.gguf_type is not None and recipe.format != "gguf":
        raise RecipeError(
            f"gguf_type {recipe.gguf_type} with format {recipe.format}", "format gguf", "Drop gguf_type, or choose format gguf"
        )
    if recipe.refit and formats.holds(recipe.format, recipe.gguf_type).form != "float":
        raise RecipeError(
            f"refit with gguf_type {recipe.gguf_type}, whose scales are no free choice", "gguf_type q4_0 or q8_0", "Drop refit"
        )


def _chooser(recipe: Recipe) -> str:
    return "gate" if recipe.gate else f"{recipe.autos[0]} auto"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
