"""`make bench-peers`: llm-compressor's one-sided GPTQ against bakron's `gptq` and `bakron` (gradients and all): same model, tokens and machine, one run.

Each quantizes in a process of its own, from a Hugging Face directory to a Hugging Face directory. Wall seconds and peak memory are those of the whole process, as
the kernel counts them. Methods take turns, `--repeats` times, and the median counts. KL divergence and perplexity of all are measured here, on text that none
has seen.
Writes benchmarks/results/peers.json with `--json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import plugins
from machine import ROOT, demo_model, describe

import bakron

PEER = "llm-compressor GPTQ"
OURS = {"bakron gptq": "gptq", "bakron": "bakron"}
STARTER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "peak_memory_bytes": peak}))
sys.exit(code)
"""


def measured(command: list[Any], log: Path) -> dict[str, float]:
    """Run a command to its end: wall seconds, and the largest resident set of it in bytes.

    It is started by a small process: the system counts as a process' own what the one that started it had in memory at that time.
    """
    quiet = {"LLM_COMPRESSOR_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        run = subprocess.run(
            [sys.executable, "-S", "-c", STARTER, *map(str, command)], stdout=subprocess.PIPE, stderr=out, text=True, env=os.environ | quiet
        )
    if run.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))} ended with {run.returncode}:\n{log.read_text()[-4000:]}")
    return dict(json.loads(run.stdout))


def command(name: str, flags: argparse.Namespace, model: Path, tokens: Path, out: Path) -> list[Any]:
    """How a method is run. Both sides get the same windows of the same text: bakron makes them from text and seed, llm-compressor reads them from a file."""
    if name == PEER:
        child = Path(__file__).with_name("peers_oneshot.py")
        return [flags.python, child, model, tokens, out, flags.bits, flags.group, json.dumps({"name": "GPTQModifier"}), "--no-reload"]
    settings = {
        "method": OURS[name],
        "bits": flags.bits,
        "group-size": flags.group,
        "data": flags.calibration,
        "sequences": flags.sequences,
        "length": flags.length,
        "seed": 0,
    }
    return [
        sys.executable,
        "-m",
        "bakron",
        "quantize",
        model,
        out,
        "--quiet",
        *(x for key, value in settings.items() for x in (f"--{key}", value)),
    ]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Rows as a Markdown table, with seconds and memory as shares of the peer's."""
    lines = ["| | seconds | of the peer's | peak memory, GiB | of the peer's | KL, nats | perplexity |", "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        time_, memory = row["seconds"] / rows[PEER]["seconds"], row["peak_memory_bytes"] / rows[PEER]["peak_memory_bytes"]
        lines.append(
            f"| {name} | {row['seconds']:.0f} | {time_:.2f} | {row['peak_memory_bytes'] / 2**30:.2f} | {memory:.2f} | {row['kl']:.4f} | {row['perplexity']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, print; 1 if `gptq` took longer or more memory than the peer, or `bakron` more than three times as long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", required=True, help="text file")
    parser.add_argument("--evaluation", required=True, help="text file")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", type=Path, default=plugins.PEERS, help="of the environment that has llm-compressor")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out" / "peers", help="replaced if it exists")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    flags = parser.parse_args()
    shutil.rmtree(flags.out, ignore_errors=True)
    model, tokens = plugins.prepare(flags.out, flags.calibration, flags.sequences, flags.length)
    runs: dict[str, list[dict[str, float]]] = {PEER: [], **{name: [] for name in OURS}}
    for repeat in range(flags.repeats):
        for name, found in runs.items():
            out = flags.out / name.replace(" ", "-")
            shutil.rmtree(out, ignore_errors=True)
            found.append(measured(command(name, flags, model, tokens, out), flags.out / "log.txt"))
            print(f"{name}, run {repeat + 1}: {found[-1]['seconds']:.0f} s, {found[-1]['peak_memory_bytes'] / 2**30:.2f} GiB", flush=True)
    rows = {}
    for name, found in runs.items():
        quality = bakron.evaluate(
            flags.out / name.replace(" ", "-"), reference=model, data=flags.evaluation, length=flags.length, sequences=flags.windows
        )
        rows[name] = {key: statistics.median(run[key] for run in found) for key in found[0]} | {"runs": found} | quality
    print(table(rows))
    if flags.json:
        setting = {
            "model": demo_model().name,
            "bits": flags.bits,
            "group_size": flags.group,
            "calibration": f"{Path(flags.calibration).name}, {flags.sequences} x {flags.length} tokens",
            "evaluation": f"{Path(flags.evaluation).name}, {flags.windows} x {flags.length} tokens",
        }
        flags.json.write_text(json.dumps({"setting": setting, "machine": describe(), "rows": rows}, indent=1) + "\n")
    peer, plain, full = rows[PEER], rows["bakron gptq"], rows["bakron"]
    late = plain["seconds"] > peer["seconds"] or full["seconds"] > 3 * peer["seconds"]
    return int(late or plain["peak_memory_bytes"] > peer["peak_memory_bytes"])


if __name__ == "__main__":
    sys.exit(main())
