"""The paper's Table 3 on this machine: every schedule beside one matrix product. Writes results/solver.json and results/solver.svg."""

import argparse
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path

import machine
import torch
from safetensors.torch import load_file, save_file

from bakron import bench
from bakron.grids import UniformGrid
from bakron.kron import Kron
from bakron.solver import certify

RESULTS = Path(__file__).parent / "results"
PEERS = machine.ROOT / ".venv-peers" / "bin" / "python"
PEER = "llm-compressor GPTQ, one-sided"
PEER_LOOP = "llm-compressor GPTQ, loop alone"  # without its factorisation of A; our sweeps are timed without ours
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d5fd3", "#e08e2b", "#555555", "#17a2a2", "#a0522d", "#111111", "#c71585")


def plot(rows: list[dict], title: str) -> str:
    """Seconds over size of the square problems, both logarithmic, as SVG."""
    square = [row for row in rows if row["m"] == row["n"]]
    names = list(dict.fromkeys(row["name"] for row in square))
    xs, ys = [math.log10(row["m"]) for row in square], [math.log10(row["seconds"]) for row in square]
    left, right, low, high = min(xs), max(max(xs), min(xs) + 0.1), math.floor(min(ys)), math.ceil(max(ys) + 1e-9)

    def place(row: dict) -> tuple[float, float]:
        x = 70 + 430 * (math.log10(row["m"]) - left) / (right - left)
        return x, 380 - 340 * (math.log10(row["seconds"]) - low) / (high - low)

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="760" height="430" font-family="sans-serif" font-size="12">',
             '<rect width="760" height="430" fill="white"/>', f'<text x="70" y="22" font-size="14">{title}</text>']  # fmt: skip
    for power in range(low, high + 1):
        y = 380 - 340 * (power - low) / (high - low)
        parts.append(
            f'<line x1="70" y1="{y:.1f}" x2="500" y2="{y:.1f}" stroke="#ddd"/><text x="62" y="{y + 4:.1f}" text-anchor="end">1e{power} s</text>'
        )
    for size in sorted({row["m"] for row in square}):
        x, _ = place({"m": size, "seconds": 1.0})
        parts.append(f'<text x="{x:.1f}" y="400" text-anchor="middle">{size}</text>')
    for name, colour in zip(names, COLOURS):
        points = [place(row) for row in square if row["name"] == name]
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = 50 + 20 * names.index(name)
        parts.append(f'<rect x="520" y="{y - 9}" width="10" height="10" fill="{colour}"/><text x="536" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def peers(W: torch.Tensor, kron: Kron, grid: UniformGrid) -> list[tuple[str, list[float], dict]]:
    """Runs of llm-compressor's GPTQ on W and A, 4 bits, symmetric, with the grid's groups: certified, in a process of its own environment."""
    m, n = W.shape
    if m != n or n < 512 or not PEERS.exists():
        return []
    grid = UniformGrid.fit(W, bits=4, group_size=grid.group_size, scale="absmax")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.safetensors", Path(folder) / "out.safetensors"
        save_file({"W": W, "A": kron.A.H.float().contiguous(), "scale": grid.scale}, source)
        command = [PEERS, Path(__file__).with_name("peers_solver.py"), source, target]
        numbers = [4, grid.group_size or 0, torch.get_num_threads(), 5]
        run = subprocess.run([*map(str, command), *map(str, numbers)], capture_output=True, text=True)
        if run.returncode:
            print(f"llm-compressor failed at {m} x {n} and is left out:\n{run.stderr[-2000:]}")
            return []
        found = json.loads(run.stdout.splitlines()[-1])
        proof = certify(load_file(target)["values"], W, Kron(kron.A), grid)
    if proof.violations:
        raise bench.CertificateError(f"{PEER} at {m} x {n}: {proof.violations} entries are not nearest to their targets", "none")
    more = {"version": found["version"], "violations": 0, "loss": proof.loss}
    loops = [whole - factor for whole, factor in zip(found["runs"], found["factors"])]
    return [(PEER, found["runs"], more), (PEER_LOOP, loops, more)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(str(size) for size in bench.SIZES), help="square sizes, comma-separated")
    parser.add_argument("--shapes", default=",".join(f"{m}x{n}" for m, n in bench.SHAPES), help="shapes MxN, comma-separated")
    parser.add_argument("--methods", default=None, help="schedules, comma-separated")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds; slower schedules are left out at a size")
    parser.add_argument("--json", type=Path, default=RESULTS / "solver.json")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    shapes = [tuple(int(k) for k in shape.split("x")) for shape in options.shapes.split(",") if shape]
    found = bench.run([*sizes, *shapes], options.methods.split(",") if options.methods else None, limit=options.limit, beside=peers)
    if not PEERS.exists():
        print("llm-compressor was not timed: `make peers` installs it in .venv-peers, an environment of its own")
    for version in {row["version"] for row in found["rows"] if "version" in row}:
        print(f"llm-compressor {version}, certified: one-sided, 4 bits")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    described = {"machine": machine.describe(), "date": time.strftime("%Y-%m-%d"), **found}
    options.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    options.json.with_suffix(".svg").write_text(plot(found["rows"], "Seconds of one solve, m = n, float32"), encoding="utf-8")
    print("exponents:", found["exponents"])


if __name__ == "__main__":
    main()
