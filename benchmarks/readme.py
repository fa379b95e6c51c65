"""Write the tables of the README and of the solver's page from the files in results/; a test checks that they are the same."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import demo
import quality
from machine import RESULTS, ROOT

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    ROOT / "bakron" / "solver" / "README.md",
    ROOT / "bakron" / "hessian" / "README.md",
    DOCS / "how-to" / "plug-in.md",
    DOCS / "explanation" / "gains.md",
)


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
    if (RESULTS / "solver.json").exists():
        found["solver"] = solver_table(json.loads((RESULTS / "solver.json").read_text()))
    if (RESULTS / "quality.json").exists():
        found["quality"] = quality.table(json.loads((RESULTS / "quality.json").read_text()))
    if (RESULTS / "hessian.json").exists():
        found["hessian"] = hessian_table(json.loads((RESULTS / "hessian.json").read_text()))
    if (RESULTS / "plugins.json").exists():
        found["plugins"] = plugins_table(json.loads((RESULTS / "plugins.json").read_text()))
    if (RESULTS / "peers.json").exists():
        found["peers"] = peers_table(json.loads((RESULTS / "peers.json").read_text()))
    return found


def hessian_table(result: dict[str, Any]) -> str:
    """Means over seeds; seconds are those of the Hessians after the gradient pass, beside those of the pass where this row had to make it."""
    rows = result["rows"]
    levels = sorted({row["levels"] for row in rows})
    lines = [
        "| setting | seeds | "
        + " | ".join(f"{n} levels: KL | perplexity | held-out error" for n in levels)
        + " | Hessians, s | peak memory, GB |"
    ]
    lines.append("|---" * (4 + 3 * len(levels)) + "|")
    for name in dict.fromkeys(row["row"] for row in rows):
        mine, cells = [row for row in rows if row["row"] == name], []
        for n in levels:
            found = [row for row in mine if row["levels"] == n]
            mean = lambda key, found=found: statistics.mean(row[key] for row in found)  # noqa: E731
            cells.append(f"{mean('kl'):.3f} | {mean('perplexity'):.1f} | {mean('heldout_error'):.3f}" if found else "- | - | -")
        seconds = statistics.mean(row["seconds"]["hessian"] for row in mine)
        passed = max(row["seconds"]["gradient pass, if not shared"] for row in mine)
        lines.append(
            f"| {name} | {len({row['seed'] for row in mine})} | {' | '.join(cells)} | {seconds:.0f}{f' + {passed:.0f}' if passed > 1 else ''} | "
            f"{max(row['peak_memory_gb'] for row in mine):.1f} |"
        )
    setting, machine = result["setting"], result["machine"]
    lines.append(
        f"\n{setting['model']}, group {setting['group_size']}; calibration {setting['calibration']}, evaluation {setting['evaluation']}; "
        f"on {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}."
    )
    return "\n".join(lines)


def peers_table(result: dict[str, Any]) -> str:
    """Whole processes, one beside the other."""
    setting = result["setting"]
    lines = ["| | seconds | peak memory, GiB | KL, nats | perplexity |", "|---|---|---|---|---|"]
    for name, row in result["rows"].items():
        lines.append(
            f"| {name} | {row['seconds']:.0f} | {row['peak_memory_bytes'] / 2**30:.2f} | {row['kl']:.4f} | {row['perplexity']:.2f} |"
        )
    lines.append(
        f"\n{setting['bits']} bits, group {setting['group_size']}; calibration {setting['calibration']}, evaluation {setting['evaluation']}."
    )
    return "\n".join(lines)


def plugins_table(result: dict[str, Any]) -> str:
    """Modifiers of llm-compressor beside each other."""
    lines = ["| modifier | bits | KL, nats | perplexity | agreement |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        lines.append(f"| {row['row']} | {row['bits']} | {row['kl']:.4f} | {row['perplexity']:.2f} | {100 * row['agreement']:.1f} % |")
    setting = result["setting"]
    lines.append(
        f"\n{setting['model']}, group {setting['group_size']}; calibration {setting['calibration']}, evaluation {setting['evaluation']}."
    )
    return "\n".join(lines)


def solver_table(result: dict[str, Any]) -> str:
    """Medians of one run: seconds of the product, and every other row as a multiple of it."""
    rows = {(row["m"], row["n"], row["name"]): row for row in result["rows"]}
    shapes = list(dict.fromkeys((row["m"], row["n"]) for row in result["rows"]))
    names = list(dict.fromkeys(row["name"] for row in result["rows"] if row["name"] != "product"))
    lines = ["| m x n | product, s | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for m, n in shapes:
        ratios = [f"{rows[m, n, name]['ratio']:.2f}" if (m, n, name) in rows else "" for name in names]
        lines.append(f"| {m} x {n} | {rows[m, n, 'product']['seconds']:.4f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The README with its tables as the results have them."""
    for marker, table in tables().items():
        text = re.sub(
            rf"<!-- {marker} -->\n.*?<!-- /{marker} -->", f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->", text, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    for readme in PAGES:
        readme.write_text(filled(readme.read_text("utf-8")), "utf-8")
