"""The README says what the code does and prints what the results say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
README = (ROOT / "README.md").read_text("utf-8")


def test_the_tables_are_those_of_the_result_files() -> None:
    import readme

    assert {"demo", "hessian", "quality", "solver"} <= set(readme.tables()) <= {"demo", "hessian", "quality", "solver", "plugins", "peers"}
    for page in readme.PAGES:
        text = page.read_text("utf-8")
        assert readme.filled(text) == text, "run python benchmarks/readme.py"
        assert all(f"<!-- {marker} -->\n|" in text for marker in readme.tables() if f"<!-- {marker} -->" in text)
    together = "".join(page.read_text("utf-8") for page in readme.PAGES)
    assert all(f"<!-- {marker} -->" in together for marker in readme.tables())


def test_the_library_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["bakron"].certify(names["solution"].values, names["W"], names["kron"], names["grid"]).violations == 0


def test_every_make_target_and_flag_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"README names make {target}"
    from bakron.config import Recipe

    known = {name.replace("_", "-") for name in Recipe.model_fields} | {"reference", "recipe", "data", "json"}
    for flag in set(re.findall(r"`--([a-z-]+)", README)):
        assert flag.removeprefix("no-") in known, f"README names --{flag}"
