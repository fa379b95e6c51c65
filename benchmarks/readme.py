"""Write the README's tables from the files in results/; a test checks that they are the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import demo
import quality
from machine import RESULTS, ROOT


def tables() -> dict[str, str]:
    """Marker in the README -> Markdown table, for the results that exist."""
    found = {}
    if (RESULTS / "demo.json").exists():
        result = json.loads((RESULTS / "demo.json").read_text())
        settings = result["settings"]
        found["demo"] = (
            demo.table(result["rows"])
            + f"\n\n{settings['levels']} levels, group 64, calibration {settings['sequences']} x {settings['length']} tokens of `{settings['data']}`; "
            f"on {result['machine']['threads']} cores. `core share` is the solver's part of the time."
        )
    if (RESULTS / "quality.json").exists():
        found["quality"] = quality.table(json.loads((RESULTS / "quality.json").read_text()))
    return found


def filled(text: str) -> str:
    """The README with its tables as the results have them."""
    for marker, table in tables().items():
        text = re.sub(
            rf"<!-- {marker} -->\n.*?<!-- /{marker} -->", f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->", text, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text("utf-8")), "utf-8")
