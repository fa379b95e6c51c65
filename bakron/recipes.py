"""Recipes as people write them: plain values and YAML files made into recipes, with every mistake in them named, and the other way round."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pydantic

from bakron.config import FACTOR_FORMS, Recipe
from bakron.errors import RecipeError
from bakron.resolution import DAMPINGS

SIZE_LIMIT = 1 << 16  # bytes of a recipe file
DEPTH_LIMIT = 8  # of lists and mappings in a recipe file
SHOWN = 200  # characters of a wrong value in a message


def allowed(name: str) -> str:
    """Say in words what values a field takes, for error messages and help.

    Args:
        name: A field of `Recipe`.
    """
    if name == "group_size":
        return "a whole number of at least 1, or -1 for one scale per row"
    if name == "factor":
        return f"{', '.join(FACTOR_FORMS[:-1])} or {FACTOR_FORMS[-1]} (K = 1 to 99 steps)"
    if name in ("include", "exclude"):
        return "patterns separated by commas"
    if name in ("boundary_memory", "memory"):
        return "a size such as 800MB or 4GB"
    if name in DAMPINGS:
        return "a number of at least 0, or auto"
    field = Recipe.model_fields[name]
    kind = field.annotation
    if get_origin(kind) in (UnionType, Union):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return " or ".join([", ".join(get_args(kind)[:-1]), get_args(kind)[-1]])
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text that is not empty"}[kind]  # type: ignore[index]
    if name == "clip":
        return "a number between 0 and 1"
    low = next((part.ge for part in field.metadata if hasattr(part, "ge")), None)
    high = next((part.le for part in field.metadata if hasattr(part, "le")), None)
    if low is None:
        return words
    return f"{words} of at least {low}" if high is None else f"{words} from {low} to {high}"


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """Make a recipe from plain values.

    Args:
        values: Field names and values; fields left out keep their defaults.

    Returns:
        The recipe, not resolved yet.

    Raises:
        RecipeError: A key is unknown or a value is not allowed; all of them are named at once.
    """
    try:
        return Recipe.model_validate(dict(values))
    except pydantic.ValidationError as error:
        problems = {str(part["loc"][0]): part for part in error.errors(include_url=False)}
    lines = [_unknown(key) if part["type"] == "extra_forbidden" else _wrong(key, part["input"]) for key, part in problems.items()]
    if len(lines) == 1:
        saw, expected, do = lines[0]
        raise RecipeError(saw, expected, do)
    raise RecipeError(f"{len(lines)} entries of the recipe are wrong:\n" + "\n".join(f"  {RecipeError(*line)}" for line in lines))


def _unknown(key: str) -> tuple[str, str | None, str | None]:
    near = difflib.get_close_matches(key.replace("-", "_"), list(Recipe.model_fields), n=1)
    return f"unknown key {key!r}", None, f"Perhaps {near[0]} is meant" if near else f"Known keys: {', '.join(Recipe.model_fields)}"


def _wrong(key: str, value: object) -> tuple[str, str | None, str | None]:
    words = allowed(key)
    near = difflib.get_close_matches(str(value), words.replace(",", "").split(" "), n=1) if " or " in words else []
    return f"{key} is {_shown(value)}", words, f"Perhaps {near[0]} is meant" if near else None


def _shown(value: object) -> str:
    if isinstance(value, bool | int | float | NoneType):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else repr(value[:SHOWN]) + "..."
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else f"of type {type(value).__name__}"


def load(path: str | Path | None = None, **overrides: Any) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: The file; `None` starts from the defaults.
        overrides: Fields that win over the file's. `levels` also displaces the file's `bits`, and the other way round.

    Returns:
        The recipe, not resolved yet.

    Raises:
        RecipeError: The file cannot be read, is not YAML, is not a mapping, or says something that is not allowed.
    """
    return override({} if path is None else _values(path), overrides)


def resolved(source: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe some of whose fields are overridden, resolved.

    Args:
        source: A YAML file; plain values; or None for the defaults.
        overrides: As for `load`.

    Raises:
        RecipeError: As `load` and `Recipe.resolve`. Of settings that contradict others, those that are the source's are named as such.
    """
    where = source if isinstance(source, str | Path) else "the recipe"
    values = dict(source) if isinstance(source, Mapping) else {} if source is None else _values(source)
    recipe = override(values, overrides)
    try:
        return recipe.resolve()
    except RecipeError as error:
        blamed = set(re.findall(r"\w+", error.saw))
        names = [name for name, value in values.items() if name in blamed and name not in overrides and value not in (None, False)]
        if not (names and overrides):
            raise
        told = " and ".join(f"{name} {json.dumps(values[name])}" for name in names)
        do = f"{error.do}. " if error.do else ""
        raise RecipeError(error.saw, error.expected, f"{do}{where} says {told}: change it there, or leave that recipe out") from None


def _values(path: str | Path) -> dict[str, Any]:
    """What a file says, which must be a recipe by itself."""
    values = _read(Path(path))
    try:
        from_dict(values)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.saw}", error.expected, error.do) from None
    return values


def override(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Recipe:
    """A recipe of plain values, some of which are overridden; `levels` also displaces `bits`, and the other way round.

    Raises:
        RecipeError: As `from_dict`.
    """
    kept = dict(values)
    for one, other in (("levels", "bits"), ("bits", "levels")):
        if one in overrides and other not in overrides:
            kept.pop(other, None)
    return from_dict({**kept, **overrides})


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        path = path.expanduser()
        if path.stat().st_size > SIZE_LIMIT:
            raise RecipeError(f"{path} has {path.stat().st_size:,} bytes", f"a recipe, at most {SIZE_LIMIT:,}")
        text = path.read_text(encoding="utf-8-sig")
        _refuse_bombs(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_repeats(root)
        values = yaml.safe_load(text)
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe file {path}", do="Check the path") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: bad byte at offset {error.start}", "a YAML file") from None
    except OSError as error:
        raise RecipeError(f"the recipe file {_short(path)} cannot be read: {error.strerror}", "a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not YAML ({getattr(error, 'problem', None) or error})", "lines of the form `key: value`") from None
    except (
        ValueError,
        TypeError,
        RecursionError,
        RuntimeError,
    ) as error:  # the home of nobody, no number or date, a mapping as a key, lists in lists in lists
        raise RecipeError(f"{path} holds a value that cannot be read: {error}", "lines of the form `key: value`") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise RecipeError(f"{path}, line 1: the recipe is {kind}", "a mapping, lines of the form `key: value`")
    return {str(key): value for key, value in values.items()}


def _short(path: Path) -> str:
    return str(path) if len(str(path)) <= SHOWN else f"{str(path)[:SHOWN]}..."


def _refuse_bombs(text: str) -> None:
    """A recipe has no use for aliases and deep nesting, of which a few lines can stand for billions of values or take hours to read."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        alias = f"alias *{event.anchor} in a recipe" if isinstance(event, yaml.AliasEvent) else None
        if alias or depth > DEPTH_LIMIT:
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=alias or f"lists or mappings nested {depth} deep", problem_mark=mark)


def _refuse_repeats(root: Any) -> None:
    import yaml

    seen = set()
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else []:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key that is no word", problem_mark=key.start_mark)
        if key.value in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
        seen.add(key.value)


def dump(recipe: Recipe) -> str:
    """Write a recipe as YAML, one `key: value` line per field, in the order of `Recipe`.

    Args:
        recipe: Any recipe; save a resolved one to repeat a run exactly.
    """
    import yaml

    return yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)
