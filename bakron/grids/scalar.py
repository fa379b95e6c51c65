"""What grids have in common: the protocol that schedules rely on, and scales per row or per group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bakron.errors import RecipeError, ShapeError

Self = TypeVar("Self", bound="ScalarGrid")


class Grid(Protocol):
    """What a schedule asks of a grid.

    Attributes:
        unit: Consecutive inputs of one row that are rounded together: 1 for scalar grids.
    """

    @property
    def unit(self) -> int:
        """Inputs that share a code."""
        ...

    def check(self, W: Tensor) -> None:
        """Refuse a weight that this grid was not made for."""
        ...

    def nearest(self, T: Tensor, rows: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest grid points of K targets `[K, unit]`, which stand at these rows and units: codes `[K]` int32, values `[K, unit]`."""
        ...

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What codes `[m, n / unit]` stand for, `[m, n]`."""
        ...

    def spread(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scale of every entry, `[m, n]`: the length in which a distance on this grid is measured."""
        ...

    def reorder(self, rows: Tensor, columns: Tensor) -> Grid:
        """The grid of `W[rows][:, columns]`."""
        ...


def check_group(n: int, group_size: int | None, name: str = "the weight") -> int:
    """Groups in a row of n inputs.

    Raises:
        RecipeError: The group size is not positive or does not divide n.
    """
    if group_size is None:
        return 1
    if group_size < 1 or n % group_size:
        choices = [g for g in (16, 32, 64, 128, 256) if n % g == 0]
        raise RecipeError(
            f"group size {group_size} does not divide the {n} inputs of {name}",
            "a divisor of the width, or no groups (one scale per row)",
            f"Use one of {choices}, or group_size=None" if choices else "Use group_size=None",
        )
    return n // group_size


def check_groups(widths: Mapping[str, int], group_size: int | None) -> None:
    """Refuse a group size that does not divide every width, before any work is done.

    Args:
        widths: Inputs by name of a linear, or of several.
        group_size: Inputs per scale; None = the whole row.

    Raises:
        RecipeError: All linears that it does not fit are named, and sizes that fit every one.
    """
    unfit = [f"the {n} inputs of {name}" for name, n in widths.items() if group_size is not None and (group_size < 1 or n % group_size)]
    if unfit:
        choices = [str(g) for g in (16, 32, 64, 128, 256) if not any(n % g for n in widths.values())]
        raise RecipeError(
            f"group size {group_size} does not divide {', nor '.join(unfit)}",
            "a divisor of every width, or no groups (one scale per row)",
            f"Use {', '.join(choices)} or -1 (no groups)" if choices else "Use -1 (no groups)",
        )


@dataclass(frozen=True)
class ScalarGrid:
    """Levels times a scale per row or per group of inputs; static, so that the result does not depend on the schedule.

    Attributes:
        scale: `[m, G]`, G = 1 (per row) or n / group_size; positive, held in the dtype that is stored, so codes fit the file exactly.
        zero: `[m, G]` int32 integer zero points, or None.
        low: Smallest code.
        high: Largest code.
        group_size: Inputs per scale; None = the whole row.
        index: `[n]`, the scale of each column, where the columns are not in their natural order; else None.
    """

    scale: Tensor
    zero: Tensor | None
    low: int
    high: int
    group_size: int | None = None
    index: Tensor | None = None

    @property
    def unit(self) -> int:
        """Inputs that share a code."""
        return 1

    @property
    def table(self) -> Tensor | None:
        """Sorted level values, float64; None where the levels are the codes themselves."""
        return None

    def levels_of(self, x: Tensor) -> Tensor:
        """Code of the level nearest to each x, not counting the zero point, in x's dtype."""
        raise NotImplementedError

    def thresholds(self, dtype: torch.dtype) -> Tensor:
        """Where one level ends and the next begins; empty where the levels are the codes themselves."""
        return torch.empty(0, dtype=dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Level of each code, in the codes' floating dtype."""
        raise NotImplementedError

    def groups(self, n: int) -> Tensor:
        """The scale that each of n columns uses, `[n]`."""
        if self.index is not None:
            return self.index
        return torch.arange(n, device=self.scale.device) // (n // self.scale.shape[1])

    def expand(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Scale and zero of every entry, `[m, n]` each, in `dtype`."""
        groups = self.groups(n)
        scale = self.scale.to(dtype)[:, groups]
        zero = torch.zeros_like(scale) if self.zero is None else self.zero.to(dtype)[:, groups]
        return scale, zero

    def spread(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scale of every entry, `[m, n]`."""
        return self.scale.to(dtype)[:, self.groups(n)]

    def project(self, T: Tensor, rows: slice = slice(None), cols: slice = slice(None), n: int | None = None) -> tuple[Tensor, Tensor]:
        """Nearest grid point of every entry of T.

        Args:
            T: Targets, the block `[rows, cols]` of an `[m, n]` matrix.
            rows: Which rows of the weight T stands for.
            cols: Which columns.
            n: Width of the weight; only needed when T is not as wide.

        Returns:
            codes int32 and values in T's dtype, both of T's shape.
        """
        groups = self.groups(n or T.shape[1])[cols]
        scale = self.scale[rows].to(T.dtype)[:, groups]
        zero = None if self.zero is None else self.zero[rows].to(T.dtype)[:, groups]
        return self._round(T, scale, zero)

    def nearest(self, T: Tensor, rows: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest grid points of K targets `[K, 1]`, which stand at these rows and columns: codes `[K]` int32, values `[K, 1]`."""
        groups = torch.zeros_like(units) if self.scale.shape[1] == 1 else self.groups_at(units)
        scale = self.scale[rows, groups].to(T.dtype)[:, None]
        zero = None if self.zero is None else self.zero[rows, groups].to(T.dtype)[:, None]
        codes, values = self._round(T, scale, zero)
        return codes[:, 0], values

    def groups_at(self, columns: Tensor) -> Tensor:
        """The scale that these columns use."""
        if self.index is not None:
            return self.index[columns]
        return columns // self.group_size if self.group_size else torch.zeros_like(columns)

    def _round(self, T: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        codes = self.levels_of(T / scale)
        if zero is None:
            codes = codes.clamp_(self.low, self.high)
            return codes.to(torch.int32), self.decode(codes) * scale
        codes = codes.add_(zero).clamp_(self.low, self.high)
        return codes.to(torch.int32), self.decode(codes - zero) * scale

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`level(code) * scale` of integer codes `[m, n]`."""
        levels = codes.to(dtype, copy=True)
        if self.index is not None:
            scale, zero = self.expand(codes.shape[1], dtype)
            return self.decode(levels - zero) * scale
        grouped = levels.reshape(*self.scale.shape, -1)
        if self.zero is not None:
            grouped -= self.zero.to(dtype)[..., None]
        return (self.decode(grouped).mul_(self.scale.to(dtype)[..., None])).reshape(codes.shape)

    def reorder(self: Self, rows: Tensor, columns: Tensor) -> Self:
        """The grid of `W[rows][:, columns]`: every weight keeps its own scale."""
        zero = None if self.zero is None else self.zero[rows]
        return replace(self, scale=self.scale[rows], zero=zero, index=self.groups(len(columns))[columns])

    def check(self, W: Tensor) -> None:
        """Refuse a weight that this grid was not made for.

        Raises:
            ShapeError: Another number of rows, or a width that the groups do not tile.
        """
        m, groups = self.scale.shape
        if W.shape[0] != m or (groups * self.group_size != W.shape[1] if self.group_size else groups != 1):
            wanted = f"[{m}, {groups * self.group_size}]" if self.group_size else f"[{m}, n]"
            raise ShapeError(f"a weight of shape {list(W.shape)}", f"{wanted}, as this grid was fitted for")
