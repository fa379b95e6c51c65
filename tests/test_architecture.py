import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import bakron

HEAVY = {"torch", "transformers", "numba", "datasets", "accelerate", "safetensors", "numpy", "pydantic", "yaml", "typer", "rich"}
PACKAGE = Path(bakron.__file__).parent


def in_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(
    "module, allowed",
    [
        ("bakron", set()),
        ("bakron.errors", set()),
        ("bakron.config", {"pydantic"}),
        ("bakron.data", set()),
        ("bakron.cli", {"pydantic", "typer", "rich", "yaml"}),
    ],
)
def test_import_is_light(module, allowed):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    loaded = set(in_fresh_python(f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})").split())
    assert loaded & HEAVY <= allowed


@pytest.mark.parametrize("name", bakron.__all__)
def test_public_name_resolves(name):
    value = getattr(bakron, name)
    assert value is getattr(importlib.import_module(bakron._ROOM_OF[name]), name)


def test_all_names_are_listed():
    assert set(bakron._ROOM_OF) == set(bakron.__all__) <= set(dir(bakron))
    assert bakron.__version__.count(".") == 2


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'bakron' has no attribute 'quantise'"):
        bakron.quantise  # noqa: B018


def test_no_public_name_is_also_a_module():
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert modules.isdisjoint(bakron.__all__), "importing the module would hide the public name"


def test_every_module_says_what_it_is():
    silent = [path for path in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert silent == []


def test_no_room_for_leftovers():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in {"utils", "common", "core", "helpers", "misc"}]
