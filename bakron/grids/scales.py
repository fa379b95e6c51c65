"""Scale fits for scalar grids: how long a step should be, per row or per group, and in which format scales are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bakron.errors import RecipeError, ShapeError
from bakron.grids.scalar import check_group

if TYPE_CHECKING:
    from bakron.kron import Kron

SCALES = ("absmax", "mse", "curvature", "diagonal", "quadratic")
FORMATS = ("float", "e8m0", "e4m3", "float7", "int6", "int8")
SUPER = 256  # inputs that share the scale of their scales
SHRINKS = 80  # candidate scales per group: 1.0 down to SMALLEST times the absmax scale
SMALLEST = 0.25
REFINEMENTS = 3  # closed-form least-squares steps on the best candidate's codes
STEPS = torch.linspace(0.75, 1.25, 21).tolist()  # candidates of a quadratic step, times the scale at hand
Rounding = Callable[[Tensor], Tensor]  # x = w / scale -> the nearest level
Snap = Callable[[Tensor], Tensor]  # scale -> the nearest scale that the format can hold


def prepare(W: Tensor, group_size: int | None, scale: str, kron: Kron | None) -> tuple[Tensor, Tensor]:
    """Check the arguments of a fit; weights as `[m, G, g]` float32, and what each squared error counts, broadcastable to it.

    Raises:
        RecipeError: Unknown rule, group size that does not divide the width, a rule that needs kron without it.
        ShapeError: W is not a finite matrix, or kron is of another width.
    """
    if scale not in SCALES:
        raise RecipeError(f"scale rule {scale!r}", f"one of {', '.join(SCALES)}")
    if W.ndim != 2 or W.numel() == 0 or not W.is_floating_point():
        raise ShapeError(f"a weight of shape {list(W.shape)} and dtype {W.dtype}", "a floating point matrix [m, n]")
    if not bool(torch.isfinite(W).all()):
        i, j = (~torch.isfinite(W)).nonzero()[0].tolist()
        raise ShapeError(f"a weight with {float(W[i, j])} at [{i}, {j}]", "finite weights")
    groups = check_group(W.shape[1], group_size)
    rows = W.detach().float().reshape(W.shape[0], groups, -1)
    if scale in ("absmax", "mse"):
        return rows, torch.ones_like(rows[:1])
    if kron is None:
        raise RecipeError(f"scale={scale!r} without kron", "a damped Kron, whose A weighs the errors")
    kron.check(W)
    weight = kron.A.pivots if scale == "curvature" else kron.A.H.diagonal()
    weights = weight.float().to(W.device).reshape(1, groups, -1)
    return rows, torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))  # a group of dead inputs


def snapper(form: str, dtype: torch.dtype, widest: Tensor, size: int = 1) -> Snap:
    """Rounding to the scales that a format can hold, in float32.

    Args:
        form: "float": `dtype` itself; "e8m0": powers of two (MXFP4); "e4m3": an 8-bit float times one float32 for the whole weight (NVFP4);
            "float7": float16 with 7 significant bits, so that up to 16 of it are a float16 too; "int6", "int8": 1 to 31 or 127 times one
            float16 for each 256 inputs (Q3_K, Q6_K).
        dtype: For "float".
        widest: The largest scales that will be asked for; `[m, G, 1]` for "int6" and "int8".
        size: Inputs per scale, for "int6" and "int8".

    Raises:
        RecipeError: Unknown format, or groups that do not fill blocks of 256 inputs.
    """
    if form not in FORMATS:
        raise RecipeError(f"scale format {form!r}", f"one of {', '.join(FORMATS)}")
    if form == "e8m0":
        return lambda scale: torch.exp2(torch.log2(scale).round().clamp(-127, 127))
    if form == "e4m3":
        tensor_scale = (widest.max() / torch.finfo(torch.float8_e4m3fn).max).clamp_min(torch.finfo(torch.float32).tiny)
        smallest = 2.0**-9  # the smallest subnormal: a scale may not become 0
        return lambda scale: (scale / tensor_scale).clamp(smallest, 448.0).to(torch.float8_e4m3fn).float() * tensor_scale
    if form == "float7":
        return _short
    if form in ("int6", "int8"):
        return _double(31 if form == "int6" else 127, widest, size)
    limits = torch.finfo(dtype)
    smallest = 2.0**-24 if dtype == torch.float16 else limits.tiny  # float16 is narrow enough for its subnormals to matter
    return lambda scale: scale.clamp(smallest, limits.max).to(dtype).float()


def _short(scale: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(scale.clamp(2.0**-17, 2.0**11))  # 15 times it stays within float16, its last bit a normal one
    return torch.ldexp((fraction * 128).round() / 128, exponent)


def _double(most: int, widest: Tensor, size: int) -> Snap:
    groups = widest.shape[1]
    share = max(SUPER // size, 1)
    if groups * size % SUPER or (SUPER % size and size % SUPER):
        raise RecipeError(
            f"{groups} groups of {size} inputs in scale format int{6 if most == 31 else 8}", f"whole blocks of {SUPER} inputs"
        )
    unit, _ = in_units(widest, share, most)
    return lambda scale: (scale / unit).round().clamp(1, most) * unit


def in_units(numbers: Tensor, share: int, most: int) -> tuple[Tensor, Tensor]:
    """Numbers of at least 0 `[m, G, 1]` as a float16 for every `share` of them, large enough for the largest, times whole numbers up to `most`."""
    m, groups, _ = numbers.shape
    tall = numbers.reshape(m, groups // share, share).amax(2, keepdim=True) / most
    unit = tall.clamp(2.0**-24, 65504).half().float().expand(-1, -1, share).reshape(m, groups, 1)
    return unit, (numbers / unit).round().clamp(0, most)


def fit_scale(
    W: Tensor, weights: Tensor, widest: Tensor, rounding: Rounding, snap: Snap, search: bool, codes: tuple[int, int] | None = None
) -> Tensor:
    """Scale per group of `W [m, G, g]`: the best of a line of shrunken `widest [m, G, 1]`, then closed-form least squares on its levels.

    Only scales that `snap` can hold are compared, so the best one is the best that can be stored. `codes` says that `rounding` is to the integers of that range,
    for which there is a compiled search on a CPU.
    """
    levels = rounding(torch.zeros_like(widest))
    idle = torch.where(
        levels == 0, torch.ones_like(widest), torch.zeros_like(widest)
    )  # zeros without a level 0: as small a scale as can be stored
    widest = snap(torch.where(widest > 0, widest, idle))
    if not search:
        return widest[..., 0]
    keep = _best_by_loop(W, weights, widest, rounding) if codes is None or W.is_cuda else _best_by_kernel(W, weights, widest, codes)
    # A coarse format may have rounded the widest scale down, so the line starts above it.
    line = [2.0] + [1 - (1 - SMALLEST) * k / SHRINKS for k in range(SHRINKS)]
    scale = keep(torch.stack([snap(widest * shrink) for shrink in line]))
    for _ in range(REFINEMENTS):
        levels = rounding(W / scale)
        power = (weights * levels.square()).sum(-1, keepdim=True)
        candidate = torch.where(power > 0, (weights * levels * W).sum(-1, keepdim=True) / power.clamp_min(1e-38), scale)
        scale = keep(snap(torch.where(candidate > 0, candidate, scale))[None])
    return scale[..., 0]


def _best_by_loop(W: Tensor, weights: Tensor, unit: Tensor, rounding: Rounding) -> Callable[[Tensor], Tensor]:
    """A function of candidate scales `[K, m, G, 1]` that returns the best, `[m, G, 1]`, of all it has been given so far; errors count in `unit`s."""
    best, scale = torch.full_like(unit, torch.inf), unit

    def keep(candidates: Tensor) -> Tensor:
        nonlocal best, scale
        for candidate in candidates:
            residual = (rounding(W / candidate) * candidate - W).div_(unit)  # in steps, so that squares of tiny weights do not vanish
            err = (weights * residual.square_()).sum(-1, keepdim=True)
            better = err < best
            best, scale = torch.where(better, err, best), torch.where(better, candidate, scale)
        return scale

    return keep


def _best_by_kernel(W: Tensor, weights: Tensor, unit: Tensor, codes: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """The same for rounding to the integers from `codes[0]` to `codes[1]`."""
    from bakron.grids.scales_cpu import keep_best

    units = unit[..., 0].contiguous()
    best, scale = torch.full_like(units, torch.inf), units.clone()
    arrays = [tensor.contiguous().numpy() for tensor in (W, weights, units)]

    def keep(candidates: Tensor) -> Tensor:
        keep_best(*arrays, candidates[..., 0].contiguous().numpy(), np.float32(codes[0]), np.float32(codes[1]), best.numpy(), scale.numpy())
        return scale[..., None].clone()

    return keep


def fit_quadratic(
    W: Tensor, A: Tensor, scale: Tensor, zero: Tensor | None, rounding: Callable[[Tensor, Tensor | None], Tensor], snap: Snap
) -> Tensor:
    """Lower the row's whole quadratic `e A e^T` (e: error of nearest rounding), one group after the other, from a scale at hand.

    Args:
        W: `[m, G, g]`.
        A: Input factor `[n, n]`.
        scale: `[m, G]`.
        zero: `[m, G, 1]` zero points, or None; kept.
        rounding: `w / scale` and zero of a group to its level.
        snap: To storable scales.
    """
    m, groups, size = W.shape
    A = A.to(W.dtype)
    scale = scale.clone()
    at = (lambda g: None) if zero is None else (lambda g: zero[:, g])  # type: ignore[misc]

    def error(g: int, s: Tensor) -> Tensor:
        return rounding(W[:, g] / s, at(g)) * s - W[:, g]

    E = torch.stack([error(g, scale[:, g, None]) for g in range(groups)], 1).reshape(m, -1)
    for g in range(groups):
        own = slice(g * size, (g + 1) * size)
        corner = A[own, own]
        others = E @ A[:, own] - E[:, own] @ corner
        start, best = scale[:, g].clone(), torch.full((m,), torch.inf, dtype=W.dtype, device=W.device)
        for step in [1.0, *STEPS]:
            candidate = snap(start * step)
            e = error(g, candidate[:, None])
            cost = ((e @ corner + 2 * others) * e).sum(-1)
            better = cost < best
            best = torch.where(better, cost, best)
            scale[:, g] = torch.where(better, candidate, scale[:, g])
            E[:, own] = torch.where(better[:, None], e, E[:, own])
    return scale
