"""Find, check and open a model: a Hugging Face directory, a hub name, a GGUF file, or one that is in memory."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron.errors import ModelError
from bakron.models.layout import layout_of
from bakron.models.untrusted import check_sizes, read_gguf, read_json, refused, shard_names, shard_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.models.weights import Weights

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
FLOATS = ("float32", "bfloat16", "float16", "float64")
PICKLED = "Load it in transformers and call save_pretrained"
QUANTIZED = "Start from the original checkpoint"
GGUF_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_hidden_layers": "block_count",
    "vocab_size": "vocab_size",
    "head_dim": "attention.key_length",
}


@dataclass(frozen=True)
class Source:
    """A model that exists, as far as can be told without reading its weights.

    Attributes:
        name: What the user wrote; of a model in memory, where it was loaded from, or its class.
        path: Directory, or the directory of a GGUF file; None for a hub name that has not been fetched, and for a model in memory.
        gguf: File name within `path`, or None.
        config: Parsed config.json of a directory, or what a model in memory would have there; else None.
        hub: Whether `name` is a hub name.
        live: The model itself, where it is in memory already.
        tokenizer: That of a model in memory, if it was given.
    """

    name: str
    path: Path | None
    gguf: str | None
    config: dict[str, Any] | None
    hub: bool = False
    live: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def identity(self) -> str:
        """Hub name, or absolute path of the directory or file."""
        return self.name if self.hub or self.path is None else str((self.path / (self.gguf or "")).resolve())

    @property
    def quantized(self) -> str | None:
        """The quantization method that config.json names, or None."""
        found = (self.config or {}).get("quantization_config")
        return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None

    @property
    def code(self) -> bool:
        """Whether config.json names Python code of its own, which is never run."""
        return bool((self.config or {}).get("auto_map"))


def find(model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, quantized: bool = False) -> Source:
    """Check what can be checked without importing anything heavy.

    Args:
        model: Directory, hub name `org/name`, path of a .gguf file, or a model in memory.
        tokenizer: Of a model in memory.
        quantized: Accept a path of a model whose config names a quantization method.

    Returns:
        Where the model is.

    Raises:
        ModelError: Nothing there, a file that is not GGUF, no or a broken config.json, no safetensors weights, a missing shard, an unknown architecture,
            weights that the config does not describe, or an already quantized model; or a tokenizer beside a path.
    """
    if not isinstance(model, str | Path):
        from bakron.models.live import config_of

        config = config_of(model, tokenizer)
        return Source(model.config.name_or_path or type(model).__name__, None, None, config, live=model, tokenizer=tokenizer)
    name = str(model)
    if tokenizer is not None:
        raise ModelError(f"a tokenizer beside the path {name}, which has its own", "a tokenizer for a model in memory only", "Drop it")
    with refused(f"{name[:80]!r} is no path that can be read", "a Hugging Face directory, a hub name, or a GGUF file", "Check the path"):
        path = Path(name).expanduser()
        is_file, exists = path.is_file(), path.exists()
        magic = _magic(path) if is_file else b""
    if is_file:
        if magic.startswith((b"PK\3\4", b"\x80")):
            raise ModelError(f"{name} is a pickled file", "safetensors or GGUF", PICKLED)
        if magic != b"GGUF":
            raise ModelError(f"{name} is a file that does not start with 'GGUF'", "a Hugging Face directory, a hub name, or a GGUF file")
        source = Source(name, path.parent, path.name, None)
        early_config(source)
        return source
    if not exists:
        is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))
        if not is_hub_name:
            raise ModelError(
                f"no file or directory {name}", "a Hugging Face directory, a hub name (org/name), or a GGUF file", "Check the path"
            )
        return Source(name, None, None, None, hub=True)
    source = Source(name, path, None, _read_config(path))
    if source.quantized and not quantized:
        raise ModelError(
            f"{name} is already quantized (quant_method {source.quantized!r} in its config.json)",
            "a model with plain 16 or 32 bit weights",
            QUANTIZED,
        )
    layout_of(str((source.config or {}).get("model_type")))
    tensors = _check_shards(path)
    if not source.quantized:
        _check_plain(name, tensors)
    check_sizes(name, source.config or {}, {key: shape for key, (_, shape) in tensors.items()}, packed=source.quantized is not None)
    return source


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file() and (path / "bakron" / "run.json").is_file():
        raise ModelError(f"{path} holds an unfinished run", "a finished one", "Give its quantize command again to go on")
    if not file.is_file():
        raise ModelError(f"no config.json in {path}", "a Hugging Face model directory")
    config = read_json(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}", "a JSON object", "Download it again")
    return config


def _check_shards(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    index = path / "model.safetensors.index.json"
    names = shard_names(index) if index.is_file() else ["model.safetensors"]
    if not index.is_file() and not (path / names[0]).is_file():
        kinds = sorted({file.suffix for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt")})
        if kinds:
            raise ModelError(f"{path} holds pickled weights ({', '.join(kinds)})", "safetensors", PICKLED)
    return {name: one for file in names for name, one in shard_tensors(path / file).items()}


def _check_plain(source: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse weights of 8 bits or less whose config does not tell of them: their scales would be lost."""
    for name, (kind, _) in tensors.items():
        weight, plain = name.endswith((".weight", ".qweight")), kind in ("F64", "F32", "F16", "BF16")
        if (weight or kind.startswith("F")) and not plain:
            raise ModelError(
                f"{source} is already quantized: {name} is stored as {kind}", "a model with plain 16 or 32 bit weights", QUANTIZED
            )


def early_config(source: Source) -> dict[str, Any]:
    """What is known of the architecture before any weight is read: `model_type` and sizes, under the names of a Hugging Face config.

    Raises:
        ModelError: A GGUF file that cannot be read or is of an unknown architecture; a hub model that cannot be reached.
    """
    if source.config is not None:
        return source.config
    if source.gguf is None:
        from transformers import AutoConfig

        expected = "a directory, hub name, or GGUF file"
        with _quiet(), refused(f"{source.name} is no directory here, and cannot be had from the hub", expected, None):
            found = AutoConfig.from_pretrained(source.name, trust_remote_code=False).to_dict()
    else:
        _need_gguf(source)
        header = read_gguf(Path(_where(source)) / source.gguf)
        kind = str(header.fields.get("general.architecture"))
        found = {"model_type": kind}
        for ours, theirs in GGUF_SIZES.items():
            if f"{kind}.{theirs}" in header.fields:
                found[ours] = header.fields[f"{kind}.{theirs}"]
        layout_of(kind)
        check_sizes(source.name, found, header.shapes)
    layout_of(str(found.get("model_type")))
    return found


def fetch(source: Source) -> Source:
    """A hub model as a directory in the hub's cache; anything else as it is.

    Raises:
        ModelError: It cannot be reached, or is nothing that `find` accepts.
    """
    if source.path is not None or source.live is not None:
        return source
    from huggingface_hub import snapshot_download

    with _quiet(), refused(f"{source.name} cannot be had from the hub", "a directory, hub name, or GGUF file", None):
        path = snapshot_download(source.name, allow_patterns=HUB_FILES)
    return replace(find(path), name=source.name, hub=True)


def open_model(source: Source) -> tuple[PreTrainedModel, Weights]:
    """The model without its weights, and the weights where they are stored. Nothing is read but headers.

    Args:
        source: From `find`, fetched.

    Returns:
        The model in evaluation mode, experts apart, its parameters float32 on the meta device, its buffers (such as rotary frequencies) real; and its weights.

    Raises:
        ModelError: It cannot be read, lacks weights or has others than its config, or is of an unknown architecture.
    """
    from bakron.models.experts import unfuse
    from bakron.models.live import MemoryReader
    from bakron.models.weights import GGUFReader, SafetensorsReader, Weights

    with _quiet(), _explained(source):
        model = _empty(source)
        unfuse(model)
        if source.live is not None:
            weights = Weights(model, MemoryReader(source.live), source.name)
        else:
            assert source.path is not None
            reader = GGUFReader(source.path / source.gguf, model) if source.gguf else SafetensorsReader(source.path)
            weights = Weights(model, reader, source.name)
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    return model, weights


def _empty(source: Source) -> PreTrainedModel:
    """The architecture, its parameters float32 on the meta device, its buffers real."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    live = source.live
    if live is not None:
        config = type(live.config).from_dict(source.config)  # its own, without what it is set to run with here
    else:
        if source.gguf:
            _need_gguf(source)
        config = AutoConfig.from_pretrained(_where(source), trust_remote_code=False, **({"gguf_file": source.gguf} if source.gguf else {}))
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.tie_weights()
    if live is not None:
        model.generation_config = copy.deepcopy(live.generation_config)
    return model


def read(source: Source, dtype: torch.dtype) -> PreTrainedModel:
    """Load the whole model into host memory, all weights in `dtype`, in evaluation mode, no gradients.

    A model in memory is not changed; what it has in `dtype` in host memory is shared with it.

    Args:
        source: From `find`.
        dtype: Of the weights and of the computation.

    Returns:
        The model.

    Raises:
        ModelError: It cannot be read, lacks weights or has others than its config, holds NaN or Inf, or is of an unknown architecture.
    """
    from transformers import AutoModelForCausalLM

    from bakron.models.weights import tied_names

    if source.live is not None:
        from bakron.models.live import fill

        with _quiet(), _explained(source):
            model = _empty(source)
            fill(model, source.live, tied_names(model), dtype)
        return _finite(source, model)
    options: dict[str, Any] = {
        "dtype": dtype,
        "output_loading_info": True,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,
        "trust_remote_code": False,
    }
    if source.gguf:
        _need_gguf(source)
        options |= {"gguf_file": source.gguf}
        del options["use_safetensors"]
    if source.quantized == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if source.quantized == "bakron":
        import bakron.reader  # noqa: F401 (makes the method known to transformers)
    with _quiet(), _explained(source):
        model, info = AutoModelForCausalLM.from_pretrained(_where(source), **options)
    layout = layout_of(model.config.model_type)
    missing = sorted(set(info["missing_keys"]) - tied_names(model).keys())
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
    return _finite(source, model)


def _finite(source: Source, model: PreTrainedModel) -> PreTrainedModel:
    """A loaded model, ready to be evaluated."""
    import torch

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
    if source.live is not None:
        if source.tokenizer is None and required:
            raise ModelError(
                f"no tokenizer for the text, as {source.name} is a model in memory",
                "tokenizer=, or ready token ids as data",
            )
        return source.tokenizer
    from transformers import AutoTokenizer

    if source.gguf:
        _need_gguf(source)
    options = {"trust_remote_code": False} | ({"gguf_file": source.gguf} if source.gguf else {})
    try:
        advice = "Copy one there, or give token ids as data= in Python"
        with _quiet(), refused(f"no tokenizer can be loaded from {source.name}", "a tokenizer beside the model", advice):
            return AutoTokenizer.from_pretrained(_where(source), **options)
    except ModelError:
        if required:
            raise
        return None


def stored_dtype(source: Source, model: PreTrainedModel) -> str:
    """Name of the dtype in which the source keeps its weights; a GGUF file's stand for bfloat16, and float64 is more than any checkpoint of ours has.

    Raises:
        ModelError: The config names one that weights cannot have.
    """
    if source.gguf:
        return "bfloat16"
    config = source.config or model.config.to_dict()
    kind = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if kind not in FLOATS:
        raise ModelError(f"the config of {source.name} has dtype {kind[:40]!r}", f"one of {', '.join(FLOATS)}", "Download it again")
    return "float32" if kind == "float64" else kind


def check_length(model: nn.Module, length: int) -> None:
    """Refuse sequences that are longer than the model was made for.

    Raises:
        ModelError: They are.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise ModelError(f"sequences of {length} tokens", f"at most {limit}, the model's max_position_embeddings", "Use a smaller length")


def check_tokens(model: nn.Module, ids: torch.Tensor, *, given: bool = False) -> None:
    """Refuse tokens that the model has no embedding for.

    Args:
        model: Of any device.
        ids: Windows `[N, T]`.
        given: Whether they were given as ids, and not made from a text.

    Raises:
        ModelError: The largest one is named.
    """
    rows = len(model.get_input_embeddings().weight)  # type: ignore[operator]
    if (largest := int(ids.max())) >= rows:
        who, do = ("data has", "Make the ids with this model's tokenizer") if given else ("the tokenizer gives", None)
        raise ModelError(
            f"{who} token {largest}", f"tokens below {rows}, the model's embeddings", do or "Get tokenizer and weights of one model"
        )


def _where(source: Source) -> str:
    return source.name if source.path is None else str(source.path)


def _need_gguf(source: Source) -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise ModelError(f"reading the GGUF file {source.name} needs the package gguf", None, "pip install gguf")


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Say in one line what a library made of a model that it cannot load."""
    with refused(f"{source.name} cannot be loaded", "a complete causal language model", None):
        try:
            yield
        except ImportError as error:
            needed = "gptqmodel optimum" if source.quantized == "gptq" else "compressed-tensors gguf"
            raise ModelError(
                f"reading {source.name} needs a package that is not installed: {error}", None, f"pip install {needed}"
            ) from error


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
