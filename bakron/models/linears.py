"""What the rest of bakron sees of a linear, however the model keeps it: a weight `[m, n]`, its widths, its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


class Routed(nn.Linear):
    """A projection of one expert, which only some tokens reach.

    Args:
        weight: `[m, n]`.

    Attributes:
        tokens: Which tokens of the batch reached it in the last pass of its block: positions, ascending, among all tokens, sequence after sequence.
        total: How many tokens the batch had.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.tokens, self.total = torch.zeros(0, dtype=torch.long), 0

    def spread(self, z: Tensor, sequences: int) -> Tensor:
        """What the tokens have that reached the expert, in their places, and zeros in those of the others.

        Args:
            z: `[t, k]`, inputs, outputs or gradients.
            sequences: Of the batch, b.

        Returns:
            `[b, T, k]`.
        """
        return z.new_zeros(self.total, z.shape[1]).index_copy_(0, self.tokens, z).unflatten(0, (sequences, -1))


Linear = nn.Linear | Transposed


def in_place(linear: Linear, z: Tensor, sequences: int) -> Tensor:
    """Inputs, outputs or gradients that a hook saw, as `[b, T, k]`: of an expert, zeros for the tokens that did not reach it."""
    return linear.spread(z, sequences) if isinstance(linear, Routed) else z


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
