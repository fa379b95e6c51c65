"""Architectures as rows of a table. A new one is a new row, and a test runs every row."""

from __future__ import annotations

from dataclasses import dataclass

from bakron.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """Where things are in a Hugging Face causal language model.

    Attributes:
        body: Module that embeds tokens, runs the blocks and the final norm.
        blocks: The list of decoder blocks.
        norm: Final norm.
        head: Output projection; its weight is left alone.
        shared_inputs: The linears of a block, in the order they run; those in one tuple see the same input.
    """

    body: str = "model"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    shared_inputs: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of a block's linears."""
        return tuple(name for names in self.shared_inputs for name in names)


LAYOUTS: dict[str, Layout] = {
    "llama": Layout(),
    "mistral": Layout(),
    "qwen2": Layout(),
    "qwen3": Layout(),
}


def layout_of(model_type: str) -> Layout:
    """The row of an architecture.

    Raises:
        ModelError: There is none.
    """
    if model_type not in LAYOUTS:
        raise ModelError(f"a model of type {model_type!r}", f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[model_type]
