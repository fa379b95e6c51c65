"""Hessian estimators: asked for blocks in order, they answer with a Kron per linear. They know models, never grids."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bakron.hessian.backprop import BackpropEstimator
from bakron.hessian.factor import FACTORS
from bakron.hessian.input import InputEstimator
from bakron.kron import Kron

__all__ = ["ESTIMATORS", "FACTORS", "BackpropEstimator", "Estimator", "InputEstimator"]


class Estimator(Protocol):
    """What the pipeline asks of an estimator. One block's factors are alive at a time.

    Attributes:
        tokens: Tokens that the last block's factors were made from, per linear.
    """

    tokens: dict[str, int]

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """Undamped Krons of all linears of block i, whose inputs are `[N, T, d]` on the CPU."""
        ...


ESTIMATORS = {"input": InputEstimator, "backprop": BackpropEstimator}
