"""What every Hugging Face export has in common: all that is not quantized, config, tokenizer and generation config."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bakron.errors import OutputError, RecipeError
from bakron.grids import OffsetGrid, UniformGrid
from bakron.models.load import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VERBATIM = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*", "generation_config.json",
)  # fmt: skip
SHARD = "5GB"


@dataclass(frozen=True)
class Linear:
    """A quantized linear: integer codes `[m, n]` on a grid."""

    codes: Tensor
    grid: UniformGrid


def held_scale(module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in the dtype that a format stores it in.

    Raises:
        RecipeError: It would have to be rounded, and the codes would no longer be those of their grid.
    """
    stored = scale.to(dtype)
    if not torch.equal(stored.to(scale.dtype), scale):
        kind, own = (str(which).removeprefix("torch.") for which in (dtype, scale.dtype))
        raise RecipeError(f"scales of {module} that {kind} cannot hold (they are {own})", do="Quantize again with this --format")
    return stored


def check_codes(module: str, linear: Linear, offsets: bool = False) -> None:
    """Refuse codes that are not on their grid, which would spill over into their neighbours' bits, and offsets where a format has no place for them.

    Raises:
        OutputError: The largest or smallest such code is named.
        RecipeError: The grid has offsets, and `offsets` is not set; or the other way round.
    """
    if isinstance(linear.grid, OffsetGrid) != offsets:
        raise RecipeError(f"levels of {module} {'with' if not offsets else 'without'} offsets", do="Quantize again with this --format")
    low, high = int(linear.codes.min()), int(linear.codes.max())
    if low < linear.grid.low or high > linear.grid.high:
        wrong = low if low < linear.grid.low else high
        raise OutputError(f"a code {wrong} of {module}", f"codes from {linear.grid.low} to {linear.grid.high}", "The run is damaged")
    zero = linear.grid.zero
    if zero is not None and bool(((zero < linear.grid.low) | (zero > linear.grid.high)).any()):
        raise OutputError(f"a zero point of {module} outside its codes", f"{linear.grid.low} to {linear.grid.high}", "The run is damaged")


def write_checkpoint(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    dtype: torch.dtype,
    linears: Mapping[str, Callable[[], Linear]],
    encode: Callable[[str, Linear, torch.dtype], dict[str, Tensor]],
    quantization: dict[str, Any] | None,
) -> None:
    """Write a Hugging Face directory: weights first, config last, so that a directory with a config is complete.

    Args:
        out: Existing directory.
        model: Supplies everything that is not quantized.
        tokenizer: Saved when `source` has no files of its own to copy; None if the model has none.
        source: Directory whose tokenizer and generation config files are copied verbatim, or None.
        dtype: Of everything that is not quantized.
        linears: By module name, something that fetches the codes when their turn comes.
        encode: From (module name, linear, dtype) to the tensors that a format stores for it.
        quantization: The `quantization_config` of config.json, or None for plain weights.
    """
    from huggingface_hub import save_torch_state_dict

    tied = tied_names(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in linears:
            tensors |= encode(module, linears[module](), dtype)
        elif name not in tied:
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    save_torch_state_dict(tensors, out, max_shard_size=SHARD, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    for file in out.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)  # the writer makes them readable to their owner alone
    _write_companions(out, model, tokenizer, source)
    config = copy.deepcopy(model.config)
    config.dtype, config.use_cache = dtype, True
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # that of a GGUF source, whose weights are plain by now
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(out)


def _write_companions(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None) -> None:
    copied = {path.name for pattern in VERBATIM for path in (source.glob(pattern) if source else ()) if path.is_file()}
    for name in sorted(copied):
        assert source is not None
        shutil.copyfile(source / name, out / name)
    if tokenizer is not None and not any(name.startswith("tokenizer") for name in copied):
        tokenizer.save_pretrained(out)
    if "generation_config.json" not in copied and model.generation_config is not None:
        # not save_pretrained, which refuses to write a generation config that contradicts itself, after all the work is done
        (out / "generation_config.json").write_text(model.generation_config.to_json_string(), "utf-8")
