"""Find, check and read a model: a Hugging Face directory, a hub name, or a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron.errors import ModelError
from bakron.models.layout import layout_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Source:
    """A model that exists, as far as can be told without reading its weights.

    Attributes:
        name: What the user wrote.
        path: Directory, or the directory of a GGUF file; None for a hub name.
        gguf: File name within `path`, or None.
        config: Parsed config.json of a directory, else None.
    """

    name: str
    path: Path | None
    gguf: str | None
    config: dict[str, Any] | None

    @property
    def quantized(self) -> str | None:
        """The quantization method that config.json names, or None."""
        found = (self.config or {}).get("quantization_config")
        return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None


def find(name: str, *, quantized: bool = False) -> Source:
    """Check what can be checked without importing anything heavy.

    Args:
        name: Directory, hub name `org/name`, or path of a .gguf file.
        quantized: Accept a model whose config names a quantization method.

    Returns:
        Where the model is.

    Raises:
        ModelError: Nothing there, a file that is not GGUF, no or a broken config.json, no safetensors weights, a missing shard, an unknown architecture,
            or an already quantized model.
    """
    path = Path(name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{name} is a file that does not start with 'GGUF'", "a Hugging Face directory, a hub name, or a GGUF file")
        return Source(name, path.parent, path.name, None)
    if not path.exists():
        is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))
        if not is_hub_name:
            raise ModelError(
                f"no file or directory {name}", "a Hugging Face directory, a hub name (org/name), or a GGUF file", "Check the path"
            )
        return Source(name, None, None, None)
    source = Source(name, path, None, _read_config(path))
    if source.quantized and not quantized:
        raise ModelError(
            f"{name} is already quantized (quant_method {source.quantized!r} in its config.json)",
            "a model with plain 16 or 32 bit weights",
            "Start from the original checkpoint",
        )
    layout_of(str((source.config or {}).get("model_type")))
    _check_shards(path)
    return source


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"no config.json in {path}", "a Hugging Face model directory")
    try:
        config = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}", "JSON", "Download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}", "a JSON object", "Download it again")
    return config


def _check_shards(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}", "a JSON index with a weight_map", "Download it again") from error
        if outside:
            raise ModelError(f"{index} points outside its directory: {outside[0]}", "plain file names")
    else:
        names = ["model.safetensors"]
        if not (path / names[0]).is_file() and list(path.glob("*.bin")):
            raise ModelError(f"{path} holds pickled weights (.bin)", "safetensors", "Load it in transformers and call save_pretrained")
    for name in names:
        _check_shard(path / name)


def _check_shard(file: Path) -> None:
    """The header of a safetensors file must parse and the file must be as long as it says."""
    if not file.is_file():
        raise ModelError(f"{file} is missing", "every weight file of the checkpoint", "Download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if size < 8 or length > min(size - 8, 100 << 20):
                raise ValueError(f"{size} bytes, a header of {length}")
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
            if size != 8 + length + end:
                raise ValueError(f"{size} bytes instead of {8 + length + end}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{file} is damaged ({error})", "a complete safetensors file", "Download it again") from error


def early_config(source: Source) -> dict[str, Any]:
    """What is known of the architecture before any weight is read: `model_type` and sizes, under the names of a Hugging Face config.

    Raises:
        ModelError: A GGUF file that cannot be read or is of an unknown architecture; a hub model that cannot be reached.
    """
    if source.config is not None:
        return source.config
    if source.gguf is None:
        from transformers import AutoConfig

        with _quiet():
            try:
                found = AutoConfig.from_pretrained(source.name).to_dict()
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"{source.name} is no directory here, and cannot be had from the hub: {_first_line(error)}",
                    "a directory, hub name, or GGUF file",
                ) from error
    else:
        _need_gguf(source)
        from gguf import GGUFReader

        try:
            fields = {
                name: field.contents() for name, field in GGUFReader(_where(source) + "/" + source.gguf).fields.items() if "." in name
            }
            kind = str(fields["general.architecture"])
            names = {
                "hidden_size": "embedding_length",
                "intermediate_size": "feed_forward_length",
                "num_attention_heads": "attention.head_count",
            }
            found = {"model_type": kind} | {ours: int(fields[f"{kind}.{theirs}"]) for ours, theirs in names.items()}
            if f"{kind}.attention.key_length" in fields:
                found["head_dim"] = int(fields[f"{kind}.attention.key_length"])
        except (ValueError, KeyError, IndexError, OSError, OverflowError) as error:
            raise ModelError(f"{source.name} is damaged: {error!r}", "a complete GGUF file", "Download it again") from error
    layout_of(str(found.get("model_type")))
    return found


def widths(config: dict[str, Any]) -> dict[str, int]:
    """Inputs of each kind of linear, as far as a config tells: the residual width, all heads together, and the MLP's inner width."""
    hidden, heads, inner = config.get("hidden_size"), config.get("num_attention_heads"), config.get("intermediate_size")
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(inner, int)) or heads < 1:
        return {}
    head_dim = config.get("head_dim") or hidden // heads
    return {"q_proj, k_proj, v_proj, gate_proj, up_proj": hidden, "o_proj": heads * head_dim, "down_proj": inner}


def read(source: Source, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model into host memory, all weights in `dtype`, in evaluation mode, no gradients.

    Args:
        source: From `find`.
        dtype: Of the weights and of the computation.

    Returns:
        The model.

    Raises:
        ModelError: It cannot be read, lacks weights or has others than its config, holds NaN or Inf, or is of an unknown architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
    if source.gguf:
        _need_gguf(source)
        options |= {"gguf_file": source.gguf}
        del options["use_safetensors"]
    if source.quantized == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if source.quantized == "bakron":
        import bakron.reader  # noqa: F401 (makes the method known to transformers)
    with _quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(_where(source), **options)
        except ImportError as error:
            raise ModelError(
                f"reading {source.name} needs a package that is not installed: {error}", None, "pip install 'bakron[formats]'"
            ) from error
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"{source.name} cannot be loaded: {_first_line(error)}", "a complete causal language model") from error
    layout = layout_of(model.config.model_type)
    missing = sorted(set(info["missing_keys"]) - tied_names(model))
    if missing:
        raise ModelError(f"{source.name} lacks {len(missing)} weights: {', '.join(missing[:3])}", "all weights")
    if misshapen := sorted(info["mismatched_keys"]):
        name, found, expected = misshapen[0]
        raise ModelError(
            f"{name} of {source.name} has shape {list(found)}", f"{list(expected)} by its config", "Get weights and config of one model"
        )
    # Biases that the config denies, or blocks beyond its count: the model would run without them.
    if unused := sorted(name for name in info["unexpected_keys"] if name.startswith(layout.blocks + ".")):
        raise ModelError(
            f"{source.name} holds {len(unused)} weights that its config has no place for: {', '.join(unused[:3])}",
            do="Get weights and config of one model",
        )
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"{name} of {source.name} holds NaN or Inf", "finite weights", "Download it again")
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    return model


def read_tokenizer(source: Source, *, required: bool = True) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None where there is none and it is not required.

    Raises:
        ModelError: There is none, and it is required.
    """
    from transformers import AutoTokenizer

    if source.gguf:
        _need_gguf(source)
    with _quiet():
        try:
            return AutoTokenizer.from_pretrained(_where(source), **({"gguf_file": source.gguf} if source.gguf else {}))
        except (OSError, ValueError, KeyError) as error:
            if not required:
                return None
            raise ModelError(
                f"no tokenizer can be loaded from {source.name}: {_first_line(error)}", "a tokenizer beside the model"
            ) from error


def stored_dtype(source: Source, model: PreTrainedModel) -> str:
    """Name of the dtype in which the source keeps its weights; a GGUF file's stand for bfloat16."""
    if source.gguf:
        return "bfloat16"
    config = source.config or model.config.to_dict()
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def check_length(model: nn.Module, length: int) -> None:
    """Refuse sequences that are longer than the model was made for.

    Raises:
        ModelError: They are.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise ModelError(f"sequences of {length} tokens", f"at most {limit}, the model's max_position_embeddings", "Use a smaller length")


def tied_names(model: PreTrainedModel) -> set[str]:
    """Parameters that are another parameter under a second name (the head of a model with tied embeddings); they are not stored."""
    return set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()


def check_range(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Refuse a dtype that cannot hold the model's weights: they would be written as infinities.

    Raises:
        ModelError: The first such weight is named.
    """
    import torch

    largest = torch.finfo(dtype).max
    for name, parameter in model.named_parameters():
        if (reached := float(parameter.abs().max())) > largest:
            kind = str(dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} reaches {reached:.3g}", f"at most {largest:.3g}, the range of {kind}", "Choose dtype bfloat16 or float32"
            )


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over names and values of all weights."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(dtype=torch.uint8).numpy().data)
    return digest.hexdigest()


def _where(source: Source) -> str:
    return source.name if source.path is None else str(source.path)


def _need_gguf(source: Source) -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise ModelError(f"reading the GGUF file {source.name} needs the package gguf", None, "pip install 'bakron[formats]'")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' own progress bars and warnings for one call; what goes wrong is raised, and what matters is reported by bakron."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar listens to nobody
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
