"""`collect` and `quantize_linear_`: Hessians by hooks at any module, and a live linear rounded in place."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from problems import problem
from tiny import tiny_model
from torch import nn

import bakron
from bakron.hessian import BackpropEstimator
from bakron.models.walk import Walk

ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    """Two linears around an in-place activation, one of them used twice, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.again(torch.tanh(self.again(self.act(self.first(x))))))))


def net_and_batches(shape: tuple[int, ...] = (7, 6)) -> tuple[Net, list[torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(), [torch.randn(shape), torch.randn(shape)]


def squares(output: torch.Tensor, _batch: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize("factor", ["kfac", "mixed", "shampoo"])
def test_factors_are_the_sums_that_autograd_gives(factor):
    net, batches = net_and_batches()
    kron = bakron.collect(net, batches, loss=squares, factor=factor)["first"]
    net.eval()
    x = torch.cat(batches)
    y = net.first(x).detach().requires_grad_()
    out = net.head(torch.tanh(net.again(torch.tanh(net.again(y.relu())))))
    (g,) = torch.autograd.grad(out.square().sum(), y)
    a = torch.ones(len(x)) if factor == "kfac" else g.square().sum(-1)
    b = x.square().sum(-1) if factor == "shampoo" else torch.ones(len(x))
    torch.testing.assert_close(kron.A.H, (x.T * a) @ x)
    torch.testing.assert_close(kron.B.H, (g.T * b) @ g)


def test_a_linear_that_runs_twice_counts_both_uses():
    net, batches = net_and_batches()
    kron = bakron.collect(net, batches, loss=None)["again"]
    h = net.first(torch.cat(batches)).relu()
    h = torch.cat([h, torch.tanh(net.again(h))]).detach()
    torch.testing.assert_close(kron.A.H, h.T @ h)
    assert kron.B is None


@pytest.mark.parametrize("shape", [(7, 6), (3, 4, 6), (2, 3, 2, 6)])
@pytest.mark.parametrize("factor", ["mixed", "sequence", "kl:2"])
def test_any_number_of_dimensions(shape, factor):
    net, batches = net_and_batches(shape)
    krons = bakron.collect(net, batches, factor=factor)
    assert list(krons) == ["first", "again", "head"]
    assert all(torch.isfinite(kron.A.H).all() and kron.B.H.trace() > 0 for kron in krons.values())


def test_the_model_and_the_generator_are_left_as_they_were():
    net, batches = net_and_batches()
    net.train()
    net.drop.eval()
    net.head.bias.requires_grad_(False)
    before, state = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
    first, second = (bakron.collect(net, batches)["head"].B.H for _ in range(2))
    assert torch.equal(first, second)  # one seed, and no dropout
    assert not torch.equal(first, bakron.collect(net, batches, seed=1)["head"].B.H)
    assert torch.equal(state, torch.get_rng_state())
    assert net.training and not net.drop.training
    assert [p.requires_grad for p in net.parameters()] == [name != "head.bias" for name, _ in net.named_parameters()]
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not net.first._forward_hooks


def test_sampled_labels_give_the_fisher():
    """With many copies of one image, B at the head tends to n (diag(p) - p p^T), the expected Hessian of the cross entropy."""
    net, (one, _) = net_and_batches()
    copies = one[:1].expand(20000, -1)
    B = bakron.collect(net, [copies], linears=["head"])["head"].B.H / len(copies)
    p = torch.softmax(net.eval()(one[:1]), -1)[0].detach()
    torch.testing.assert_close(B, p.diag() - p[:, None] * p, atol=0.02, rtol=0.0)


def test_it_agrees_with_the_streamed_estimator(tmp_path):
    """A language model given as any other module: the factors of `backprop`, on the text's own labels, which leave nothing to chance."""
    model = tiny_model("llama").double()
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    walk = Walk(model, 12, precision="float32")
    estimator = BackpropEstimator(walk, ids, tmp_path / "store", labels="empirical")
    expected = estimator.block(0, walk.embed(ids))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")

    found = bakron.collect(model, [{"input_ids": half} for half in ids.split(2)], loss=loss)
    for name, kron in expected.items():
        ours = found[f"model.layers.0.{name}"]
        for side in "AB":
            torch.testing.assert_close(getattr(ours, side).H.double(), getattr(kron, side).H.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss": "fisher"}, "'sampled', a function"),
        ({"factor": "k-fac"}, "is no factorisation"),
        ({"linears": ["act"]}, "'act' is no torch.nn.Linear of this model"),
        ({"linears": []}, "no linear to collect for"),
        ({"factor": "kl"}, "an iterator; expected a list of batches"),
        ({"forward": lambda model, batch: model.first(batch)}, "no gradient reached again"),
        ({"forward": lambda model, batch: model(batch * float("nan")), "loss": None}, "first: .*nan"),
    ],
)
def test_collect_refuses(change, message):
    net, batches = net_and_batches()
    with pytest.raises(bakron.BakronError, match=message):
        bakron.collect(net, iter(batches), **change)
    assert net.training and not net.first._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_live_linear_is_rounded_in_place(dtype):
    given = problem(12, 16, seed=1)
    W, kron = given.W, given.kron
    linear = nn.Linear(16, 12).to(dtype)
    linear.weight.data.copy_(W)
    bias, original = linear.bias.clone(), linear.weight.detach().clone()
    solution = bakron.quantize_linear_(linear, kron, levels=7, group_size=8)
    assert torch.equal(linear.weight, solution.values.to(dtype)) and linear.weight.dtype == dtype
    assert torch.equal(linear.bias, bias) and linear.weight.requires_grad
    grid = bakron.UniformGrid.fit(original, 7, 8, "mse", kron=kron, dtype=dtype)
    assert bakron.certify(solution.values, original, kron, grid).violations == 0
    linear.weight.data.copy_(original)
    again = bakron.quantize_linear_(linear, kron, grid, method="antidiagonal")
    assert torch.equal(again.codes, solution.codes) and again.method == "antidiagonal"


def test_quantize_linear_refuses():
    given = problem(12, 16, seed=1)
    kron, grid = given.kron, given.grid
    with pytest.raises(bakron.BakronError, match=r"a Conv1d; expected a torch.nn.Linear"):
        bakron.quantize_linear_(nn.Conv1d(1, 1, 1), kron, grid)
    linear = nn.Linear(16, 12)
    with pytest.raises(bakron.BakronError, match="no grid; expected a grid, or what to fit one with"):
        bakron.quantize_linear_(linear, kron)
    with pytest.raises(bakron.BakronError, match="a grid and levels"):
        bakron.quantize_linear_(linear, kron, grid, levels=7)
    before = linear.weight.clone()
    with pytest.raises(bakron.BakronError, match="for this Kron"):
        bakron.quantize_linear_(nn.Linear(12, 12), kron, levels=7)
    assert torch.equal(before, linear.weight)


def test_the_vision_example_shows_what_it_says(capsys):
    spec = importlib.util.spec_from_file_location("vision", ROOT / "examples" / "vision.py")
    vision = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(vision)
    found = vision.main(steps=120)
    assert found["bakron"] < found["gptq"] < found["rtn"]  # by a quarter each and more
    assert "bakron: KL" in capsys.readouterr().out
