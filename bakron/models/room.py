"""Room for activations: in memory up to a budget, beyond it in files that are mapped into memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bakron.errors import OutputError

NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


class Room:
    """Hands out tensors for hidden states, boundaries and gradients, and knows how much of them is alive.

    Args:
        budget: Bytes that may be in memory at a time; None for no limit.
        folder: Where the rest goes; made when it is first needed. Its files have no name, so that nothing is left behind however the process ends.

    Attributes:
        held: Bytes in memory now.
        spilled: Bytes in files now.
        peak: The most that both together ever were.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.held = self.spilled = self.peak = 0
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor on the CPU.

        Raises:
            OutputError: No room in the folder.
        """
        if dtype not in NUMPY or not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * torch.finfo(dtype).bits // 8
        if self.budget is not None and self.held + size > self.budget:
            return self._map(size).view(dtype).view(shape)
        array = np.empty(shape, NUMPY[dtype])
        self.held += size
        self.peak = max(self.peak, self.held + self.spilled)
        weakref.finalize(array, self._give_back, size, False)
        return torch.from_numpy(array)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor on the CPU, of another one's shape and dtype."""
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def release(self) -> None:
        """Let go of the pages of spilled tensors that are in memory; they are read again when they are needed."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, size: int) -> Tensor:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows now, not as a signal when a page is written
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise OutputError(f"{size:,} bytes of activations do not fit in {self.folder}: {error.strerror}", "room on its disk") from error
        self.spilled += size
        self.peak = max(self.peak, self.held + self.spilled)
        self._maps.add(mapped)
        weakref.finalize(mapped, self._give_back, size, True)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _give_back(self, size: int, spilled: bool) -> None:
        if spilled:
            self.spilled -= size
        else:
            self.held -= size
