"""Architectures as rows of a table. A new one is a new row, and a test runs every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bakron.errors import ModelError, RecipeError


@dataclass(frozen=True)
class Layout:
    """Where things are in a Hugging Face causal language model.

    Attributes:
        body: Module that embeds tokens, runs the blocks and the final norm.
        blocks: The list of decoder blocks.
        norm: Final norm.
        head: Output projection; its weight is left alone.
        shared_inputs: The linears of a block; those in one tuple see the same input, and tuples come in the order in which they first run.
        widths: Of each tuple's input: "hidden", the residual width; "heads", all heads together; "inner", the MLP's.
        roles: Linear by what it does: q, k, v, o; gate, up, down. A role that no linear has to itself is missing.
        inner: Setting of the config that is the MLP's inner width.
        attention: The attention of a block.
        expert_inputs: As `shared_inputs`, of one expert: gate and up, and down. Blocks that have experts have them in place of the MLP. Empty without experts.
        stored: Part of a parameter's name, and what stands for it in checkpoints.
        activation: The MLP's activation function.
        score_cap: Setting of the config that caps attention scores.
        local: Losses inside a block whose Hessians can be taken, names in `hessian.local.PARTS`.
        transposed: Linears are transformers' `Conv1D`, whose weights are stored `[n, m]`.
        formats: Checkpoint formats whose readers know this architecture; None for all.
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
    widths: tuple[str, ...] = ("hidden", "heads", "hidden", "inner")
    roles: Mapping[str, str] = field(
        default_factory=lambda: {
            **{role: f"self_attn.{role}_proj" for role in "qkvo"},
            **{role: f"mlp.{role}_proj" for role in ("gate", "up", "down")},
        }
    )
    inner: str = "intermediate_size"
    attention: str = "self_attn"
    expert_inputs: tuple[tuple[str, ...], ...] = ()
    stored: tuple[str, str] | None = None
    activation: str = "mlp.act_fn"
    score_cap: str | None = None
    local: tuple[str, ...] = ("attention", "value", "mlp")
    transposed: bool = False
    formats: tuple[str, ...] | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of a block's linears."""
        return tuple(name for names in self.shared_inputs for name in names)

    @property
    def ignored(self) -> list[str]:
        """Linears that are never quantized, names or patterns; a router is a linear to some readers."""
        return [self.head, *([r"re:.*\.gate$"] if self.expert_inputs else [])]

    def stored_name(self, name: str) -> str:
        """What a checkpoint calls a parameter."""
        return name.replace(*self.stored) if self.stored else name

    def parameter_name(self, name: str) -> str:
        """What the model calls a parameter of a checkpoint."""
        return name.replace(*reversed(self.stored)) if self.stored else name

    def inputs_with(self, experts: int) -> tuple[tuple[str, ...], ...]:
        """The `shared_inputs` of a block with so many experts."""
        if not experts:
            return self.shared_inputs
        attention = [names for names in self.shared_inputs if names[0].startswith(self.attention)]
        mlp = [tuple(f"{EXPERTS}.{e}.{name}" for name in names) for e in range(experts) for names in self.expert_inputs]
        return (*attention, *mlp)


EXPERTS = "mlp.experts"
LOADED = ("compressed-tensors", "dense")  # by transformers, which the tests do
GPT2 = Layout(
    body="transformer",
    blocks="transformer.h",
    norm="transformer.ln_f",
    shared_inputs=(("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
    roles={"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    inner="n_inner",
    attention="attn",
    activation="mlp.act",
    local=("mlp",),  # q, k and v are one linear
    transposed=True,
    formats=("dense",),  # readers of packed formats look for nn.Linear
)
PHI = Layout(
    norm="model.final_layernorm",
    shared_inputs=(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"), ("self_attn.dense",), ("mlp.fc2",)),
    widths=("hidden", "heads", "inner"),
    roles={**{role: f"self_attn.{role}_proj" for role in "qkv"}, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    activation="mlp.activation_fn",
    formats=LOADED,
)
MIXTURE = Layout(
    inner="moe_intermediate_size",
    expert_inputs=(("gate_proj", "up_proj"), ("down_proj",)),
    local=("attention", "value"),  # the output of an MLP of experts is a sum over those of a token
    formats=LOADED,
)
MIXTRAL = replace(MIXTURE, inner="intermediate_size", expert_inputs=(("w1", "w3"), ("w2",)), stored=(".mlp.", ".block_sparse_moe."))
LAYOUTS: dict[str, Layout] = {
    "llama": Layout(),
    "mistral": Layout(),
    "qwen2": Layout(),
    "qwen3": Layout(),
    "gemma2": Layout(
        score_cap="attn_logit_softcapping", local=("value", "mlp"), formats=LOADED
    ),  # a curvature of capped scores is no running sum
    "gemma3_text": Layout(formats=LOADED),
    "phi": PHI,
    "gpt2": GPT2,
    "qwen3_moe": MIXTURE,
    "mixtral": MIXTRAL,
}


def layout_of(model_type: str) -> Layout:
    """The row of an architecture.

    Raises:
        ModelError: There is none.
    """
    if model_type not in LAYOUTS:
        raise ModelError(f"a model of type {model_type!r}", f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[model_type]


def check_format(model_type: str, name: str, symmetric: bool = True) -> None:
    """Refuse a checkpoint format whose readers are not known to load this architecture, or not with zero points.

    Raises:
        RecipeError: The formats that can be had are named.
    """
    formats = layout_of(model_type).formats
    if formats is not None and name not in formats:
        raise RecipeError(
            f"format {name} for a model of type {model_type}",
            f"format {' or '.join(formats)}",
            f"Use --format {formats[0]}",
        )
    if layout_of(model_type).expert_inputs and name == "compressed-tensors" and not symmetric:
        raise RecipeError(
            f"zero points in format {name} for a model of type {model_type}, whose experts transformers cannot read with them",
            "symmetric levels, or format dense",
        )


def widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Inputs of each kind of linear, by the last part of their names where that is enough, as far as a config tells.

    Args:
        config: As in config.json.
    """
    layout = LAYOUTS.get(str(config.get("model_type")), Layout())
    hidden, heads = config.get("hidden_size", config.get("n_embd")), config.get("num_attention_heads", config.get("n_head"))
    inner = config.get(layout.inner)
    if inner is None and layout.transposed and isinstance(hidden, int):
        inner = 4 * hidden  # GPT-2's default
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(inner, int)) or heads < 1:
        return {}
    sizes = {"hidden": hidden, "heads": heads * (config.get("head_dim") or hidden // heads), "inner": inner}
    groups = layout.inputs_with(1) if layout.expert_inputs else layout.shared_inputs
    ends = [name.split(".")[-1] for names in groups for name in names]
    found: dict[str, list[str]] = {}
    for names, width in zip(groups, layout.widths):
        found.setdefault(width, []).extend(end if ends.count(end := name.split(".")[-1]) == 1 else name for name in names)
    return {", ".join(names): sizes[width] for width, names in found.items()}
