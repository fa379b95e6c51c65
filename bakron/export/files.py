"""An export as a whole: which files a format consists of, and whether they hold what was solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bakron.errors import OutputError
from bakron.export import compressed_tensors, dense, gguf, gguf_vocabulary, gptq, packed
from bakron.export.checkpoint import Encode, Linear, write_checkpoint
from bakron.models.layout import layout_of
from bakron.models.weights import Weights, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.models.load import Source

FORMATS = {"compressed-tensors": compressed_tensors, "gptq": gptq, "packed": packed, "gguf": gguf, "dense": dense}


@dataclass(frozen=True)
class Content:
    """What is exported.

    Attributes:
        model: Its architecture and config; the parameters may be on the meta device.
        weights: Supplies everything that is not quantized.
        tokenizer: None if the model has none.
        source: Where the model is.
        dtype: Of everything that is not quantized.
        linears: By module name, something that fetches the codes when their turn comes.
        ignore: Module names of linears that are not quantized.
    """

    model: PreTrainedModel
    weights: Weights
    tokenizer: PreTrainedTokenizerBase | None
    source: Source
    dtype: torch.dtype
    linears: Mapping[str, Callable[[], Linear]]
    ignore: list[str]

    @property
    def sample(self) -> Linear:
        """One of the linears; all have the same levels and group size."""
        return next(iter(self.linears.values()))()


def form_of(format: str, gguf_type: str | None) -> Any:
    """What encodes linears for a format: `encode`, `quantization_config`, `bits`, `caveat`.

    Args:
        format: A name in `FORMATS`.
        gguf_type: Type of tensors, for gguf only.
    """
    return FORMATS[format] if gguf_type is None else gguf.Form(gguf_type)


def encoder(form: Any, content: Content) -> Encode:
    """A form's `encode`; its weights turned round for a model that stores them `[n, m]`."""
    if not layout_of(content.model.config.model_type).transposed:
        return form.encode
    return lambda module, linear, dtype: {key: tensor.T.contiguous() for key, tensor in form.encode(module, linear, dtype).items()}


def check_content(format: str, config: Any, tokenizer: PreTrainedTokenizerBase | None, source: Source) -> None:
    """Refuse a model or tokenizer that a format has no words for.

    Raises:
        ModelError: It has none.
    """
    if format == "gguf":
        gguf.check_model(config)
        gguf_vocabulary.fields(tokenizer, _gguf_source(source), config.vocab_size)


def write(out: Path, format: str, gguf_type: str | None, content: Content) -> None:
    """Write all files of an export.

    Args:
        out: Directory; made if it is not there.
        format: A name in `FORMATS`.
        gguf_type: Type of tensors, for gguf only.
        content: What to write.

    Raises:
        RecipeError: The format cannot hold the grid.
        OutputError: Codes outside their grid.
    """
    out.mkdir(parents=True, exist_ok=True)
    form, model, source = form_of(format, gguf_type), content.model, content.source
    if gguf_type is not None:
        tied = tied_names(model)
        tensors = {name: (lambda name=name: content.weights.get(name)) for name in model.state_dict() if name not in tied}
        words = gguf_vocabulary.fields(content.tokenizer, _gguf_source(source), model.config.vocab_size)
        title = Path(source.name).name.removesuffix(".gguf")
        gguf.write(out / gguf.file_name(gguf_type), model.config, tensors, content.linears, content.dtype, gguf_type, words, title)
        return
    grid = content.sample.grid
    where = source.path if source.gguf is None else None
    quantization = form.quantization_config(grid, content.ignore)
    encode = encoder(form, content)
    write_checkpoint(out, model, content.weights, content.tokenizer, where, content.dtype, content.linears, encode, quantization)
    if format == "gptq":
        gptq.beside(out, grid, content.ignore)


def differing(out: Path, format: str, gguf_type: str | None, content: Content) -> list[str]:
    """Linears whose tensors in the files of an export are not what their codes encode to."""
    encode, found = encoder(form_of(format, gguf_type), content), []
    rename = layout_of(content.model.config.model_type).stored_name
    fetch = _fetch_gguf(out, content.model.config) if gguf_type is not None else _fetch_safetensors(out)
    for module, linear in content.linears.items():
        for key, expected in encode(module, linear(), content.dtype).items():
            stored = fetch(rename(key))
            if stored is None or stored.dtype != expected.dtype or not torch.equal(stored, expected):
                found.append(module)
                break
    return found


def sizes(out: Path, content: Content, bits: float) -> str:
    """A line on the size of an export."""
    files = [path for path in out.iterdir() if path.suffix in (".safetensors", ".gguf")]
    count = sum(linear().codes.numel() for linear in content.linears.values())
    total = sum(path.stat().st_size for path in files)
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {total / 1e6:,.1f} MB; {count:,} quantized weights at {bits:.3f} bits with scales"


def _fetch_safetensors(out: Path) -> Callable[[str], Tensor | None]:
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    for file in sorted(out.glob("model*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{file} cannot be read: {error}", "a whole checkpoint", "Export the run again with bakron export") from error

    def fetch(key: str) -> Tensor | None:
        if key not in where:
            return None
        with safe_open(where[key], "pt") as opened:
            return opened.get_tensor(key)

    return fetch


def _fetch_gguf(out: Path, config: Any) -> Callable[[str], Tensor | None]:
    from gguf import GGUFReader

    files = sorted(out.glob("*.gguf"))
    if not files:
        raise OutputError(f"no GGUF file in {out}", "the file of an export")
    tensors = {tensor.name: tensor for tensor in GGUFReader(files[0]).tensors}
    names = gguf.tensor_names(config)

    def fetch(key: str) -> Tensor | None:
        found = tensors.get(names.get_name(key, try_suffixes=(".weight",)))
        return None if found is None else gguf.rows(torch.from_numpy(found.data.copy()), key.removesuffix(".weight"), config, back=True)

    return fetch


def _gguf_source(source: Source) -> Path | None:
    return source.path / source.gguf if source.path is not None and source.gguf else None
