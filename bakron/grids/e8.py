"""A vector grid: eight consecutive inputs of a row share one 16-bit code, a point of the E8 lattice (QuIP#, Tseng et al. 2024, section 4).

The points are half-integer vectors of even sum, moved by +1/4 or -1/4 in every coordinate, which leaves 2^16 of them: 256 vectors of absolute
values, times seven free signs (the eighth makes the sum even), times two shifts. Two bits a weight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from bakron.errors import RecipeError, ShapeError

UNIT = 8
RADIUS = 10  # all absolute vectors of squared length up to this, 227 of them, and EXTRA of 12
EXTRA = 29
CHUNK = 4096  # units compared with the codebook at once
MULTIPLES = torch.linspace(0.5, 1.5, 51).tolist()  # candidate scales, times the root mean square of the weights


@cache
def absolutes() -> Tensor:
    """The 256 vectors of absolute values, `[256, 8]` float64, shortest first."""
    halves = list(itertools.product((0.5, 1.5, 2.5), repeat=UNIT))
    short = [v for v in halves if sum(x * x for x in v) <= RADIUS]
    long = [v for v in halves if sum(x * x for x in v) == 12 and max(v) < 2][:EXTRA]
    return torch.tensor(sorted(short, key=lambda v: (sum(x * x for x in v), v)) + long, dtype=torch.float64)


@dataclass(frozen=True)
class E8Grid:
    """The points of E8P times a scale per row. Needs a width that is a multiple of 8.

    Attributes:
        scale: `[m, 1]`, positive, in the dtype that is stored.
    """

    scale: Tensor

    @property
    def unit(self) -> int:
        """Inputs that share a code."""
        return UNIT

    @classmethod
    def fit(cls, W: Tensor, scale: Literal["rms", "mse"] = "mse", *, dtype: torch.dtype | None = None) -> E8Grid:
        """Choose a scale for every row of `W`.

        Args:
            W: Weight `[m, n]`, n a multiple of 8.
            scale: "rms": the root mean square of the row, over 1.03; "mse": the multiple of it with the least squared error.
            dtype: Dtype in which scales are stored; default: W's, or float32 where W is float64.

        Raises:
            ShapeError: W is not a finite matrix whose width is a multiple of 8.
            RecipeError: Unknown rule.
        """
        if W.ndim != 2 or W.numel() == 0 or not W.is_floating_point() or not bool(torch.isfinite(W).all()):
            raise ShapeError(f"a weight of shape {list(W.shape)} and dtype {W.dtype}", "a finite floating point matrix [m, n]")
        if W.shape[1] % UNIT:
            raise ShapeError(
                f"a weight of shape {list(W.shape)}", f"a width that is a multiple of {UNIT}", "Use a scalar grid for this layer"
            )
        if scale not in ("rms", "mse"):
            raise RecipeError(f"scale rule {scale!r}", "rms or mse")
        dtype = dtype or (torch.float32 if W.dtype == torch.float64 else W.dtype)
        W = W.detach().float()
        length = W.square().mean(1, keepdim=True).sqrt()
        length = torch.where(
            length > 0, length, torch.full_like(length, 2 * torch.finfo(dtype).tiny)
        )  # no level is 0: as near as can be stored
        grid = cls((length / 1.03).to(dtype))
        if scale == "rms":
            return grid
        sample = W[:, : UNIT * max(1, min(W.shape[1], 1024) // UNIT)]
        best, chosen = torch.full_like(length, torch.inf), grid.scale
        for multiple in MULTIPLES:
            candidate = cls((length * multiple).to(dtype))
            error = (candidate.project(sample)[1] - sample).square().sum(1, keepdim=True)
            chosen, best = torch.where(error < best, candidate.scale, chosen), torch.minimum(error, best)
        return cls(chosen)

    def check(self, W: Tensor) -> None:
        """Refuse a weight that this grid was not made for.

        Raises:
            ShapeError: Another number of rows, or a width that is not a multiple of 8.
        """
        if W.shape[0] != self.scale.shape[0] or W.shape[1] % UNIT:
            raise ShapeError(
                f"a weight of shape {list(W.shape)}", f"[{self.scale.shape[0]}, a multiple of {UNIT}], as this grid was fitted for"
            )

    def nearest(self, T: Tensor, rows: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest points of K targets `[K, 8]`, which stand in these rows: codes `[K]` int32, values `[K, 8]`. Ties go to the lower code."""
        scale = self.scale[rows].to(T.dtype)
        codes = torch.cat([_encode(part) for part in torch.split(T / scale, CHUNK)]) if len(T) else torch.zeros(0, dtype=torch.int32)
        return codes, _decode(codes, T.dtype) * scale

    def project(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest points of a whole `[m, n]`: codes `[m, n / 8]` and values `[m, n]`."""
        m, n = T.shape
        rows = torch.arange(m, device=T.device).repeat_interleave(n // UNIT)
        codes, values = self.nearest(T.reshape(-1, UNIT), rows, rows)
        return codes.view(m, -1), values.view(m, n)

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What codes `[m, n / 8]` stand for, `[m, n]`."""
        return _decode(codes.flatten(), dtype).view(len(codes), -1) * self.scale.to(dtype)

    def spread(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scale of every entry, `[m, n]`."""
        return self.scale.to(dtype).expand(-1, n)

    def groups(self, n: int) -> Tensor:
        """The scale that each of n columns uses: the row's only one."""
        return torch.zeros(n, dtype=torch.int64, device=self.scale.device)

    def reorder(self, rows: Tensor, columns: Tensor) -> E8Grid:
        """The grid of `W[rows]`.

        Raises:
            RecipeError: Columns in another order: they share codes with their neighbours.
        """
        if not torch.equal(columns, torch.arange(len(columns), device=columns.device)):
            raise RecipeError("another order of columns on a grid of 1x8 units", "order='natural' for A", "Only rows can be reordered")
        return replace(self, scale=self.scale[rows])


def _encode(x: Tensor) -> Tensor:
    """Code of the nearest point: absolute vector * 256 + signs of the first seven * 2 + shift."""
    table = absolutes().to(x.device, x.dtype)
    odd = (table.sum(1) % 2 != 0)[None, :]  # needs an odd number of minus signs
    best, codes = (
        torch.full(x.shape[:1], torch.inf, dtype=x.dtype, device=x.device),
        torch.zeros(x.shape[:1], dtype=torch.int64, device=x.device),
    )
    for shift, move in enumerate((0.25, -0.25)):
        y = x - move
        size = y.abs()
        cost = table.square().sum(1) - 2 * size @ table.T
        wrong = odd != ((y < 0).sum(1, keepdim=True) % 2 != 0)  # the cheapest wrong sign makes up for it
        product = size[:, None, :] * table
        cost = torch.where(wrong, cost + 4 * product.amin(2), cost) + y.square().sum(1, keepdim=True)
        least, which = cost.min(1)
        rows = torch.arange(len(x), device=x.device)
        negative = (y < 0).clone()
        flip = product[rows, which].argmin(1)
        negative[rows, flip] ^= wrong[rows, which]
        signs = (negative[:, :7].long() << torch.arange(7, device=x.device)).sum(1)
        codes = torch.where(least < best, which * 256 + signs * 2 + shift, codes)
        best = torch.minimum(least, best)
    return codes.to(torch.int32)


def _decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Points `[K, 8]` of codes `[K]`."""
    codes = codes.long()
    table = absolutes().to(codes.device, dtype)[codes >> 8]
    negative = (codes[:, None] >> torch.arange(1, 8, device=codes.device)) & 1
    last = (negative.sum(1) + (table.sum(1) % 2 != 0).long()) % 2
    signs = 1 - 2 * torch.cat([negative, last[:, None]], 1).to(dtype)
    return signs * table + torch.where(codes & 1 == 1, -0.25, 0.25).to(dtype)[:, None]
