"""Scalar grids with a table of levels: NF4, FP4 (E2M1, with the scale formats of MXFP4 and NVFP4), IQ4_NL, Lloyd-Max, or your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bakron.errors import RecipeError
from bakron.grids.scalar import ScalarGrid
from bakron.grids.scales import fit_quadratic, fit_scale, prepare, snapper

if TYPE_CHECKING:
    from bakron.kron import Kron


def nf4() -> Tensor:
    """NormalFloat4: 16 levels at quantiles of a normal distribution, 0 among them, scaled to [-1, 1] (Dettmers et al. 2023, appendix E)."""
    offset = 0.9677083
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return levels / levels[-1]


def e2m1() -> Tensor:
    """FP4 with two exponent bits and one mantissa bit: 15 distinct values, -6 to 6 (OCP Microscaling Formats 1.0, 2023)."""
    positive = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])


def iq4_nl() -> Tensor:
    """The 16 levels of GGUF's IQ4_NL, in units of its block scale."""
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(levels, dtype=torch.float64)


def lloyd_max(levels: int) -> Tensor:
    """The levels of least squared error for a standard normal distribution (Lloyd 1957; Max 1960), by fixed-point iteration.

    Args:
        levels: How many, 2 to 256.

    Raises:
        RecipeError: Out of range.
    """
    if not 2 <= levels <= 256:
        raise RecipeError(f"{levels} levels", "2 to 256 levels")
    centres = torch.special.ndtri((torch.arange(levels, dtype=torch.float64) + 0.5) / levels)
    infinity = torch.full((1,), torch.inf, dtype=torch.float64)
    for _ in range(20 * levels + 400):
        edges = torch.cat([-infinity, (centres[1:] + centres[:-1]) / 2, infinity])
        density = torch.exp(-edges.square() / 2) / (2 * torch.pi) ** 0.5
        centres = (density[:-1] - density[1:]) / (torch.special.ndtr(edges[1:]) - torch.special.ndtr(edges[:-1]))
    return (centres - centres.flip(0)) / 2


TABLES: dict[str, Callable[[], Tensor]] = {"nf4": nf4, "e2m1": e2m1, "iq4_nl": iq4_nl, **{
    f"lloyd-max-{k}": (lambda k=k: lloyd_max(k)) for k in (4, 7, 8, 16)  # type: ignore[misc]
}}  # fmt: skip


@dataclass(frozen=True)
class CodebookGrid(ScalarGrid):
    """Any sorted table of levels, times a scale per row or per group. Codes count levels from 0; there are no zero points.

    Of two equally near levels the one with the even number wins, counted from the level nearest to 0: what IEEE rounding does on E2M1.

    Attributes:
        levels: `[K]` float64, strictly increasing.
        scale_format: The format that scales are stored in, a name in `FORMATS`.
    """

    levels: Tensor | None = None
    scale_format: str = "float"

    @property
    def table(self) -> Tensor | None:
        """Sorted level values, float64."""
        return self.levels

    def levels_of(self, x: Tensor) -> Tensor:
        """Code of the nearest level, in x's dtype."""
        return torch.searchsorted(self.thresholds(x.dtype).to(x.device), x.contiguous()).to(x.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Level of each code."""
        assert self.levels is not None
        return self.levels.to(codes.device, codes.dtype)[codes.long()]

    def thresholds(self, dtype: torch.dtype) -> Tensor:
        """`[K - 1]`: the code of x is the number of thresholds below x, for every x of this dtype, ties included."""
        assert self.levels is not None
        return thresholds(self.levels, dtype)

    @classmethod
    def fit(
        cls,
        W: Tensor,
        table: str | Tensor = "nf4",
        group_size: int | None = None,
        scale: Literal["absmax", "mse", "curvature", "diagonal", "quadratic"] = "mse",
        kron: Kron | None = None,
        *,
        scale_format: Literal["float", "e8m0", "e4m3"] = "float",
        dtype: torch.dtype | None = None,
    ) -> CodebookGrid:
        """Choose a scale for every row or group of `W`.

        Args:
            W: Weight `[m, n]`, floating point.
            table: A name in `TABLES`, or levels `[K]`, strictly increasing and of both signs.
            group_size: Inputs per scale; None = one scale per row.
            scale: As for `UniformGrid.fit`.
            kron: Damped Hessian, for the rules that need it.
            scale_format: "float", "e8m0" (powers of two; MXFP4 with groups of 32) or "e4m3" (an 8-bit float times one float32 scale for the
                whole weight; NVFP4 with groups of 16). The fit compares only scales that the format holds.
            dtype: Dtype in which float scales are stored; default: W's, or float32 where W is float64. Other formats are held as float32.

        Raises:
            RecipeError: Unknown table, rule or format; levels that are not increasing; group size that does not divide n.
            ShapeError: W is not a finite matrix, or kron is of another width.
        """
        levels = _levels(table)
        rows, weights = prepare(W, group_size, scale, kron)
        dtype = dtype or (torch.float32 if W.dtype == torch.float64 else W.dtype)
        top, bottom = rows.amax(-1, keepdim=True), rows.amin(-1, keepdim=True)
        high, low = float(levels[-1]), float(levels[0])
        widest = torch.maximum(top / high, bottom / low).clamp_min(0)
        snap = snapper(scale_format, dtype, widest, rows.shape[2])
        plain = cls(torch.ones(1, 1), None, 0, len(levels) - 1, None, None, levels)

        def rounding(x: Tensor, zero: Tensor | None = None) -> Tensor:
            return plain.decode(plain.levels_of(x))

        fitted = fit_scale(rows, weights, widest, rounding, snap, scale != "absmax")
        if scale == "quadratic" and kron is not None:
            fitted = fit_quadratic(rows, kron.A.H.to(W.device), fitted, None, rounding, snap)
        stored = fitted.to(dtype) if scale_format == "float" else fitted
        return cls(stored, None, 0, len(levels) - 1, group_size, None, levels, scale_format)


def thresholds(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Between each two levels, the largest number of this dtype that still belongs to the lower one."""
    middle = (levels[1:] + levels[:-1]) / 2
    below = middle.to(dtype)
    down = torch.full_like(below, -torch.inf)
    below = torch.where(below.double() > middle, torch.nextafter(below, down), below)
    number = torch.arange(len(levels) - 1, device=levels.device) - int(levels.abs().argmin())
    upper_is_even = (number + 1) % 2 == 0
    return torch.where(upper_is_even & (below.double() == middle), torch.nextafter(below, down), below)


def _levels(table: str | Tensor) -> Tensor:
    if isinstance(table, str):
        if table not in TABLES:
            raise RecipeError(f"codebook {table!r}", f"one of {', '.join(TABLES)}, or a tensor of levels")
        return TABLES[table]()
    levels = table.detach().double().flatten()
    if not (2 <= len(levels) <= 256 and bool((levels[1:] > levels[:-1]).all()) and bool(torch.isfinite(levels).all())):
        raise RecipeError(f"a codebook of {len(levels)} levels {levels[:4].tolist()}...", "2 to 256 finite levels, strictly increasing")
    if not (levels[0] < 0 < levels[-1]):
        raise RecipeError(f"a codebook from {float(levels[0]):g} to {float(levels[-1]):g}", "levels of both signs")
    return levels
