"""Plain PyTorch: collect A and B at the linears of any `nn.Module` by hooks, and round a live `nn.Linear` in place. Knows no architecture and no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bakron.errors import FactorError, ModelError, RecipeError
from bakron.grids import Grid, UniformGrid
from bakron.hessian.factor import Step, weighting
from bakron.hessian.gradients import sample
from bakron.kron import Kron
from bakron.solver import Solution, solve

Loss = Callable[[Any, Any], Tensor]  # (output of the model, batch) -> scalar


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | str | None = "sampled",
    linears: Iterable[str] | None = None,
    factor: str = "mixed",
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, Kron]:
    """Hessians of all linears of a module at once, from forward and backward hooks.

    Every linear's factors are alive together, in float32: 4 (m^2 + n^2) bytes each. Name the linears to do a part at a time. The model runs in evaluation mode,
    and leaves this function as it came: weights, `requires_grad`, `.grad` and modes are untouched.

    Args:
        model: Any module. Inputs of its linears are `[b, ..., n]`, the first dimension that of sequences or images. Padding counts like all else.
        batches: What the model is called with: a mapping as keyword arguments, a tuple or list as arguments, anything else as the only one.
        loss: Of the gradients behind B. "sampled": the output (or its `logits`) holds logits `[..., classes]`, and labels are drawn from their softmax, which
            gives the true Fisher. A function of (output, batch): its scalar, which should be summed over tokens or images, not averaged. None: no gradients,
            B = I (GPTQ).
        linears: Names of `nn.Linear` within the model; None for all.
        factor: A name in `bakron.FACTORS`, `shampoo:K` or `kl:K`; of no account if loss is None. Those of several steps go over the batches once a step.
        seed: Of sampled labels; torch's own generator is left alone.
        forward: Called as `forward(model, batch)` in place of the rule for batches above.

    Returns:
        Undamped Kron per linear, in the model's order.

    Raises:
        RecipeError: Unknown factor or loss; batches that can be gone over only once with a factor of several steps.
        ModelError: A name is no linear, none is left, or one was not reached.
        FactorError: A sum is not finite; the linear is named.
    """
    found = _linears(model, linears)
    try:
        weigh = weighting(factor if loss is not None else "kfac")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if isinstance(loss, str) and loss != "sampled":
        raise RecipeError(f"loss {loss!r}", "'sampled', a function of (output, batch), or None")
    if weigh.steps > 1 and isinstance(batches, Iterator):
        raise RecipeError(f"factor {factor}, which goes over the batches {weigh.steps} times, with an iterator", "a list of batches")
    call = forward or _call
    steps: dict[str, Step] = {}
    for _ in range(weigh.steps):
        before, steps = steps, {}
        for name, linear in found.items():
            steps[name] = Step(
                (linear.out_features, linear.in_features), weigh, before.get(name), device=linear.weight.device, dtype=torch.float32
            )
        objective = _sampled(torch.Generator().manual_seed(seed)) if loss == "sampled" else loss
        with _frozen(model), _hooked(found, steps, gradients=objective is not None):
            for batch in batches:
                with torch.set_grad_enabled(objective is not None):
                    output = call(model, batch)
                    if callable(objective):
                        objective(output, batch).backward()
    return {name: _kron(name, step, loss is not None) for name, step in steps.items()}


def quantize_linear_(linear: nn.Linear, kron: Kron, grid: Grid | None = None, *, method: str = "auto", **fit: Any) -> Solution:
    """Round the weight of a live linear in place.

    Args:
        linear: Its weight `[m, n]` becomes the rounded one, in its own dtype; bias and all else stay.
        kron: Damped Hessian, such as `collect(...)[name].damp()`.
        grid: To round to. None: one is fitted.
        method: A solver's schedule, a name in `bakron.METHODS`; which Hessian, and so whether this is GPTQ, is up to `kron`.
        **fit: Arguments of `UniformGrid.fit` if no grid is given, such as `levels=7, group_size=64, scale="curvature"`. Scales are stored in the weight's dtype.

    Returns:
        What the solver found; codes and, with the grid, scales are what a file would hold.

    Raises:
        ModelError: It is no `nn.Linear`.
        RecipeError: A grid and arguments to fit one, or neither.
        BakronError: As `solve` and `UniformGrid.fit`.
    """
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"a {type(linear).__name__}", "a torch.nn.Linear")
    if (grid is None) == (not fit):
        raise RecipeError(
            "no grid" if grid is None else f"a grid and {', '.join(sorted(fit))}", "a grid, or what to fit one with, such as levels=7"
        )
    W = linear.weight.detach()
    if grid is None:
        grid = UniformGrid.fit(W, **{"kron": kron, "dtype": W.dtype, **fit})
    solution = solve(W, kron, grid, method=method)
    with torch.no_grad():
        linear.weight.copy_(solution.values)
    return solution


def _linears(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Linear]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = list(linears) if names is None else list(names)
    if unknown := [name for name in wanted if name not in linears]:
        raise ModelError(f"{unknown[0]!r} is no torch.nn.Linear of this model", f"a name such as {', '.join(list(linears)[:5])}")
    if not wanted:
        raise ModelError("no linear to collect for", "at least one torch.nn.Linear")
    return {name: linear for name, linear in linears.items() if name in set(wanted)}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _sampled(generator: torch.Generator) -> Loss:
    """Cross entropy, summed, with labels drawn from the model's own softmax."""

    def loss(output: Any, _batch: Any) -> Tensor:
        logits = (output if isinstance(output, Tensor) else output.logits).flatten(0, -2).float()
        labels = sample(torch.softmax(logits.detach(), -1), generator)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    return loss


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients of parameters, and everything as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _hooked(linears: Mapping[str, nn.Linear], steps: Mapping[str, Step], gradients: bool) -> Iterator[None]:
    """Hooks that add every call of every linear to its step, inputs alone or with the gradient at the output."""

    def add(step: Step, x: Tensor, g: Tensor) -> None:
        step.add(x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1]))

    def hook(step: Step, _module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        x = arguments[0].detach()
        if not gradients:
            assert step.A is not None
            step.A.add(x)
            return None
        first = not output.requires_grad  # no gradient flows from before this linear: its output is where the graph begins
        leaf = output.detach().requires_grad_() if first else output
        leaf.register_hook(partial(add, step, x))
        return leaf.clone() if first else None  # what comes next may work in place, which a leaf forbids

    handles = [linear.register_forward_hook(partial(hook, steps[name])) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kron(name: str, step: Step, two_sided: bool) -> Kron:
    assert step.A is not None
    if not (step.B if two_sided else step.A).tokens:
        raise ModelError(
            f"no {'gradient' if two_sided else 'input'} reached {name}", "a linear that every batch runs through", "Leave it out of linears"
        )
    try:
        return Kron(step.A.value(), step.B.value() if two_sided else None)
    except FactorError as error:
        raise FactorError(f"{name}: {error.saw}", error.expected, error.do, index=error.index) from error
