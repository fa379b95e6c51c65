"""Every Hessian with every factorisation, at several dampings of B: the loop, flags and table of `quality.py` over other rows.

    python benchmarks/hessian.py --calibration valid.txt --evaluation test.txt --scratch DIR [--rows "input;backprop mixed, B 1.0"] [--seeds 0,1,2]

One seed by default; give the rows that matter more of them. Rows already in the results file are skipped. Beside quality, each row has the second-order error
that all its roundings together leave on evaluation text which neither calibration nor KL has seen (`sum_t (g_t^T E x_t)^2` per token, summed over linears), and the
peak of the process' resident memory, of which two copies of the model and that text's gradients are a constant part (Linux only).

    python benchmarks/hessian.py --profile [--json FILE]

times the sums behind A and B against plain matrix products of the same flops instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accumulation
import quality
import torch
from machine import RESULTS

from bakron.hessian import ESTIMATORS
from bakron.hessian.backprop import Heldout
from bakron.models.walk import Walk
from bakron.pipeline import Rounded

GRADIENT_FACTORS = ("kfac", "shampoo", "shampoo:3", "mixed", "sequence", "kl")
LOCAL = {
    "attention-local": ("kfac", "mixed"),
    "value-local": ("kfac", "mixed"),
    "mlp-local": ("kfac", "mixed"),
    "fully-local": ("kfac", "shampoo", "mixed"),
}
DAMPINGS = (0.1, 1.0, 3.0)
HELD = 3  # windows
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


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
    for factor in ("mixed", "shampoo"):
        found[f"backprop {factor}, 4 labels a token"] = default | {"factor": factor, "samples": 4}
    found["min-pivot order"] = default | {"order": "min-pivot"}
    found["refit and polish"] = default | {"refit": True, "polish": 1}
    for method in ("boa", "yaqa"):
        found[method] = {"method": method}
    return found


class Measured(quality.Extra):
    """Second-order error on text held out, and peak memory."""

    def __init__(self, flags: Any, walk: Walk, windows: torch.Tensor, store: Path) -> None:
        unseen = windows[flags.windows : flags.windows + 1 + HELD]  # the first is for factors that nobody uses
        estimator = ESTIMATORS["backprop"](walk, unseen, store / "unseen", factor="mixed", held=HELD)
        self.blocks: list[Heldout] = [estimator.heldout(i) for i in range(len(walk))]
        self.weights = [{name: linear.weight.detach() for name, linear in walk.linears(i).items()} for i in range(len(walk))]
        self.tokens = HELD * unseen.shape[1]

    def start(self) -> None:
        """A row begins."""
        self.error = 0.0
        if CLEAR.exists():
            CLEAR.write_text("5")  # the peak starts again from here

    def add(self, i: int, rounded: dict[str, Rounded]) -> None:
        """A block is rounded."""
        self.error += sum(self.blocks[i].error(name, one.values - self.weights[i][name]) for name, one in rounded.items())

    def result(self) -> dict[str, Any]:
        """Columns of the row that ends."""
        peak = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")] if STATUS.exists() else []
        return {"heldout_error": self.error / self.tokens, "peak_memory_gb": round(int(peak[0]) * 1024 / 1e9, 3) if peak else None}


def main() -> None:
    """Run the study that the flags ask for and print its table."""
    if "--profile" in sys.argv:
        accumulation.main()
        return
    quality.ROWS, quality.STEPS = rows(), []
    for flag, default in (("--json", str(RESULTS / "hessian.json")), ("--seeds", "0")):
        if not any(argument.split("=")[0] == flag for argument in sys.argv):
            sys.argv += [flag, default]
    quality.main(Measured)


if __name__ == "__main__":
    main()
