"""Memory of a run as the model grows deeper, beside its own size and what `bakron plan` said: random Llama models of 4, 8, 16 and 32 equal blocks.

    python benchmarks/pipeline.py [--blocks 4,8,16,32] [--hidden 1024] [--method bakron]

Every run and every plan is a process of its own; the peak is its largest resident set. Boundaries, the block inputs kept for the gradient pass, grow with depth and
are shown; the rest must not. Without verification, which loads the whole export where that fits into half of the free memory. At the end, wall seconds of the
smallest model by one process and by two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

import torch  # noqa: E402
from machine import RESULTS, ROOT, describe  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import save_tiny  # noqa: E402

FLAT, NEAR, TIME = 0.10, 0.15, 1.5  # how much the peak may grow with depth, differ from the plan; factor of the time


def main() -> None:
    """Measure, print a table, write benchmarks/results/pipeline.json, and say what does not hold."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--blocks", default="4,8,16,32")
    flags.add_argument("--hidden", type=int, default=1024)
    flags.add_argument("--method", default="bakron")
    flags.add_argument("--sequences", type=int, default=8)
    flags.add_argument("--length", type=int, default=64)
    flags.add_argument("--json", type=Path, default=RESULTS / "pipeline.json")
    given = flags.parse_args()
    settings = {"method": given.method, "levels": 7, "group_size": 32, "sequences": given.sequences, "length": given.length, "batch": 4}
    rows = []
    print(f"{'blocks':>6} {'model':>9} {'peak':>9} {'planned':>9} {'boundaries':>10} {'seconds':>8} {'planned':>8}  disk as planned")
    for blocks in map(int, given.blocks.split(",")):
        with tempfile.TemporaryDirectory(prefix="bakron-pipeline-") as place:
            rows.append(measure(Path(place), blocks, given.hidden, settings))
        one = rows[-1]
        print(
            f"{blocks:6} {one['model'] / 1e6:6.0f} MB {one['peak'] / 1e6:6.0f} MB {one['planned_peak'] / 1e6:6.0f} MB {one['boundaries'] / 1e6:7.1f} MB "
            f"{one['seconds']:8.0f} {one['planned_seconds']:8.0f}  {one['disk'] == one['planned_disk']}",
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix="bakron-pipeline-") as place:
        together = several(Path(place), rows[0]["blocks"], given.hidden, settings | {"sequences": 16, "length": 128})
    for one in together:
        print(
            f"{one['processes']} processes of one thread each, {rows[0]['blocks']} blocks: {one['wall']:.0f} s, {one['differing_codes']} codes differ"
        )
    failures = judge(rows) + [f"{one['differing_codes']} codes differ between processes" for one in together if one["differing_codes"]]
    record = {
        "machine": describe(),
        "settings": settings,
        "hidden": given.hidden,
        "rows": rows,
        "processes": together,
        "failures": failures,
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for failure in failures:
        print(failure)
    raise SystemExit(bool(failures))


def measure(place: Path, blocks: int, hidden: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A model, its plan and its run, in processes of their own."""
    arguments = prepare(place, blocks, hidden, settings)
    planned = bakron("plan", arguments, place / "plan.json")
    start = time.perf_counter()
    summary = bakron("quantize", arguments, place / "summary.json")
    wall = time.perf_counter() - start
    kept = (summary["gradient_pass"] or {}).get("bytes", 0)
    return {
        "blocks": blocks,
        "model": (place / "model" / "model.safetensors").stat().st_size,
        "peak": summary["peak_memory_bytes"],
        "planned_peak": planned["memory"]["peak"],
        "planned_memory": planned["memory"],
        "boundaries": kept,
        "seconds": summary["seconds"]["total"],
        "wall": round(wall, 1),
        "planned_seconds": planned["seconds"]["total"],
        "stages": summary["seconds"],
        "planned_stages": planned["seconds"],
        "disk": sum(file.stat().st_size for file in (place / "out").glob("*.safetensors")),
        "planned_disk": planned["disk"]["checkpoint"],
        "passes": summary["passes"],
        "planned_passes": planned["passes"],
    }


def prepare(place: Path, blocks: int, hidden: int, settings: dict[str, Any]) -> list[str]:
    """A model and a text in a directory; the arguments of a run on them."""
    heads = hidden // 64
    shape = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": heads, "num_key_value_heads": heads}
    save_tiny(place / "model", "llama", num_hidden_layers=blocks, initializer_range=0.02, **shape)
    (place / "text.txt").write_text(
        "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(400))
    )
    arguments = [str(place / "model"), str(place / "out"), "--data", str(place / "text.txt"), "--quiet", "--no-verify"]
    return arguments + [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]


def several(place: Path, blocks: int, hidden: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Wall seconds of the same run by one process and by two (gloo), of one thread each, in the deterministic mode, and how many codes differ."""
    model, out, *rest = prepare(place, blocks, hidden, settings | {"accumulate": "float64", "precision": "float32"})
    found: list[dict[str, Any]] = []
    codes: list[list[torch.Tensor]] = []
    for processes in (1, 2):
        start = time.perf_counter()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "bakron"]
        run([*launch, "quantize", model, f"{out}{processes}", *rest], OMP_NUM_THREADS="1")
        wall = time.perf_counter() - start
        files = [load_file(file) for file in sorted((Path(f"{out}{processes}") / "bakron" / "codes").glob("*.safetensors"))]
        codes.append([tensor for file in files for name, tensor in sorted(file.items()) if name.endswith(".codes")])
        differing = sum(int((one != other).sum()) for one, other in zip(codes[0], codes[-1], strict=True))
        found.append(
            {"processes": processes, "wall": round(wall, 1), "differing_codes": differing, "codes": sum(one.numel() for one in codes[-1])}
        )
    return found


def bakron(command: str, arguments: list[str], result: Path) -> dict[str, Any]:
    """What a command writes with --json."""
    run([sys.executable, "-m", "bakron", command, *arguments, "--json", str(result)])
    return dict(json.loads(result.read_text("utf-8")))


def run(command: list[str], **environment: str) -> None:
    """Run a command on this checkout to its end."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment}, check=True, stdout=subprocess.DEVNULL
    )


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold of what the documents claim."""
    found = []
    rest = [row["peak"] - row["boundaries"] for row in rows]
    if max(rest) > (1 + FLAT) * min(rest):
        found.append(f"the peak without boundaries grows from {min(rest):,} to {max(rest):,} bytes")
    if rows[-1]["blocks"] >= 32 and rows[-1]["peak"] >= rows[-1]["model"]:
        found.append(f"the peak of {rows[-1]['peak']:,} bytes is above the model's own {rows[-1]['model']:,}")
    for row in rows:
        if abs(row["planned_peak"] - row["peak"]) > NEAR * row["peak"]:
            found.append(f"{row['blocks']} blocks: a peak of {row['peak']:,} bytes, planned {row['planned_peak']:,}")
        if row["disk"] != row["planned_disk"]:
            found.append(f"{row['blocks']} blocks: a checkpoint of {row['disk']:,} bytes, planned {row['planned_disk']:,}")
        if row["passes"] != row["planned_passes"]:
            found.append(f"{row['blocks']} blocks: passes {row['passes']}, planned {row['planned_passes']}")
        if not 1 / TIME <= row["seconds"] / row["planned_seconds"] <= TIME:
            found.append(f"{row['blocks']} blocks: {row['seconds']:.0f} s, planned {row['planned_seconds']:.0f} s")
    return found


if __name__ == "__main__":
    main()
