"""A model in memory as a source: its weights are read one by one, as those of a file are, and it is left as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bakron.errors import ModelError
from bakron.models.layout import EXPERTS, layout_of
from bakron.models.weights import untied

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ORIGINAL = "Start from the original checkpoint"


class MemoryReader:
    """The weights of a model in memory, on any device, experts apart; what a directory that it is saved in would hold.

    Args:
        model: A causal language model of a known layout.
    """

    def __init__(self, model: Any) -> None:
        names = [name for names in layout_of(model.config.model_type).expert_inputs for name in names]
        self._tensors: dict[str, Tensor] = {}
        for key, tensor in model.state_dict().items():
            parent, _, last = key.rpartition(".")
            if not names or not parent.endswith(EXPERTS):
                self._tensors[key] = tensor
                continue
            parts = {"gate_up_proj": names[:2], "down_proj": names[2:]}.get(last, [last])
            for e, expert in enumerate(tensor):
                self._tensors |= {f"{parent}.{e}.{name}.weight": one for name, one in zip(parts, expert.chunk(len(parts)))}
        self.shapes = {key: list(tensor.shape) for key, tensor in self._tensors.items()}

    def get(self, key: str) -> Tensor:
        """A copy of one tensor in host memory, in its own dtype."""
        return self._tensors[key].detach().to("cpu", copy=True)


def config_of(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What the config.json of a model in memory would say if it were saved, once it has been checked.

    Raises:
        ModelError: It is no plain transformers model, of an unknown architecture, quantized, or not in memory after all; or the tokenizer is none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel):
        do = "Give the transformers model in it (of adapters: merge_and_unload())" if isinstance(model, nn.Module) else None
        raise ModelError(f"a {type(model).__name__} as a model", "a path, a hub name, or a PreTrainedModel of transformers", do)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"a {type(tokenizer).__name__} as tokenizer", "a tokenizer of transformers, such as AutoTokenizer gives")
    config: dict[str, Any] = model.config.to_dict()
    layout_of(str(config.get("model_type")))
    method = (config.pop("quantization_config", None) or {}).get("quant_method")
    if method is not None and method != "gguf":  # which transformers dequantizes as it loads
        raise ModelError(f"the model is already quantized (quant_method {str(method)!r})", "plain 16 or 32 bit weights", ORIGINAL)
    if type(model) is not (expected := MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]):
        raise ModelError(f"a {type(model).__name__}", f"a {expected.__name__} of transformers, none that only derives from it")
    for name, tensor in model.named_parameters():
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device", "all weights in memory", "Load it without offloading, or give its path")
        if tensor.dtype not in FLOATS or type(tensor.data) is not Tensor:
            kind = str(tensor.dtype).removeprefix("torch.") if type(tensor.data) is Tensor else f"a {type(tensor.data).__name__}"
            raise ModelError(f"{name} is {kind}", "plain 16 or 32 bit weights", ORIGINAL)
    return config | {"dtype": str(model.dtype).removeprefix("torch."), "architectures": [type(model).__name__]}


def fill(empty: Any, model: Any, tied: dict[str, str], dtype: torch.dtype) -> None:
    """Give an architecture without weights those of a model in memory; shared with it where they are `dtype` in host memory already, else copies.

    Raises:
        ModelError: The two do not have the same weights.
    """
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for alias, owner in tied.items():
        if alias in whole and owner in whole and not torch.equal(whole[alias], whole[owner]):
            raise untied(type(model).__name__, alias, owner)
    state = {name: tensor for name, tensor in whole.items() if name not in tied}
    for name, tensor in state.items():
        state[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
    told = empty.load_state_dict(state, assign=True, strict=False)
    if wrong := sorted(set(told.missing_keys) - tied.keys()) + sorted(told.unexpected_keys):
        raise ModelError(f"a {type(model).__name__} with other weights than its config, such as {wrong[0]}", "an unchanged one")
    empty.tie_weights()
