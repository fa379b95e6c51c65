"""Load an export again with the reader that its users have, and compare every layer with its codes. Says what was verified and what was not."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from bakron.errors import OutputError
from bakron.export import gguf
from bakron.export.files import Content, differing
from bakron.models.experts import unfuse
from bakron.models.layout import layout_of
from bakron.models.load import find, read

NEEDS = {"compressed-tensors": ("compressed_tensors",), "gptq": ("gptqmodel", "optimum"), "packed": (), "dense": (), "gguf": ("gguf",)}
WINDOW = 16  # tokens of the forward pass
GPTQ_TOLERANCE = 1e-2  # of the largest weight: its kernels compute in float16 or bfloat16


def verify(out: Path, format: str, gguf_type: str | None, content: Content) -> list[str]:
    """Verify an export.

    Args:
        out: Its directory.
        format: A name in `FORMATS`.
        gguf_type: Type of tensors, for gguf only.
        content: What was written.

    Returns:
        Lines that begin with "verified: " or "not verified: ".

    Raises:
        OutputError: Something in the files is not what it should be.
    """
    if wrong := differing(out, format, gguf_type, content):
        raise OutputError(f"{len(wrong)} linears in {out} are not what their codes say, first {wrong[0]}", do="Check the disk")
    count = len(content.linears)
    lines = [f"verified: the bytes of all {count} linears are their codes"]
    if missing := [package for package in NEEDS[format] if find_spec(package) is None]:
        return [*lines, f"not verified: loading, which needs {' and '.join(missing)}"]
    if gguf_type is not None:
        return lines + _verify_gguf(out / gguf.file_name(gguf_type), content)
    weights = sum(parameter.numel() for parameter in content.model.parameters())
    if not _fits(weights * torch.finfo(content.dtype).bits // 8):
        return [*lines, "not verified: loading, for which there is not enough memory"]
    model = read(find(str(out), quantized=True), content.dtype)
    unfuse(model)
    transposed = layout_of(model.config.model_type).transposed
    for module, linear in content.linears.items():
        found, codes = model.get_submodule(module), linear()
        weight = _weight_of(found).T if transposed else _weight_of(found)
        _compare(module, weight.float(), codes.grid.values(codes.codes).to(content.dtype).float(), format)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(WINDOW)[None] % model.config.vocab_size).logits
    loaded = f"verified: transformers loads it, and all {count} linears are scale * (code - zero)"
    return [*lines, loaded, _forward("transformers", bool(torch.isfinite(logits).all()))]


def _weight_of(module: nn.Module) -> Tensor:
    """Weight `[m, n]` of a linear as its reader sees it."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return weight.detach()
    identity = torch.eye(module.in_features, dtype=torch.float16)  # what a packed linear does to each input by itself
    with torch.no_grad():
        made = module(identity)
    bias = getattr(module, "bias", None)
    return (made if bias is None else made - bias).T


def _compare(module: str, found: Tensor, expected: Tensor, format: str) -> None:
    if format == "gptq":
        same = float((found - expected).abs().max()) <= GPTQ_TOLERANCE * float(expected.abs().max())
    else:
        same = torch.equal(found, expected)
    if not same:
        raise OutputError(f"{module} is read as something else than scale * (code - zero)", do="Report this")


def _forward(reader: str, finite: bool) -> str:
    """A line on a forward pass; a model may overflow by itself, which is no fault of the export."""
    if finite:
        return f"verified: a forward pass of {WINDOW} tokens in {reader} is finite"
    return f"not verified: a forward pass of {WINDOW} tokens in {reader} gives NaN or Inf"


def _verify_gguf(file: Path, content: Content) -> list[str]:
    from gguf import GGUFReader, quants

    config = content.model.config
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    names = gguf.tensor_names(config)
    for module, linear in content.linears.items():
        tensor, codes = tensors[names.get_name(f"{module}.weight", try_suffixes=(".weight",))], linear()
        read = gguf.rows(torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)), module, config, back=True)
        _compare(module, read, codes.grid.values(codes.codes), "gguf")
    lines = [f"verified: all {len(content.linears)} linears as the package gguf reads them are scale * (code - zero)"]
    if find_spec("llama_cpp") is None:
        return [*lines, "not verified: loading in llama.cpp, which needs the package llama-cpp-python"]
    if not _fits(2 * file.stat().st_size):
        return [*lines, "not verified: loading in llama.cpp, for which there is not enough memory"]
    import llama_cpp

    with contextlib.redirect_stderr(io.StringIO()):
        model = llama_cpp.Llama(str(file), n_ctx=WINDOW, logits_all=True, verbose=False)
        model.eval([token % config.vocab_size for token in range(WINDOW)])
    return [*lines, _forward("llama.cpp", bool(torch.isfinite(torch.from_numpy(model.scores[:WINDOW])).all()))]


def _fits(size: int) -> bool:
    import psutil

    return size <= psutil.virtual_memory().available // 2
