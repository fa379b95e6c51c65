"""A model's weights where they are stored, one tensor at a time: safetensors shards or a GGUF file, under the names of the model's own parameters."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from bakron.errors import ModelError
from bakron.models.layout import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reader(Protocol):
    """Tensors of a file or of several, under the names that they have there. Nothing stays in memory or mapped between two calls."""

    shapes: dict[str, list[int]]

    def get(self, key: str) -> Tensor:
        """A copy of one tensor, in the dtype in which it is stored."""
        ...


class SafetensorsReader:
    """The shards of a Hugging Face directory.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        index = path / "model.safetensors.index.json"
        files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        self.shapes: dict[str, list[int]] = {}
        self._where: dict[str, Path] = {}
        for name in files:
            with safe_open(path / name, "pt") as opened:
                for key in opened.keys():
                    self.shapes[key], self._where[key] = list(opened.get_slice(key).get_shape()), path / name

    def get(self, key: str) -> Tensor:
        """A copy of one tensor. The file is mapped for this call only, so that its pages do not count as this process's memory afterwards."""
        from safetensors import safe_open

        with safe_open(self._where[key], "pt") as opened:
            return opened.get_tensor(key).clone()


class GGUFReader:
    """A GGUF file, dequantized tensor by tensor, under the names that transformers gives to what it holds.

    Args:
        path: The file.
        model: With the file's own config; its parameters may be on the meta device.
    """

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        import gguf
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        opened = gguf.GGUFReader(path)
        kind = str(opened.fields["general.architecture"].contents())
        self._process = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=model.config.to_dict())
        whole = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=list)  # not every module by itself
        names = get_gguf_hf_weights_map(whole, self._process)
        self.path, self.shapes = path, {}
        self._where: dict[str, tuple[str, int, int, Any, tuple[int, ...], Any]] = {}
        for tensor in opened.tensors:
            if (key := names.get(tensor.name)) is not None:
                self.shapes[key] = [int(size) for size in reversed(tensor.shape.tolist())]
                data = tensor.data
                self._where[key] = (tensor.name, int(tensor.data_offset), int(tensor.n_bytes), data.dtype, data.shape, tensor.tensor_type)

    def get(self, key: str) -> Tensor:
        """A copy of one tensor, float32, with rotary pairs in the order of transformers."""
        import gguf
        import numpy as np

        name, offset, size, dtype, shape, kind = self._where[key]
        raw = np.fromfile(self.path, np.uint8, size, offset=offset).view(dtype).reshape(shape)
        weights = gguf.dequantize(raw, kind)
        result = self._process.process(weights=weights, name=name, tensor_key_mapping={}, parsed_parameters={})
        return torch.from_numpy(np.ascontiguousarray(result.weights))


class Weights:
    """All weights of a model by the names of its parameters, read in float32 when they are asked for.

    Args:
        model: Of the architecture; its parameters may be on the meta device.
        reader: Where the weights are.
        name: Of the model, for messages.

    Raises:
        ModelError: Weights are missing, have other shapes than the model, have no place in it, or are two where the config has one.
    """

    def __init__(self, model: PreTrainedModel, reader: Reader, name: str) -> None:
        self.name, self._model, self._reader = name, model, reader
        self.shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
        self._plain: dict[str, str] = {}
        self._fused: dict[str, tuple[Any, list[tuple[str, str]]]] = {}  # parameter -> converter, (its pattern, key in the file)
        unused = self._assign()
        for alias, owner in tied_names(model).items():
            key, other = (alias, owner) if owner in self._plain else (owner, alias)
            if other in self._plain:
                self._plain.setdefault(key, self._plain[other])
        self._refuse(unused)
        for alias, owner in tied_names(model).items():
            if self._plain[alias] != self._plain[owner] and not torch.equal(reader.get(self._plain[alias]), reader.get(self._plain[owner])):
                raise untied(name, alias, owner)

    def get(self, name: str) -> Tensor:
        """One parameter in float32, a copy (integers stay what they are).

        Raises:
            ModelError: The file cannot be read.
        """
        try:
            if name in self._plain:
                tensor = self._reader.get(self._plain[name])
            else:
                converter, sources = self._fused[name]
                converter = copy.deepcopy(converter)
                for pattern, key in sources:
                    converter.add_tensor(name, key, pattern, self._reader.get(key))
                tensor = converter.convert(name, model=self._model, config=self._model.config)[name]
                tensor = tensor[0] if isinstance(tensor, list) else tensor
        except OSError as error:
            raise ModelError(f"{name} of {self.name} cannot be read: {error}", "the files that were there at the start") from error
        return tensor.float() if tensor.is_floating_point() else tensor

    def survey(self, dtype: torch.dtype) -> str:
        """Read every weight once: it must be finite and fit the dtype in which it may be stored.

        Args:
            dtype: Of everything that is not quantized.

        Returns:
            SHA-256 over names and float32 values.

        Raises:
            ModelError: The first weight that is not finite, or too large, is named.
        """
        largest, kind = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name in sorted(self.shapes):
                tensor = self.get(name)
                if tensor.is_floating_point() and tensor.numel():
                    low, high = (float(value) for value in tensor.aminmax())
                    reached = max(-low, high)
                    if not reached <= torch.finfo(torch.float32).max:  # NaN is not
                        raise ModelError(f"{name} of {self.name} holds NaN or Inf", "finite weights", "Download it again")
                    if reached > largest:
                        raise ModelError(
                            f"{name} reaches {reached:.3g}",
                            f"at most {largest:.3g}, the range of {kind}",
                            "Choose dtype bfloat16 or float32",
                        )
                yield name, tensor

        return digest(checked())

    def _assign(self) -> list[str]:
        """Find each parameter's place in the files, as transformers does when it loads: by name, renamed, with or without the base model's prefix, or fused."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        known, layout = self._model.state_dict(), layout_of(self._model.config.model_type)
        unused = []
        for key in sorted(self._reader.shapes, key=_natural):
            found, pattern = rename_source_key(key, renamings, converters, self._model.base_model_prefix, known)
            if found not in known and (own := layout.parameter_name(key)) in known:
                found, pattern = own, None  # such as the weight of an expert, which transformers would fuse
            if found not in known:
                unused.append(found)
            elif pattern is None:
                self._plain[found] = key
            else:
                self._fused.setdefault(found, (by_pattern[pattern], []))[1].append((pattern, key))
        return unused

    def _refuse(self, unused: list[str]) -> None:
        prefix = layout_of(self._model.config.model_type).blocks + "."
        if missing := sorted(self.shapes.keys() - self._plain.keys() - self._fused.keys()):
            raise ModelError(f"{self.name} lacks {len(missing)} weights: {', '.join(missing[:3])}", "all weights")
        for name, key in sorted(self._plain.items()):
            if self._reader.shapes[key] != self.shapes[name]:
                raise ModelError(
                    f"{name} of {self.name} has shape {self._reader.shapes[key]}",
                    f"{self.shapes[name]} by its config",
                    "Get weights and config of one model",
                )
        # Biases that the config denies, or blocks beyond its count: the model would run without them.
        ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        if extra := sorted(name for name in unused if name.startswith(prefix) and not _matches(name, ignored)):
            raise ModelError(
                f"{self.name} holds {len(extra)} weights that its config has no place for: {', '.join(extra[:3])}",
                do="Get weights and config of one model",
            )


class Filled:
    """A module whose weights are in memory until `empty`.

    Args:
        module: With parameters on the meta device.
        prefix: Name of the module within the model.
        get: From the name of a parameter to its values.
    """

    def __init__(self, module: nn.Module, prefix: str, get: Callable[[str], Tensor]) -> None:
        self._before: list[tuple[dict[str, Any], str, Tensor]] = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            place: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            self._before.append((place, leaf, tensor))
            value = get(f"{prefix}.{name}")
            place[leaf] = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value

    def empty(self) -> None:
        """Put the meta parameters back, the very objects, so that tied ones stay tied."""
        for place, leaf, tensor in self._before:
            place[leaf] = tensor


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and values, which must come in the order of their names."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(dtype=torch.uint8).numpy().data)
    return found.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names and values of all weights of a model in memory."""
    return digest(sorted(model.state_dict().items()))


def untied(model: str, alias: str, owner: str) -> ModelError:
    """What to say where a tied parameter is not what it is tied to: one of the two would be lost."""
    return ModelError(
        f"{alias} of {model} differs from {owner}, although its config ties them",
        "one and the same",
        "Set tie_word_embeddings to false in the config to keep both",
    )


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Parameters that are another parameter under a second name (the head of a model with tied embeddings), and that other; they are not stored."""
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Experts in the order of their numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
