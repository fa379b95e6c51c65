"""What each checkpoint format can hold, as a table: recipes are checked against it before a run, stored codes before they are written in another format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bakron.errors import RecipeError


@dataclass(frozen=True)
class Holds:
    """The grids of a format.

    Attributes:
        levels: The most levels, by whether they lie symmetrically; a kind that is missing cannot be held.
        group: A group size must be a multiple of this,
        width: a layer's inputs of this,
        height: and its outputs of this.
        scale: Dtype of scales; None = that of the model.
        form: How a scale is stored, a name in `bakron.grids.FORMATS`; "super63" and "super15": with an offset, see `bakron.grids.OffsetGrid`.
        beside: Bits per group for scale and zero point or offset, where scales are themselves quantized.
    """

    levels: Mapping[bool, int]
    group: int = 1
    width: int = 1
    height: int = 1
    scale: str | None = None
    form: str = "float"
    beside: float | None = None


ANY = {True: 256, False: 256}
FORMATS: dict[str, Holds] = {
    "compressed-tensors": Holds(ANY),
    "gptq": Holds(ANY, 1, 32, 32, scale="float16"),
    "packed": Holds(ANY),
    "dense": Holds(ANY),
}
GGUF_TYPES: dict[str, Holds] = {  # in blocks of 32 or 256 inputs
    "q4_0": Holds({True: 16}, 32, 32, scale="float16"),
    "q4_1": Holds({False: 16}, 32, 32, scale="float16", form="float7"),
    "q8_0": Holds({True: 256}, 32, 32, scale="float16"),
    "q3_k": Holds({True: 8}, 16, 256, scale="float32", form="int6", beside=7),
    "q6_k": Holds({True: 64}, 16, 256, scale="float32", form="int8", beside=9),
    "q2_k": Holds({False: 4}, 16, 256, scale="float32", form="super15", beside=10),
    "q4_k": Holds({False: 16}, 32, 256, scale="float32", form="super63", beside=16),
}


def holds(format: str, gguf_type: str | None) -> Holds:
    """The row of a format, or of a type of GGUF tensors."""
    return GGUF_TYPES[gguf_type] if gguf_type is not None else FORMATS[format]


def gguf_type_of(levels: int, symmetric: bool) -> str:
    """The smallest simple GGUF type for a grid.

    Raises:
        RecipeError: None has zero points and that many levels.
    """
    for name in ("q4_0", "q4_1", "q8_0"):
        if levels <= GGUF_TYPES[name].levels.get(symmetric, 0):
            return name
    raise RecipeError(f"{levels} levels with zero points in format gguf", "at most 16 levels", "Use --levels 16, or symmetric levels")


def check(format: str, gguf_type: str | None, levels: int, symmetric: bool, group_size: int | None) -> None:
    """Refuse a grid that a format cannot hold.

    Args:
        format: Name of the format.
        gguf_type: Its tensor type, for gguf only.
        levels: Number of levels.
        symmetric: No zero points.
        group_size: Inputs per scale; None = the whole row.

    Raises:
        RecipeError: With the nearest setting that it can hold.
    """
    row = holds(format, gguf_type)
    name = f"format {format}" + (f", type {gguf_type}" if gguf_type else "")
    if symmetric not in row.levels:
        kind = "no zero points: --symmetric" if not symmetric else "zero points: --asymmetric"
        raise RecipeError(f"{'symmetric' if symmetric else 'asymmetric'} levels in {name}", f"levels with {kind}")
    if levels > row.levels[symmetric]:
        raise RecipeError(f"{levels} levels in {name}", f"at most {row.levels[symmetric]}", f"Use --levels {row.levels[symmetric]}")
    if row.beside is not None and group_size != row.group and not row.levels.get(True):
        raise RecipeError(f"group size {group_size or -1} in {name}", f"{row.group}", f"Use --group-size {row.group}")
    if group_size is not None and group_size % row.group:
        near = max(row.group, round(group_size / row.group) * row.group)
        raise RecipeError(f"group size {group_size} in {name}", f"a multiple of {row.group}", f"Use --group-size {near}")


def check_shapes(format: str, gguf_type: str | None, shapes: Mapping[str, tuple[int | None, int]]) -> None:
    """Refuse layers whose size does not fit a format's blocks.

    Args:
        format: Name of the format.
        gguf_type: Its tensor type, for gguf only.
        shapes: Outputs (None = not known yet) and inputs by name of a linear, or of several.

    Raises:
        RecipeError: The first that does not fit.
    """
    row = holds(format, gguf_type)
    name = f"format {format}" + (f", type {gguf_type}" if gguf_type else "")
    for linear, (m, n) in shapes.items():
        for size, what, unit in ((n, "inputs", row.width), (m, "outputs", row.height)):
            if size is not None and size % unit:
                other = "Use --gguf-type q4_0, q4_1 or q8_0" if unit == 256 and size % 32 == 0 else "Use --format compressed-tensors"
                raise RecipeError(f"the {size} {what} of {linear} in {name}", f"a multiple of {unit}", other)
