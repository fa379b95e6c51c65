"""AutoGPTQ-style code: a `fasterquant` that rounds with `bakron.solve`, for any class that has the `layer`, `H` and `quantizer` of Frantar's GPTQ.

    GPTQ.fasterquant = bakron.integrations.gptq.fasterquant

Everything around it stays: hooks that feed `add_batch`, the quantizer that chooses scales, packing. Give an object `B`, the second moment of the gradients at the
layer's outputs (`bakron.collect`), and it is rounded two-sided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bakron.errors import RecipeError, ShapeError
from bakron.grids import UniformGrid, check_group
from bakron.kron import Kron, Rule
from bakron.solver import solve


class Quantized(NamedTuple):
    """What AutoGPTQ's packers take: `W = scale * (code - zero)` with unsigned codes.

    Attributes:
        values: `[m, n]` float32.
        scale: `[m, groups]`.
        zero: `[m, groups]`, whole numbers in the dtype of scale; `2^(bits - 1)` everywhere if symmetric.
        g_idx: Group of each input, `[n]` int32, in natural order: ordering is used during rounding only.
        codes: `[m, n]` int32, 0 to `2^bits - 1`.
        loss: `tr(B E A E^T)` with the damping that was used.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor
    g_idx: Tensor
    codes: Tensor
    loss: float


def quantize(
    W: Tensor,
    H: Tensor,
    *,
    bits: int = 4,
    group_size: int = -1,
    sym: bool = True,
    B: Tensor | None = None,
    scale: str | tuple[Tensor, Tensor] = "curvature",
    percdamp: float = 0.1,
    damp_b: float = 1.0,
    rule: Rule = "diagonal",
    actorder: bool = False,
) -> Quantized:
    """Round a weight as GPTQ's inner loop does, with static groups, and with B if there is one.

    Args:
        W: `[m, n]`.
        H: Sum or mean of `x x^T`, `[n, n]`; its size is of no account.
        bits: 2 to 8.
        group_size: Inputs per scale; -1 for one scale per row.
        sym: Symmetric about 0.
        B: Sum or mean of `g g^T`, `[m, m]`; None is GPTQ.
        scale: A rule of `UniformGrid.fit`, or a pair of scale and zero `[m, groups]` as AutoGPTQ's quantizers find them.
        percdamp: Damping of H.
        damp_b: Damping of B.
        rule: "mean" is the usual one, a share of the mean diagonal; "diagonal" a share of each diagonal entry.
        actorder: Round inputs of large diagonal first.

    Returns:
        Values, scales, zeros, group indices, codes, loss.

    Raises:
        RecipeError: Bits out of range, or a group size that does not divide n.
        ShapeError: Tensors that do not fit.
        FactorError: H or B is not positive definite with this damping.
    """
    if not 2 <= bits <= 8:
        raise RecipeError(f"{bits} bits", "2 to 8")
    size = None if group_size == -1 else group_size
    groups = check_group(W.shape[-1], size)
    kron = Kron(H, B).damp(percdamp, damp_b, rule)
    if isinstance(scale, str):
        grid = UniformGrid.fit(W, None, size, scale, sym, kron, bits=bits)  # type: ignore[arg-type]
    else:
        steps, zeros = scale
        if list(steps.shape) != [len(W), groups] or steps.shape != zeros.shape:
            raise ShapeError(f"scale {list(steps.shape)} and zero {list(zeros.shape)}", f"[{len(W)}, {groups}] both")
        grid = UniformGrid(steps, zeros.round().to(torch.int32), 0, 2**bits - 1, size)
    solution = solve(W, kron, grid, order=("diagonal" if actorder else "natural", "natural"))
    zero = torch.full_like(grid.scale, -grid.low) if grid.zero is None else grid.zero.to(grid.scale.dtype)
    g_idx = torch.arange(W.shape[1], dtype=torch.int32, device=W.device) // (size or W.shape[1])
    return Quantized(solution.values, grid.scale, zero, g_idx, solution.codes - grid.low, solution.loss)


def fasterquant(
    self: Any,
    blocksize: int = 128,
    percdamp: float = 0.01,
    group_size: int = -1,
    actorder: bool = False,
    static_groups: bool = True,
    **groupsize: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of `GPTQ.fasterquant`: rounds `self.layer.weight` in place, with the scales that `self.quantizer` finds for each group of the original weight.

    Args:
        self: Has `layer` (an `nn.Linear`), `H [n, n]`, `quantizer` (`find_params(x, weight=True)`, then `scale`, `zero`, `maxq`), and may have `B [m, m]`.
        blocksize: Of no account.
        percdamp: Share of the mean diagonal added to H.
        group_size: Inputs per scale; -1 for one scale per row. Also taken under its older name `groupsize`.
        actorder: Round inputs of large diagonal first; groups stay those of the natural order.
        static_groups: Of no account: groups are always static, since scales that depend on the rounding before them fit no two-sided sweep.

    Returns:
        scale `[m, groups]`, zero `[m, groups]`, g_idx `[n]`.

    Raises:
        RecipeError: An unknown argument, or as `quantize`.
        BakronError: As `quantize`.
    """
    if set(groupsize) - {"groupsize"}:
        raise RecipeError(f"argument {sorted(groupsize)[0]!r}", "those of AutoGPTQ's fasterquant")
    group_size = groupsize.get("groupsize", group_size)
    if not isinstance(self.layer, torch.nn.Linear):
        raise ShapeError(f"a {type(self.layer).__name__}", "a torch.nn.Linear")
    W = self.layer.weight.detach()
    W = W if W.dtype == torch.float64 else W.float()
    width = W.shape[1] if group_size == -1 else group_size
    check_group(W.shape[1], width)
    scales, zeros = [], []
    for start in range(0, W.shape[1], width):
        self.quantizer.find_params(W[:, start : start + width], weight=True)
        scales.append(self.quantizer.scale.reshape(-1, 1))
        zeros.append(self.quantizer.zero.reshape(-1, 1))
    bits = int(self.quantizer.maxq + 1).bit_length() - 1
    given = (torch.cat(scales, 1), torch.cat(zeros, 1))
    found = quantize(
        W,
        self.H,
        bits=bits,
        group_size=group_size,
        B=getattr(self, "B", None),
        scale=given,
        percdamp=percdamp,
        rule="mean",
        actorder=actorder,
    )
    self.layer.weight.data.copy_(found.values)
    return found.scale, found.zero, found.g_idx
