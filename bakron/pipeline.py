"""The block loop: ask the estimator for a block's Hessians on the inputs that the quantized prefix gives, round its linears, go on with the rounded block."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bakron import formats
from bakron.config import Recipe
from bakron.errors import FactorError
from bakron.grids import UniformGrid, check_groups
from bakron.hessian import BackpropEstimator, Estimator, Heldout
from bakron.kron import Kron
from bakron.models.walk import Walk
from bakron.solver import Solution, solve

Progress = Callable[[str, int, int], None]
RETRIES, RAISE, LARGEST_DAMPING = 8, 10.0, 10.0


@dataclass
class Clock:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a with statement to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Rounded:
    """A linear after rounding."""

    values: Tensor
    codes: Tensor
    grid: UniformGrid
    event: dict[str, Any]


Treat = Callable[[nn.Linear, Kron | None, Recipe, torch.dtype, str], Rounded]


def run(
    walk: Walk,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    clock: Clock,
    ids: Tensor | None = None,
    estimator: Estimator | None = None,
    keep: Callable[[int, dict[str, Rounded]], None],
    treat: Treat | None = None,
    progress: Progress = lambda *_: None,
) -> None:
    """Round every linear of every block, in place in the walk's model.

    Args:
        walk: The model; its linears end up with their rounded values.
        recipe: Resolved.
        dtype: In which scales are stored.
        clock: Receives seconds of the stages "calibrate" (forward passes of the calibration text), "hessian" and "solve".
        ids: Calibration tokens `[N, T]`; None for rtn.
        estimator: Of the Hessians; None for rtn.
        keep: Called with every block's index and its rounded linears by name, before the next block starts.
        treat: What to do with a linear, in place of `round_linear`.
        progress: Called with (stage, done, total).

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    treat = treat or round_linear
    with clock.stage("calibrate"):
        hidden = walk.embed(ids) if ids is not None else None
    for i in range(len(walk)):
        krons: dict[str, Kron] = {}
        gate: Heldout | None = None
        if estimator is not None and hidden is not None:
            with clock.stage("hessian"):
                krons = estimator.block(i, hidden)
                gate = estimator.heldout(i) if recipe.gate and isinstance(estimator, BackpropEstimator) else None
                spectra = {name: _spectrum(kron) for name, kron in krons.items()} if recipe.diagnostics else {}
        if hidden is not None and recipe.inputs == "original" and i + 1 < len(walk):
            with clock.stage("calibrate"):
                hidden = walk.apply(i, hidden)
        with clock.stage("solve"):
            rounded = {}
            for name, linear in walk.linears(i).items():
                whole, kron = f"{walk.prefix(i)}.{name}", krons.pop(name, None)
                if gate is None or kron is None:
                    rounded[name] = treat(linear, kron, recipe, dtype, whole)
                else:
                    candidates = {"two-sided": kron, "one-sided": Kron(kron.A)}
                    if name in estimator.unweighted:
                        candidates["unweighted"] = Kron(estimator.unweighted[name])
                    rounded[name] = round_best(linear, candidates, recipe, dtype, whole, partial(gate.error, name))
                rounded[name].event.update(block=i, tokens=0 if estimator is None else estimator.tokens[name])
                if estimator is not None:
                    rounded[name].event["effective_tokens"] = {side: round(n, 1) for side, n in estimator.effective[name].items()}
                if recipe.diagnostics:
                    rounded[name].event["top_decile"] = spectra[name]
        with clock.stage("write"):
            keep(i, rounded)
        if hidden is not None and recipe.inputs == "quantized" and i + 1 < len(walk):
            with clock.stage("calibrate"):
                hidden = walk.apply(i, hidden)
        progress("quantize", i + 1, len(walk))


def round_linear(linear: nn.Linear, kron: Kron | None, recipe: Recipe, dtype: torch.dtype, name: str) -> Rounded:
    """Fit a grid, round one linear, put the rounded weight in its place.

    Args:
        linear: Its weight `[m, n]` is replaced by the rounded one.
        kron: Undamped Hessian; None rounds to nearest.
        recipe: Resolved.
        dtype: In which scales are stored.
        name: Of the linear in the checkpoint, for messages.

    Returns:
        Values, codes, grid, and what to log.

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    start = time.perf_counter()
    W = linear.weight.detach().float().cpu()
    raised = False
    if kron is not None:
        kron, raised = damped(kron if recipe.method == "bakron" else Kron(kron.A), recipe, name)
    factored = time.perf_counter()
    form = formats.holds(recipe.format, recipe.gguf_type).form
    rule = recipe.scale or "absmax"
    grid = UniformGrid.fit(W, recipe.levels, recipe.group_size, rule, recipe.symmetric, kron, dtype=dtype, scale_format=form)
    fitted = time.perf_counter()
    event: dict[str, Any] = {"linear": name, "method": recipe.method, "shape": list(W.shape)}
    if kron is None:
        codes, values = grid.project(W)
        event |= {"damping": {"a": [], "b": []}, "loss": None, "relative_loss": None}
        seconds = {"factor": 0.0, "fit": fitted - factored, "sweep": time.perf_counter() - fitted}
    else:
        solution = solve(W, kron, grid)
        codes, values = solution.codes, solution.values
        event |= _describe(solution, kron, W) | {"damping_raised": raised}
        seconds = {"factor": factored - start, "fit": fitted - factored, "sweep": solution.seconds}
    event["seconds"] = {key: round(value, 6) for key, value in seconds.items()}
    linear.weight.data.copy_(values)
    return Rounded(values, codes, grid, event)


def round_best(
    linear: nn.Linear, candidates: dict[str, Kron], recipe: Recipe, dtype: torch.dtype, name: str, error: Callable[[Tensor], float]
) -> Rounded:
    """Round one linear with each of several Hessians, keep the result that does least harm on tokens held out.

    Args:
        linear: Its weight `[m, n]` is replaced by the best rounded one.
        candidates: Undamped Hessians by name.
        recipe: Resolved.
        dtype: In which scales are stored.
        name: Of the linear in the checkpoint, for messages.
        error: Harm of an error `[m, n]`.

    Returns:
        The best; its event tells the errors of all as `gate`, and the seconds of all together.

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    W = linear.weight.detach().clone()
    results, errors = {}, {}
    for candidate, kron in candidates.items():
        linear.weight.data.copy_(W)
        results[candidate] = round_linear(linear, kron, recipe, dtype, name)
        errors[candidate] = error(results[candidate].values - W.float().cpu())
    chosen = min(errors, key=lambda candidate: errors[candidate])
    best = results[chosen]
    linear.weight.data.copy_(best.values)
    seconds = [result.event["seconds"] for result in results.values()]
    best.event["seconds"] = {key: round(sum(one[key] for one in seconds), 6) for key in seconds[0]}
    best.event["gate"] = {"chosen": chosen, "errors": errors}
    return best


def damped(kron: Kron, recipe: Recipe, name: str) -> tuple[Kron, bool]:
    """Damp and factor; where a factor is not positive definite, raise its damping geometrically up to a cap.

    Returns:
        The damped Kron, and whether its damping had to be raised above the recipe's.

    Raises:
        FactorError: It is still indefinite at the cap.
    """
    a, b, rule = recipe.damp_a or 0.0, recipe.damp_b or 0.0, recipe.damping or "diagonal"
    for attempt in range(RETRIES + 1):
        result = kron.damp(a, b, rule)
        try:
            result.factor()
            return result, attempt > 0
        except FactorError as error:
            failed = "b" if result.A.factored else "a"
            if error.damping is None or attempt == RETRIES or (a if failed == "a" else b) >= LARGEST_DAMPING:
                raise FactorError(f"{name}, factor {failed.upper()}: {error.saw}", error.expected, error.do, index=error.index) from error
            raised = min(max((a if failed == "a" else b) * RAISE, 1e-4), LARGEST_DAMPING)
            a, b = (raised, b) if failed == "a" else (a, raised)
    raise AssertionError("unreachable")


def _describe(solution: Solution, kron: Kron, W: Tensor) -> dict[str, Any]:
    """What events.jsonl tells of a solve."""
    right = W @ kron.A.H.to(W)
    whole = float((right * (W if kron.B is None else kron.B.H.to(W) @ W)).sum())  # float32 will do: it is for reading
    return {
        "solver": solution.method,
        "damping": {side: [list(pair) for pair in pairs] for side, pairs in solution.damping.items()},
        "dead": solution.dead,
        "loss": solution.loss,
        "relative_loss": solution.loss / whole if whole > 0 else 0.0,
        "rho_a": kron.A.rho,
        "rho_b": None if kron.B is None else kron.B.rho,
    }


def _spectrum(kron: Kron) -> dict[str, float | None]:
    """Share of each factor's trace in the largest tenth of its eigenvalues, before damping."""
    return {"a": round(kron.A.top_share(0.1), 5), "b": None if kron.B is None else round(kron.B.top_share(0.1), 5)}


def check_widths(walk: Walk, recipe: Recipe) -> None:
    """Refuse a group size that does not divide some linear's width, and linears that do not fit the format's blocks.

    Raises:
        RecipeError: All such linears are named.
    """
    linears = walk.linears(0)
    check_groups({name: linear.in_features for name, linear in linears.items()}, recipe.group_size)
    formats.check_shapes(recipe.format, recipe.gguf_type, {name: tuple(linear.weight.shape) for name, linear in linears.items()})


def bits_per_weight(levels: int, scale_bits: int, zero_bits: int, weights: int, scales: int) -> float:
    """Information in codes, scales and zero points, per quantized weight."""
    import math

    return math.log2(levels) + (scale_bits + zero_bits) * scales / max(weights, 1)


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
