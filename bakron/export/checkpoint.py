"""What every Hugging Face export has in common: all that is not quantized, config, tokenizer and generation config."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bakron import rundir
from bakron.errors import OutputError, RecipeError
from bakron.grids import OffsetGrid, UniformGrid
from bakron.models.layout import layout_of
from bakron.models.weights import Weights, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VERBATIM = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*", "generation_config.json",
)  # fmt: skip
SHARD = 5_000_000_000  # bytes of a file, at most, unless one module alone is larger


Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Linear:
    """A quantized linear: integer codes `[m, n]` on a grid."""

    codes: Tensor
    grid: UniformGrid


Encode = Callable[[str, Linear, torch.dtype], dict[str, Tensor]]


def held_scale(module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in the dtype that a format stores it in.

    Raises:
        RecipeError: It would have to be rounded, and the codes would no longer be those of their grid.
    """
    stored = scale.to(dtype)
    if not torch.equal(stored.to(scale.dtype), scale):
        kind, own = (str(which).removeprefix("torch.") for which in (dtype, scale.dtype))
        raise RecipeError(f"the scales of {module} are {own}, and {kind} cannot hold them exactly", do="Quantize again with this --format")
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
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
    dtype: torch.dtype,
    linears: Mapping[str, Callable[[], Linear]],
    encode: Encode,
    quantization: dict[str, Any] | None,
) -> None:
    """Write a Hugging Face directory, tensor by tensor: weights first, config last, so that a directory with a config is complete.

    Args:
        out: Existing directory.
        model: Its architecture and config; the parameters may be on the meta device.
        weights: Supplies everything that is not quantized.
        tokenizer: Saved when `source` has no files of its own to copy; None if the model has none.
        source: Directory whose tokenizer and generation config files are copied verbatim, or None.
        dtype: Of everything that is not quantized.
        linears: By module name, something that fetches the codes when their turn comes.
        encode: From (module name, linear, dtype) to the tensors that a format stores for it.
        quantization: The `quantization_config` of config.json, or None for plain weights.

    Raises:
        OutputError: A file cannot be written.
    """
    rename = layout_of(model.config.model_type).stored_name
    plan = shards(_parts(model, weights, dtype, linears, encode))
    where = {}
    for file, parts in plan.items():
        shapes = _shapes(parts, rename)
        where |= dict.fromkeys(shapes, file)
        tensors = ((rename(name), one) for module in parts for name, one in _tensors(module, weights, dtype, linears, encode))
        rundir.stream_tensors(out / file, shapes, tensors, {"format": "pt"})
    if len(plan) > 1:
        total = sum(_size(one) for parts in plan.values() for part in parts.values() for one in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        rundir.write_text(out / "model.safetensors.index.json", json.dumps(index, indent=1))
    _write_companions(out, model, tokenizer, source)
    config = copy.deepcopy(model.config)
    config.dtype, config.use_cache = dtype, True
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # that of a GGUF source, whose weights are plain by now
    if quantization is not None:
        config.quantization_config = quantization
    rundir.write_text(out / "config.json", config.to_json_string(use_diff=True))


def sizes(
    model: PreTrainedModel, weights: Weights, dtype: torch.dtype, linears: Mapping[str, Callable[[], Linear]], encode: Encode
) -> dict[str, int]:
    """Bytes of every weight file that `write_checkpoint` makes of the same arguments; one linear of each shape is encoded to know."""
    rename = layout_of(model.config.model_type).stored_name
    plan = shards(_parts(model, weights, dtype, linears, encode))
    return {file: rundir.tensors_size(_shapes(parts, rename), {"format": "pt"}) for file, parts in plan.items()}


def _shapes(parts: Mapping[str, Shapes], rename: Callable[[str], str]) -> Shapes:
    return {rename(name): one for part in parts.values() for name, one in part.items()}


def shards(parts: Mapping[str, Shapes]) -> dict[str, dict[str, Shapes]]:
    """Distribute over files, in the order of the model, what each module stores.

    Args:
        parts: By module (or tensor) name, dtype and shape of each tensor.

    Returns:
        The same, by file name.
    """
    groups: list[dict[str, Shapes]] = [{}]
    size = 0
    for module, shapes in parts.items():
        more = sum(_size(one) for one in shapes.values())
        if groups[-1] and size + more > SHARD:
            groups.append({})
            size = 0
        groups[-1][module] = shapes
        size += more
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _parts(
    model: PreTrainedModel, weights: Weights, dtype: torch.dtype, linears: Mapping[str, Callable[[], Linear]], encode: Encode
) -> dict[str, Shapes]:
    """What the checkpoint holds for each linear that is quantized, by module, and for each tensor that is not, by name."""
    tied, known = tied_names(model), dict[tuple[int, ...], Shapes]()
    parts: dict[str, Shapes] = {}
    for name, tensor in model.state_dict().items():
        module, shape = name.removesuffix(".weight"), tuple(weights.shapes[name])
        if module in linears:
            if shape not in known:  # linears of one shape are stored alike
                known[shape] = {
                    key.removeprefix(module): (one.dtype, tuple(one.shape)) for key, one in encode(module, linears[module](), dtype).items()
                }
            parts[module] = {module + key: one for key, one in known[shape].items()}
        elif name not in tied:
            parts[name] = {name: (dtype if tensor.is_floating_point() else tensor.dtype, shape)}
    return parts


def _tensors(
    module: str, weights: Weights, dtype: torch.dtype, linears: Mapping[str, Callable[[], Linear]], encode: Encode
) -> Iterable[tuple[str, Tensor]]:
    if module in linears:
        return encode(module, linears[module](), dtype).items()
    tensor = weights.get(module)
    return [(module, tensor.to(dtype) if tensor.is_floating_point() else tensor)]


def _size(one: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(one[1]) * one[0].itemsize


def _write_companions(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None) -> None:
    copied = {path.name for pattern in VERBATIM for path in (source.glob(pattern) if source else ()) if path.is_file()}
    try:
        for name in sorted(copied):
            assert source is not None
            shutil.copyfile(source / name, out / name)
        if tokenizer is not None and not any(name.startswith("tokenizer") for name in copied):
            tokenizer.save_pretrained(out)
    except OSError as error:
        raise OutputError(
            f"the tokenizer cannot be written to {out}: {error.strerror}", "a writable directory with room on its disk"
        ) from error
    if "generation_config.json" not in copied and model.generation_config is not None:
        # not save_pretrained, which refuses to write a generation config that contradicts itself, after all the work is done
        rundir.write_text(out / "generation_config.json", model.generation_config.to_json_string())
