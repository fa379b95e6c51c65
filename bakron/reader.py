"""Reads checkpoints of format `packed`: after `import bakron.reader`, `AutoModelForCausalLM.from_pretrained` loads them. Needs only torch and transformers.

Per linear P `[m, n]` of L levels, group size g (G = n / g, or 1):

* `P.weight_packed`, uint8 `[words, b]`: the codes of the whole matrix, row after row, from 0 to L - 1, k of them in a word of b bytes as the number
  `sum_i code_i L^i`, little endian; the last word is filled up with zeros. k and b follow from L: of 1 to 7 bytes, those that waste least (7 levels: 17 codes in 6).
* `P.weight_scale` `[m, G]`.
* `P.weight_zero`, uint8 `[m, G]`, where levels are not symmetric.

A weight is `(code - zero) * scale`, in float32, rounded to the model's dtype; where levels are symmetric, zero is L // 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "bakron"


def word(levels: int) -> tuple[int, int]:
    """Codes in a word, and its bytes."""
    count, size = max(
        ((int(8 * size / math.log2(levels) + 1e-9), size) for size in range(1, 8)), key=lambda pair: (pair[0] / pair[1], -pair[1])
    )
    return count, size


def unpack(packed: Tensor, levels: int, count: int) -> Tensor:
    """Codes from 0 to levels - 1, int32 `[count]`.

    Args:
        packed: uint8 `[words, bytes]`.
        levels: Number of levels.
        count: How many codes there are.
    """
    per_word, size = word(levels)
    value = torch.zeros(len(packed), dtype=torch.int64, device=packed.device)
    for i in range(size):
        value |= packed[:, i].to(torch.int64) << (8 * i)
    codes = torch.empty(len(packed), per_word, dtype=torch.int32, device=packed.device)
    for i in range(per_word):
        codes[:, i] = value % levels
        value //= levels
    return codes.flatten()[:count]


class PackedLinear(nn.Module):
    """Stands in for a linear while its packed tensors are read.

    Args:
        linear: What it stands in for.
        levels: Number of levels.
        group_size: Inputs per scale; None = the whole row.
        symmetric: No zero points.
    """

    def __init__(self, linear: nn.Linear, levels: int, group_size: int | None, symmetric: bool) -> None:
        super().__init__()
        self.levels, self.shape = levels, tuple(linear.weight.shape)
        m, n = self.shape
        count, size = word(levels)
        device, groups = linear.weight.device, n // group_size if group_size else 1
        self.register_buffer("weight_packed", torch.zeros(-(-m * n // count), size, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.zeros(m, groups, dtype=torch.float32, device=device))
        self.register_buffer("weight_zero", None if symmetric else torch.zeros(m, groups, dtype=torch.uint8, device=device))
        self.bias = linear.bias

    def linear(self, dtype: torch.dtype) -> nn.Linear:
        """The ordinary linear that it stands for."""
        m, n = self.shape
        codes = unpack(self.weight_packed, self.levels, m * n).view(*self.weight_scale.shape, -1)
        zero = self.levels // 2 if self.weight_zero is None else self.weight_zero[..., None].to(torch.int32)
        weight = ((codes - zero) * self.weight_scale[..., None].float()).view(m, n).to(dtype)
        made = nn.Linear(n, m, bias=False, device="meta")
        made.weight, made.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return made


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint: `levels`, `group_size` (null = one scale per row), `symmetric`, and modules to `ignore`."""

    def __init__(self, levels: int, group_size: int | None, symmetric: bool, ignore: list[str], **_: Any) -> None:
        self.quant_method = METHOD
        self.levels, self.group_size, self.symmetric, self.ignore = levels, group_size, symmetric, ignore
        self.dequantize = True  # once loaded, an ordinary model


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Puts a `PackedLinear` where a linear is packed, before weights are read, and an ordinary linear in its place after."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        config = self.quantization_config
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in config.ignore]
        for name, linear in linears:
            model.set_submodule(name, PackedLinear(linear, config.levels, config.group_size, config.symmetric))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                model.set_submodule(name, module.linear(model.dtype))
        return model

    def is_serializable(self, **_: Any) -> bool:
        """An ordinary model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Unpacked weights have no gradient."""
        return False
