"""What a stranger's model may not do: read files elsewhere, claim more than its files hold, or end in somebody else's exception."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bakron.errors import BakronError, ModelError

HEADER_LIMIT = 100 << 20  # bytes of a safetensors header or of a JSON file
LABELS_LIMIT = 1 << 20  # transformers makes a dictionary of that many labels
ITEMS_LIMIT = 1 << 22  # items of a GGUF array: each becomes an object
AGAIN = "Download it again"
LINE = 300  # characters of what a library says
# Sizes under all their names; each is a whole number of at least one where it is given.
HIDDEN, LAYERS, HEADS = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")
INNER, EXPERTS = ("moe_intermediate_size", "intermediate_size", "n_inner"), ("num_experts", "num_local_experts")
OTHERS = ("vocab_size", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "n_positions", "num_labels")
NEEDED = (HIDDEN, LAYERS, HEADS, (*INNER, "n_embd"))  # a library would fill in those of a model with billions of weights
SHARES = ("partial_rotary_factor", "rotary_pct")


@contextmanager
def refused(saw: str, expected: str, do: str | None = AGAIN) -> Iterator[None]:
    """Make a `ModelError` of whatever a library raises over a file that it was not made for.

    Args:
        saw: What was tried ("x cannot be loaded"); the first line of the exception follows.
        expected: What would have been right.
        do: What the user can do.

    Raises:
        ModelError: The library raised something; also the panics of libraries written in Rust, which are no `Exception`.
    """
    try:
        yield
    except (BakronError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no further word")[:LINE]
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: "
        raise ModelError(f"{saw}: {kind}{line}", expected, do) from error


def read_json(file: Path) -> Any:
    """A JSON file of a model.

    Raises:
        ModelError: It cannot be read, or is no JSON.
    """
    with refused(f"{file} cannot be read", "JSON"):
        if file.stat().st_size > HEADER_LIMIT:
            raise ValueError(f"{file.stat().st_size:,} bytes")
        return json.loads(file.read_text("utf-8"))


def shard_names(index: Path) -> list[str]:
    """Weight files that a safetensors index names; they lie beside it.

    Raises:
        ModelError: It cannot be read, or names a file elsewhere.
    """
    with refused(f"{index} cannot be read", "a JSON index with a weight_map"):
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name or "\\" in name or name == ".."]
    if outside:
        raise ModelError(f"{index} points outside its directory: {outside[0]}", "plain file names")
    return names


def shard_tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of the tensors of a safetensors file, once its header parses and the file is as long as it says.

    Raises:
        ModelError: The file is missing or damaged.
    """
    from safetensors import safe_open

    if not file.is_file():
        raise ModelError(f"{file} is missing", "every weight file of the checkpoint", AGAIN)
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError(f"{size} bytes, a header of {length}")
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        if size != 8 + length + end:
            raise ValueError(f"{size} bytes instead of {8 + length + end}")
        with safe_open(file, framework="numpy") as opened:
            return {name: (header[name]["dtype"], tuple(opened.get_slice(name).get_shape())) for name in opened.keys()}
    except Exception as error:
        raise ModelError(f"{file} is damaged ({error})", "a complete safetensors file", AGAIN) from error


@dataclass(frozen=True)
class GGUF:
    """Header of a GGUF file: single values of its metadata, and the shapes of its tensors, outermost dimension first."""

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def read_gguf(file: Path) -> GGUF:
    """Read the header of a GGUF file, and hold every length in it against the length of the file.

    The readers that come after trust those lengths: one wrong count can make them run for hours or fill the memory.

    Raises:
        ModelError: The file is damaged.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    with refused(f"{file} is damaged", "a complete GGUF file"), file.open("rb") as stream:
        size = file.stat().st_size
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        version, tensors, keys = _unpack(stream, "<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3")
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = _string(stream, size)
            fields[key] = _value(stream, size, *_unpack(stream, "<I"))
        placed = []
        for _ in range(tensors):
            name, (dimensions,) = _string(stream, size), _unpack(stream, "<I")
            if dimensions > 4:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            shape = _unpack(stream, f"<{dimensions}Q")
            kind, offset = _unpack(stream, "<IQ")
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            placed.append((name, shape, offset + -(-math.prod(shape) // block) * width))
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"an alignment of {alignment!r}")
        start = -(-stream.tell() // alignment) * alignment
        for name, _, end in placed:
            if start + end > size:
                raise ValueError(f"{size} bytes, of which tensor {name!r} would end at {start + end}")
        return GGUF(fields, {name: tuple(reversed(shape)) for name, shape, _ in placed})


SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def _value(stream: BinaryIO, size: int, kind: int) -> Any:
    """One metadata value; an array is passed over, and only its length told."""
    if kind == STRING:
        return _string(stream, size)
    if kind != ARRAY:
        return _unpack(stream, SCALARS[kind])[0]
    kind, length = _unpack(stream, "<IQ")
    if length > ITEMS_LIMIT:
        raise ValueError(f"an array of {length} items")
    if kind == STRING:
        for _ in range(length):
            _skip(stream, size, *_unpack(stream, "<Q"))
    else:
        _skip(stream, size, length * struct.calcsize(SCALARS[kind]))
    return range(length)


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, stream.read(struct.calcsize(form)))


def _string(stream: BinaryIO, size: int) -> str:
    (length,) = _unpack(stream, "<Q")
    start = stream.tell()
    _skip(stream, size, length)
    stream.seek(start)
    return stream.read(length).decode("utf-8")


def _skip(stream: BinaryIO, size: int, length: int) -> None:
    if stream.tell() + length > size:
        raise ValueError(f"{length} bytes announced at {stream.tell()}, of {size} in all")
    stream.seek(length, 1)


def check_sizes(where: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], packed: bool = False) -> None:
    """Refuse a config that describes a model much larger than the weights beside it: its memory would be taken before anything is compared.

    Args:
        where: Name of the model, for messages.
        config: Sizes under the names of a Hugging Face config.
        shapes: Of all tensors.
        packed: Integers in the files hold several weights each.

    Raises:
        ModelError: A size is missing or no whole number of at least one, or the sizes do not go with the weights.
    """
    for key in {*HIDDEN, *LAYERS, *HEADS, *INNER, *EXPERTS, *OTHERS} & config.keys():
        value = config[key]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"{key} of {where} is {str(value)[:40]!r}", "a whole number of at least 1", AGAIN)
    for names in NEEDED:
        if not any(config.get(name) for name in names):
            raise ModelError(f"the config of {where} has no {names[0]}", "the sizes of the model", AGAIN)
    inner = [part for key in ("rope_parameters", "rope_scaling") if isinstance(part := config.get(key), dict)]
    for part in (config, *inner):
        for key in SHARES:
            share = part.get(key)
            if share is not None and (not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1):
                raise ModelError(f"{key} of {where} is {str(share)[:40]!r}", "a number above 0, at most 1", AGAIN)
    if (labels := config.get("num_labels") or 0) > LABELS_LIMIT:
        raise ModelError(f"num_labels of {where} is {labels}", f"at most {LABELS_LIMIT}", AGAIN)
    layers = _size(config, LAYERS)
    held = sum(math.prod(shape) for shape in shapes.values())
    described = _described(config)
    if described > (32 if packed else 2) * held or layers > len(shapes):
        raise ModelError(
            f"the config of {where} describes at least {described:,} weights in {layers:,} blocks, but its files hold {held:,}",
            "weights and config of one model",
            AGAIN,
        )


def _described(config: Mapping[str, Any]) -> int:
    """Weights that a model of these sizes has at least."""
    hidden, heads = _size(config, HIDDEN), _size(config, HEADS)
    across = (heads + _size(config, ("num_key_value_heads",))) * (_size(config, ("head_dim",)) or hidden // max(heads, 1))
    inner = max(_size(config, EXPERTS), 1) * _size(config, INNER)
    return hidden * (_size(config, ("vocab_size",)) + _size(config, ("n_positions",)) + _size(config, LAYERS) * (across + inner))


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if config.get(name)), 0)
