"""Every exception that bakron raises on purpose: what was seen, what was expected, what to do about it."""

from __future__ import annotations


class BakronError(Exception):
    """Base of all of bakron's exceptions.

    Args:
        saw: What was found, as a clause ("group size 48 does not divide 576 input columns of q_proj").
        expected: What would have been right, as a noun phrase; optional.
        do: What the user can do about it, as a sentence; optional.
    """

    def __init__(self, saw: str, expected: str | None = None, do: str | None = None) -> None:
        self.saw, self.expected, self.do = saw, expected, do
        text = saw if expected is None else f"{saw}; expected {expected}"
        text = text.rstrip(".") + "."
        super().__init__(text if do is None else f"{text} {do.rstrip('.')}.")


class RecipeError(BakronError):
    """A recipe, a flag or an argument has a value that cannot be meant."""


class DataError(BakronError):
    """Calibration or evaluation text cannot be read, or there is too little of it."""


class ModelError(BakronError):
    """A model cannot be found, read, or is of a kind that bakron does not quantize."""


class OutputError(BakronError):
    """The output directory cannot be used."""


class ProcessError(BakronError):
    """A process of a run on several was lost, or told to stop."""


class ShapeError(BakronError):
    """Tensors that belong together do not fit."""


class FactorError(BakronError):
    """A Hessian factor is not what a factor must be: symmetric, finite, positive semi-definite.

    Attributes:
        index: The first offending index, where there is one.
        damping: The smallest amount of `rule="mean"` damping that would make the factor positive definite, where that is the cure.
    """

    def __init__(
        self, saw: str, expected: str | None = None, do: str | None = None, *, index: int | None = None, damping: float | None = None
    ) -> None:
        super().__init__(saw, expected, do)
        self.index, self.damping = index, damping


class MethodError(BakronError):
    """A solver method does not exist or cannot serve this grid or device."""
