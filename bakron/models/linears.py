"""What the rest of bakron sees of a linear, however the model keeps it: a weight `[m, n]`, its widths, its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bakron.errors import ModelError


class Transposed:
    """GPT-2's `Conv1D`, `y = x W + b` with W `[n, m]`, seen as a linear with the weight `[m, n]`. Writing to that weight writes to the model's.

    Args:
        module: The Conv1D.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.in_features, self.out_features = module.weight.shape

    @property
    def weight(self) -> Tensor:
        """The transpose of the stored weight: a view."""
        return self.module.weight.T

    def register_forward_hook(self, hook: Callable[..., Any]) -> Any:
        """That of the module."""
        return self.module.register_forward_hook(hook)

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """That of the module."""
        return self.module.register_forward_pre_hook(hook)


Linear = nn.Linear | Transposed


def as_linear(module: nn.Module, name: str, transposed: bool) -> Linear:
    """A module of a block as a linear.

    Args:
        module: nn.Linear, or Conv1D where `transposed`.
        name: For the message.
        transposed: Whether the architecture keeps its linears as Conv1D.

    Raises:
        ModelError: Of another kind.
    """
    if transposed and type(module).__name__ == "Conv1D":
        return Transposed(module)
    if transposed or not isinstance(module, nn.Linear):
        expected = "transformers' Conv1D" if transposed else "torch.nn.Linear"
        raise ModelError(f"{name} is a {type(module).__name__}", expected)
    return module


def output_logits(model: nn.Module, normed: Tensor, head: str) -> Tensor:
    """Logits of hidden states behind the final norm: the output projection, and the soft cap that some models put on it.

    Args:
        model: A causal language model.
        normed: `[..., d]`.
        head: Name of the output projection.

    Returns:
        `[..., vocabulary]`; differentiable.
    """
    logits = model.get_submodule(head)(normed)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap
