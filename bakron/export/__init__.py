"""Checkpoints that other tools read, written from the codes as they were solved. One file a format; nothing is rounded again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bakron.export import compressed_tensors, dense
from bakron.export.checkpoint import Linear, write_checkpoint

__all__ = ["FORMATS", "Linear", "encoder", "write_checkpoint"]

FORMATS = {"compressed-tensors": compressed_tensors, "dense": dense}


def encoder(name: str, transposed: bool = False) -> Callable[[str, Linear, torch.dtype], dict[str, Tensor]]:
    """A format's `encode`; its weights turned round for a model that stores them `[n, m]`."""
    encode = FORMATS[name].encode
    if not transposed:
        return encode
    return lambda module, linear, dtype: {key: tensor.T.contiguous() for key, tensor in encode(module, linear, dtype).items()}
