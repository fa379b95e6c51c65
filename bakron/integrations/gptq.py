"""AutoGPTQ-style code and GPTQModel: their inner call, done by `bakron.solve`, for any class that has the layer, `H` and `quantizer` of Frantar's GPTQ.

    GPTQ.fasterquant = bakron.integrations.gptq.fasterquant            # AutoGPTQ and its descendants
    GPTQ.quantize = bakron.integrations.gptq.gptqmodel_quantize        # GPTQModel

Everything around it stays: hooks that feed `add_batch`, the quantizer that chooses scales, packing. Give an object `B`, the second moment of the gradients at the
layer's outputs (`bakron.collect`), and it is rounded two-sided.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    self: Any, blocksize: int = 128, percdamp: float = 0.01, group_size: int = -1, actorder: bool = False, static_groups: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of `GPTQ.fasterquant`: rounds `self.layer.weight` in place, with the scales that `self.quantizer` finds for each group of the original weight.

    Args:
        self: Has `layer` (an `nn.Linear`), `H [n, n]`, `quantizer` (`find_params(x, weight=True)`, then `scale`, `zero`, `maxq`), and may have `B [m, m]`.
        blocksize: Of no account.
        percdamp: Share of the mean diagonal added to H.
        group_size: Inputs per scale; -1 for one scale per row.
        actorder: Round inputs of large diagonal first; groups stay those of the natural order.
        static_groups: Of no account: groups are always static, since scales that depend on the rounding before them fit no two-sided sweep.

    Returns:
        scale `[m, groups]`, zero `[m, groups]`, g_idx `[n]`.

    Raises:
        BakronError: As `quantize`; ShapeError if the layer is no `nn.Linear`.
    """
    found = _with_their_scales(self, self.layer, self.H, group_size, percdamp, actorder)
    self.layer.weight.data.copy_(found.values)
    return found.scale, found.zero, found.g_idx


def gptqmodel_quantize(self: Any, blocksize: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float, float, int]:
    """In the place of `gptqmodel.quantization.gptq.GPTQ.quantize` (GPTQModel 7.6), with settings from `self.qcfg`; never falls back to another rounding.

    Args:
        self: GPTQModel's task of one `nn.Linear`; may have `B [m, m]`. `act_group_aware`, `static_groups` and automatic damping are of no account.
        blocksize: Of no account.

    Returns:
        Values in the weight's dtype, scale, zero, g_idx, seconds, loss per sample, damping, samples, as GPTQModel's packers expect them.

    Raises:
        BakronError: As `quantize`; ShapeError if the module is no `nn.Linear`.
    """
    start = time.perf_counter()
    percdamp = float(self.qcfg.damp_percent)
    found = _with_their_scales(self, self.module, self.finalize_hessian(), self.qcfg.group_size, percdamp, bool(self.qcfg.desc_act))
    self.H = None
    values = found.values.to(self.module.weight.dtype)
    loss = found.loss / max(int(self.nsamples), 1)
    return values, found.scale, found.zero, found.g_idx, time.perf_counter() - start, loss, percdamp, self.nsamples


def _with_their_scales(owner: Any, layer: nn.Module, H: Tensor, group_size: int, percdamp: float, actorder: bool) -> Quantized:
    """Round a layer's weight with the scales that the owner's quantizer finds."""
    if not isinstance(layer, nn.Linear):
        raise ShapeError(f"a {type(layer).__name__}", "a torch.nn.Linear")
    W = layer.weight.detach()
    W = W if W.dtype == torch.float64 else W.float()
    width = W.shape[1] if group_size == -1 else group_size
    check_group(W.shape[1], width)
    scales, zeros = [], []
    for start in range(0, W.shape[1], width):
        owner.quantizer.find_params(W[:, start : start + width], weight=True)
        scales.append(owner.quantizer.scale.reshape(-1, 1))
        zeros.append(owner.quantizer.zero.reshape(-1, 1))
    bits = int(owner.quantizer.maxq + 1).bit_length() - 1
    given, B = (torch.cat(scales, 1), torch.cat(zeros, 1)), getattr(owner, "B", None)
    return quantize(W, H, bits=bits, group_size=group_size, B=B, scale=given, percdamp=percdamp, rule="mean", actorder=actorder)
