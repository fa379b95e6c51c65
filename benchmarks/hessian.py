"""Every Hessian with every factorisation, at several dampings of B: the loop, flags and table of `quality.py` over other rows.

    python benchmarks/hessian.py --calibration valid.txt --evaluation test.txt --scratch DIR [--rows "input;backprop mixed, B 1.0"] [--seeds 0,1,2]

One seed by default; give the rows that matter more of them. Rows already in the results file are skipped.

    python benchmarks/hessian.py --profile [--json FILE]

times the sums behind A and B against plain matrix products of the same flops instead.
"""

from __future__ import annotations

import sys
from typing import Any

import accumulation
import quality
from machine import RESULTS

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


def main() -> None:
    """Run the study that the flags ask for and print its table."""
    if "--profile" in sys.argv:
        accumulation.main()
        return
    quality.ROWS, quality.STEPS = rows(), []
    for flag, default in (("--json", str(RESULTS / "hessian.json")), ("--seeds", "0")):
        if not any(argument.split("=")[0] == flag for argument in sys.argv):
            sys.argv += [flag, default]
    quality.main()


if __name__ == "__main__":
    main()
