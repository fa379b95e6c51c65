"""`gguf`: one file for llama.cpp, with everything it needs to generate text. Layers go in one of the types of `gguf_blocks`, the rest as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bakron.errors import ModelError
from bakron.export.checkpoint import Linear
from bakron.export.gguf_blocks import TYPES
from bakron.grids import UniformGrid

if TYPE_CHECKING:
    from bakron.export.gguf_vocabulary import Field

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Form:
    """The format with one of its types.

    Attributes:
        kind: A name in `gguf_blocks.TYPES`.
    """

    kind: str

    def encode(self, module: str, linear: Linear, dtype: torch.dtype) -> dict[str, Tensor]:
        """Bytes of one linear, uint8 `[m, bytes of a row]`, rows in the order of Hugging Face; `dtype` is not heeded.

        Raises:
            RecipeError: Scales that the type cannot hold.
            OutputError: Codes outside their grid.
        """
        return {f"{module}.weight": TYPES[self.kind].encode(module, linear)}

    def quantization_config(self, grid: UniformGrid, ignore: list[str]) -> None:
        """None: there is no config.json."""
        return None

    def bits(self, grid: UniformGrid, dtype: torch.dtype) -> float:
        """Stored bits per quantized weight, scales included."""
        return TYPES[self.kind].bits

    def caveat(self, grid: UniformGrid) -> None:
        """Nothing that a user has to know to load the file."""
        return None


def file_name(kind: str) -> str:
    """Of the file within the output directory."""
    return f"model-{kind.upper()}.gguf"


def check_model(config: Any) -> None:
    """Refuse a model that llama.cpp would run differently.

    Args:
        config: Of the Hugging Face model.

    Raises:
        ModelError: Its architecture, rotary embedding or attention window is none that this format writes.
    """
    if config.model_type not in ARCHITECTURES:
        raise ModelError(
            f"a model of type {config.model_type!r} in format gguf", f"one of {', '.join(ARCHITECTURES)}", "Use --format dense"
        )
    if (rope := rope_of(config)["rope_type"]) not in ROPES:
        raise ModelError(f"a rotary embedding of type {rope!r} in format gguf", f"one of {', '.join(ROPES)}", "Use --format dense")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        raise ModelError(
            f"an attention window of {window} tokens in format gguf, which llama.cpp would not heed", "attention to all tokens before"
        )


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary embedding: `rope_type`, `rope_theta` and what else its type needs."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    return {"rope_type": "default", "rope_theta": getattr(config, "rope_theta", None) or 10000.0} | found


def write(
    path: Path,
    config: Any,
    tensors: Mapping[str, Callable[[], Tensor]],
    linears: Mapping[str, Callable[[], Linear]],
    dtype: torch.dtype,
    kind: str,
    vocabulary: list[Field],
    name: str,
) -> None:
    """Write the file.

    Args:
        path: Of the file.
        config: Of the Hugging Face model, as `check_model` accepts.
        tensors: By name, something that fetches what the model stores; tied ones once.
        linears: By module name, something that fetches the codes when their turn comes.
        dtype: Of matrices that are not quantized; vectors are float32.
        kind: Type of quantized linears.
        vocabulary: From `gguf_vocabulary.fields`.
        name: What to call the model.
    """
    import gguf

    architecture = ARCHITECTURES[config.model_type]
    partial = path.with_name(path.name + ".tmp")
    writer = gguf.GGUFWriter(partial, architecture, use_temp_file=True)
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, TYPES[kind].file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _hyperparameters(writer, config)
    for key, value, value_type, sub_type in vocabulary:
        if value != []:  # such as the merges of a tokenizer without any; the file format has no empty arrays
            writer.add_key_value(key, value, value_type, sub_type)
    names = tensor_names(config)
    if (factors := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for ours, fetch in tensors.items():
        module = ours.rpartition(".")[0]
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"a tensor {ours} that llama.cpp has no name for", do="Use --format dense")
        if module in linears and ours.endswith(".weight"):
            data = rows(TYPES[kind].encode(module, linears[module]()), module, config)
            writer.add_tensor(theirs, data.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
        else:
            tensor = fetch()
            whole = rows(tensor.detach().float().cpu(), module, config).contiguous().numpy()
            which = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else _stored_as(dtype)
            writer.add_tensor(theirs, gguf.quants.quantize(whole, which), raw_dtype=which)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def tensor_names(config: Any) -> Any:
    """From Hugging Face's names of tensors to GGUF's."""
    import gguf

    return gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type].upper()), config.num_hidden_layers)


def rows(tensor: Tensor, module: str, config: Any, back: bool = False) -> Tensor:
    """Rows of a tensor in the order of GGUF: for Llama's q and k the two halves of each rotary pair stand side by side. `back` undoes it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    kind = module.rpartition(".")[2]
    if ARCHITECTURES[config.model_type] != "llama" or kind not in heads:
        return tensor
    split = (heads[kind], -1, 2) if back else (heads[kind], 2, tensor.shape[0] // heads[kind] // 2)
    return tensor.reshape(*split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _hyperparameters(writer: Any, config: Any) -> None:
    import gguf

    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _rope_factors(config: Any) -> Tensor | None:
    """What llama.cpp divides each rotary frequency by, for Llama 3's stretched contexts."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].float()


def _stored_as(dtype: torch.dtype) -> Any:
    import gguf

    return getattr(gguf.GGMLQuantizationType, {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[dtype])
