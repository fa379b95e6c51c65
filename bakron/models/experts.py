"""Fused experts taken apart: one linear for each expert and projection, as checkpoints store them, and the same mathematics.

Transformers keeps all experts of a block in two parameters, `gate_up_proj [E, 2 i, d]` and `down_proj [E, d, i]`. Apart, each expert's projection is a linear like
any other: it is quantized with the tokens that the router sends to it, and its name is the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bakron.errors import ModelError
from bakron.models.layout import EXPERTS, layout_of
from bakron.models.linears import Routed


class Experts(nn.Module):
    """Stands in for a block's fused experts.

    Args:
        fused: Module with `gate_up_proj [E, 2 i, d]`, `down_proj [E, d, i]` and `act_fn`.
        names: Of gate, up and down in the checkpoint.

    Raises:
        ModelError: It has other parameters.
    """

    def __init__(self, fused: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        shapes = {name: tuple(parameter.shape) for name, parameter in fused.named_parameters()}
        count, width = fused.gate_up_proj.shape[0], fused.gate_up_proj.shape[2]
        inner = fused.gate_up_proj.shape[1] // 2
        if shapes != {"gate_up_proj": (count, 2 * inner, width), "down_proj": (count, width, inner)}:
            raise ModelError(f"experts with parameters {shapes}", "gate_up_proj [E, 2 i, d] and down_proj [E, d, i]")
        self.count, self.names, self.act_fn = count, tuple(names), fused.act_fn
        for e in range(count):
            weights = fused.gate_up_proj[e, :inner], fused.gate_up_proj[e, inner:], fused.down_proj[e]
            self.add_module(str(e), nn.ModuleDict({name: Routed(weight.detach().clone()) for name, weight in zip(names, weights)}))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Each token through its experts.

        Args:
            hidden: `[t, d]`.
            index: Experts of each token, `[t, k]`.
            weights: Of their outputs, `[t, k]`.

        Returns:
            `[t, d]`.
        """
        result = torch.zeros_like(hidden)
        for e in range(self.count):
            gate, up, down = (self.get_submodule(f"{e}.{name}") for name in self.names)
            tokens, slot = (index == e).nonzero(as_tuple=True)
            for linear in (gate, up, down):
                linear.tokens, linear.total = tokens, len(hidden)
            if len(tokens):
                x = hidden[tokens]
                y = down(self.act_fn(gate(x)) * up(x)) * weights[tokens, slot, None]
                result = result.index_add(0, tokens, y.to(result.dtype))
        return result


def unfuse(model: nn.Module) -> list[int]:
    """Take the fused experts of a model apart, where they are not apart yet.

    Args:
        model: A causal language model of a known layout, on any device, meta too; changed in place.

    Returns:
        How many experts each block has.

    Raises:
        ModelError: Unknown architecture, or experts that are kept in another way.
    """
    layout = layout_of(model.config.model_type)  # type: ignore[union-attr, arg-type]
    names = [name for names in layout.expert_inputs for name in names]
    parent, _, last = EXPERTS.rpartition(".")
    counts = []
    for block in model.get_submodule(layout.blocks):  # type: ignore[union-attr]
        fused = getattr(block.get_submodule(parent), last, None) if names else None
        if fused is None:
            counts.append(0)
            continue
        experts = fused if isinstance(fused, Experts) else Experts(fused, names)
        setattr(block.get_submodule(parent), last, experts)
        counts.append(experts.count)
    return counts
