"""Checkpoints that other tools read, written from the codes as they were solved. One file a format; nothing is rounded again."""

from __future__ import annotations

from bakron.export import compressed_tensors, dense
from bakron.export.checkpoint import Linear, write_checkpoint

__all__ = ["FORMATS", "Linear", "write_checkpoint"]

FORMATS = {"compressed-tensors": compressed_tensors, "dense": dense}
