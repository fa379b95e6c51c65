"""The demonstration: one small real model, three methods, one table. Uses the two commands that a user would use."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import ROOT, demo_model, describe

METHODS = ("rtn", "gptq", "bakron")


def main() -> int:
    """Quantize, evaluate, print the table; 1 if bakron's KL is not the lowest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="replaced if it exists")
    parser.add_argument("--levels", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=32, help="calibration sequences of 512 tokens")
    parser.add_argument("--windows", type=int, default=12, help="evaluation windows of 512 tokens")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    flags = parser.parse_args()
    start = time.perf_counter()
    model = str(demo_model())
    shutil.rmtree(flags.out, ignore_errors=True)
    flags.out.mkdir(parents=True)
    rows = {"original": {"bits_per_weight": 32.0, **_evaluate(model, flags.out / "original.json", flags.windows)}}
    for method in METHODS:
        out = flags.out / method
        calibration = [] if method == "rtn" else ["--sequences", str(flags.sequences)]
        _bakron("quantize", model, str(out), "--method", method, "--levels", str(flags.levels), *calibration)
        summary = json.loads((out / "bakron" / "summary.json").read_text())
        rows[method] = {
            "bits_per_weight": summary["bits_per_weight"],
            **_evaluate(str(out), flags.out / f"{method}.json", flags.windows, "--reference", model),
            "seconds": summary["seconds"]["total"],
            "core_share": summary["core_share"],
        }
    print(table(rows))
    _bakron("report", *(str(flags.out / method) for method in rows if method != "original"), "--out", str(flags.out / "report.html"))
    print(f"{time.perf_counter() - start:.0f} s in all; checkpoints and report.html in {flags.out}")
    if flags.json:
        flags.json.write_text(json.dumps({"machine": describe(), "settings": _settings(flags), "rows": rows}, indent=1) + "\n")
    return int(rows["bakron"]["kl"] != min(rows[method]["kl"] for method in METHODS))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| model | bits per weight | perplexity | KL, nats | agreement | seconds | core share |", "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        kl, agreement = (f"{row['kl']:.4f}", f"{100 * row['agreement']:.1f} %") if row["kl"] is not None else ("", "")
        seconds, share = (f"{row['seconds']:.0f}", f"{100 * row['core_share']:.1f} %") if "seconds" in row else ("", "")
        lines.append(f"| {name} | {row['bits_per_weight']:.2f} | {row['perplexity']:.2f} | {kl} | {agreement} | {seconds} | {share} |")
    return "\n".join(lines)


def _settings(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": demo_model().name,
        "levels": flags.levels,
        "data": "builtin",
        "sequences": flags.sequences,
        "windows": flags.windows,
        "length": 512,
    }


def _evaluate(model: str, file: Path, windows: int, *more: str) -> dict[str, Any]:
    _bakron("evaluate", model, "--sequences", str(windows), "--json", str(file), *more)
    return json.loads(file.read_text())


def _bakron(*arguments: str) -> None:
    print(f"$ bakron {' '.join(arguments)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", "bakron", *arguments]).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
