"""Hessian estimators: asked for blocks in order, they answer with a Kron per linear. They know models, never grids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from bakron.hessian.backprop import BackpropEstimator
from bakron.hessian.factor import FACTORS
from bakron.hessian.heldout import Candidate, Heldout, candidates, choose
from bakron.hessian.input import InputEstimator
from bakron.hessian.local import LOCAL, LocalEstimator, check_parts
from bakron.hessian.unfinished import rows_here
from bakron.kron import Kron

__all__ = [
    "ESTIMATORS",
    "FACTORS",
    "LOCAL",
    "BackpropEstimator",
    "Candidate",
    "Estimator",
    "Heldout",
    "InputEstimator",
    "LocalEstimator",
    "candidates",
    "check_parts",
    "choose",
    "rows_here",
]


class Estimator(Protocol):
    """What the pipeline asks of an estimator. One block's factors are alive at a time.

    Attributes:
        tokens: Tokens that the last block's factors were made from, per linear.
        effective: Effective sample sizes of the tokens' weights, per linear, behind factor "a" and, after a gradient pass, "b".
        outliers: Tokens that outweigh all others, per linear in factor "a" and, after a gradient pass, "b": see `bakron.hessian.outliers`.
    """

    tokens: dict[str, int]
    effective: dict[str, dict[str, float]]
    outliers: dict[str, dict[str, Any]]

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """Undamped Krons of the linears of block i that are to be quantized, at least one, whose inputs are `[N, T, d]` on the CPU."""
        ...


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "input": InputEstimator,
    **{name: partial(LocalEstimator, parts=parts) for name, parts in LOCAL.items()},
    "backprop": BackpropEstimator,
}
