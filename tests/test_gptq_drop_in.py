"""`fasterquant` in the place of a plain GPTQ's, which is written out here as its paper has it."""

from __future__ import annotations

import pytest
import torch
from problems import spd
from torch import Tensor, nn

import bakron
from bakron.integrations import gptq


class Quantizer:
    """Absmax scales, unsigned codes: what AutoGPTQ's quantizer finds without its search."""

    def __init__(self, bits: int, sym: bool) -> None:
        self.maxq, self.sym = torch.tensor(2**bits - 1), sym

    def find_params(self, x: Tensor, weight: bool = False) -> None:
        assert weight
        low, high = x.amin(1).clamp_max(0), x.amax(1).clamp_min(0)
        if self.sym:
            high = torch.maximum(low.abs(), high)
            low = -high
        self.scale = ((high - low) / self.maxq)[:, None]
        self.zero = torch.full_like(self.scale, (int(self.maxq) + 1) / 2) if self.sym else (-low[:, None] / self.scale).round()

    def quantize(self, x: Tensor) -> Tensor:
        return self.scale * (((x / self.scale).round() + self.zero).clamp(0, self.maxq) - self.zero)


class GPTQ:
    """Frantar et al. 2022, Algorithm 1, column by column, static groups."""

    def __init__(self, layer: nn.Linear, quantizer: Quantizer) -> None:
        self.layer, self.quantizer = layer, quantizer
        self.H = torch.zeros(layer.in_features, layer.in_features, dtype=layer.weight.dtype)

    def add_batch(self, x: Tensor) -> None:
        self.H += 2 * x.T @ x

    def fasterquant(self, percdamp: float = 0.01, group_size: int = -1, actorder: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        W, H, n = self.layer.weight.data.clone(), self.H.clone(), self.layer.in_features
        width = n if group_size == -1 else group_size
        params = []
        for start in range(0, n, width):
            self.quantizer.find_params(W[:, start : start + width], weight=True)
            params.append((self.quantizer.scale, self.quantizer.zero))
        order = H.diagonal().argsort(descending=True, stable=True) if actorder else torch.arange(n)
        W, H = W[:, order], H[order][:, order]
        H.diagonal().add_(percdamp * H.diagonal().mean())
        U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
        Q = torch.zeros_like(W)
        for j in range(n):
            self.quantizer.scale, self.quantizer.zero = params[int(order[j]) // width]
            Q[:, j : j + 1] = self.quantizer.quantize(W[:, j : j + 1])
            W[:, j + 1 :] -= (W[:, j] - Q[:, j])[:, None] / U[j, j] * U[j, j + 1 :]
        self.layer.weight.data[:, order] = Q
        return torch.cat([s for s, _ in params], 1), torch.cat([z for _, z in params], 1), torch.arange(n) // width


class TwoSided(GPTQ):
    fasterquant = gptq.fasterquant


def made(kind: type[GPTQ], bits: int, sym: bool) -> GPTQ:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 10).double()
    layer.weight.data = torch.randn(10, 24, generator=generator, dtype=torch.float64)
    one = kind(layer, Quantizer(bits, sym))
    one.add_batch(torch.randn(200, 24, generator=generator, dtype=torch.float64) @ spd(24, generator))
    return one


@pytest.mark.parametrize(
    "bits, group_size, sym, actorder", [(4, 8, True, False), (3, -1, False, True), (2, 12, True, True), (8, 8, False, False)]
)
def test_without_b_it_is_their_gptq(bits, group_size, sym, actorder):
    theirs, ours = made(GPTQ, bits, sym), made(TwoSided, bits, sym)
    expected = theirs.fasterquant(percdamp=0.01, group_size=group_size, actorder=actorder)
    found = ours.fasterquant(percdamp=0.01, group_size=group_size, actorder=actorder)
    for one, other in zip(found, expected):
        assert torch.equal(one.to(other.dtype), other)
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=0, atol=1e-12)


def test_with_b_it_rounds_two_sided_to_the_same_grid():
    plain, ours = made(TwoSided, 3, True), made(TwoSided, 3, True)
    W, generator = plain.layer.weight.detach().clone(), torch.Generator().manual_seed(1)
    ours.B = spd(10, generator)
    scale, zero, g_idx = plain.fasterquant(group_size=8)
    two = ours.fasterquant(group_size=8)
    assert torch.equal(scale, two[0]) and torch.equal(zero, two[1]) and torch.equal(g_idx, two[2])
    kron = bakron.Kron(ours.H, ours.B).damp(0.01, 1.0, "mean")
    grid = bakron.UniformGrid(scale, zero.to(torch.int32), 0, 7, 8)
    assert bakron.certify(ours.layer.weight.detach(), W, kron, grid).violations == 0
    assert bakron.certify(plain.layer.weight.detach(), W, kron, grid).violations > 0  # B changed something


@pytest.mark.parametrize("sym", [True, False])
def test_the_function_returns_what_packers_take(sym):
    one = made(GPTQ, 4, sym)
    W = one.layer.weight.detach()
    found = gptq.quantize(W, one.H, bits=4, group_size=8, sym=sym)
    assert found.scale.shape == found.zero.shape == (10, 3) and found.g_idx.tolist() == [j // 8 for j in range(24)]
    assert (
        0 <= int(found.codes.min())
        and int(found.codes.max()) <= 15
        and (not sym or torch.equal(found.zero, torch.full_like(found.zero, 8)))
    )
    spread = (found.codes - found.zero[:, found.g_idx.long()]) * found.scale[:, found.g_idx.long()]
    torch.testing.assert_close(spread, found.values.to(spread.dtype), rtol=1e-6, atol=1e-6)


def test_refusals():
    one = made(TwoSided, 4, True)
    W = one.layer.weight.detach()
    with pytest.raises(bakron.BakronError, match="1 bits; expected 2 to 8"):
        gptq.quantize(W, one.H, bits=1)
    with pytest.raises(bakron.BakronError, match="group size 7"):
        one.fasterquant(group_size=7)
    with pytest.raises(bakron.BakronError, match=r"expected \[10, 3\] both"):
        gptq.quantize(W, one.H, group_size=8, scale=(torch.ones(10, 2), torch.ones(10, 2)))
    assert torch.equal(W, made(TwoSided, 4, True).layer.weight)


@pytest.mark.parametrize("desc_act", [False, True])
def test_inside_gptqmodel(desc_act):
    """GPTQModel's own task, Hessian and quantizer; run in an environment that has it."""
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ as Task

    def task() -> Task:
        config = QuantizeConfig(
            bits=4, group_size=16, sym=True, desc_act=desc_act, act_group_aware=False, static_groups=True, damp_percent=0.05
        )
        generator = torch.Generator().manual_seed(0)
        linear = nn.Linear(64, 48, bias=False)
        linear.weight.data = torch.randn(48, 64, generator=generator)
        one = Task(linear, qcfg=config)
        one.quantizer.configure(perchannel=True)
        mixing = spd(64, generator, dtype=torch.float32)
        for _ in range(8):
            x = torch.randn(1, 128, 64, generator=generator) @ mixing
            one.add_batch(x, linear(x))
        return one

    theirs, ours, two = task().quantize(), gptq.gptqmodel_quantize(task()), task()
    for one, other in zip(ours[1:4], theirs[1:4]):
        torch.testing.assert_close(one.float().reshape(other.shape), other.float())
    assert float((ours[0] - theirs[0]).abs().gt(1e-4).float().mean()) < 0.02  # float32: a tie may fall the other way
    two.B = spd(48, torch.Generator().manual_seed(1))
    assert not torch.equal(gptq.gptqmodel_quantize(two)[0], ours[0])
    assert (len(ours), ours[7]) == (len(theirs), theirs[7])
