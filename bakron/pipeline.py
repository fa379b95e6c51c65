"""The block loop: ask the estimator for a block's Hessians on the inputs that the quantized prefix gives, round its linears, go on with the rounded block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bakron import formats, ranks
from bakron.config import Recipe
from bakron.errors import FactorError, ModelError
from bakron.grids import OffsetGrid, UniformGrid, check_groups
from bakron.hessian import BackpropEstimator, Candidate, Estimator, Heldout, candidates, choose, rows_here
from bakron.kron import Factor, Kron
from bakron.models.linears import Linear, Routed
from bakron.models.walk import Walk
from bakron.process import memory, trim
from bakron.solver import Solution, polish, refit, solve
from bakron.solver.orders import arrange

Progress = Callable[[str, int, int], None]
FEW = 1 / 16  # tokens per input below which an expert is rounded to nearest: feedback from so few makes it worse as often as better
LARGE = 1 << 20  # weights of a linear from which on what its solve has freed is given back at once, and not with the block
RETRIES, RAISE, LARGEST_DAMPING = 8, 10.0, 10.0


@dataclass
class Clock:
    """Seconds per stage, and since the clock was made or, set back, would have been; `entered` is called with a stage's name when it begins."""

    seconds: dict[str, float] = field(default_factory=dict)
    entered: Callable[[str], None] = lambda _: None
    begun: float = field(default_factory=time.perf_counter)
    under_way: dict[str, float] = field(default_factory=dict)

    def so_far(self) -> dict[str, float]:
        """Seconds per stage until now, and all of them in `total`."""
        now = time.perf_counter()
        stages = {name: self.seconds.get(name, 0.0) + now - self.under_way.get(name, now) for name in {**self.seconds, **self.under_way}}
        return stages | {"total": now - self.begun}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a with statement to a stage."""
        self.under_way[name] = time.perf_counter()
        self.entered(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - self.under_way.pop(name)


@dataclass(frozen=True)
class Rounded:
    """A linear after rounding."""

    values: Tensor
    codes: Tensor
    grid: UniformGrid
    event: dict[str, Any]


Treat = Callable[[Linear, Kron | None, Recipe, torch.dtype, str], Rounded]


def run(
    walk: Walk,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    clock: Clock,
    ids: Tensor | None = None,
    estimator: Estimator | None = None,
    keep: Callable[[int, dict[str, Rounded]], None],
    stored: Callable[[int], dict[str, Tensor] | None] = lambda _: None,
    treat: Treat | None = None,
    progress: Progress = lambda *_: None,
    observe: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Round every linear of every block, in place in the walk's model.

    Args:
        walk: The model; its linears end up with their rounded values.
        recipe: Resolved.
        dtype: In which scales are stored.
        clock: Receives seconds of the stages "calibrate" (forward passes of the calibration text), "hessian" and "solve".
        ids: Calibration tokens `[N, T]`, of which each process takes its share; None for rtn.
        estimator: Of the Hessians; None for rtn.
        keep: Called, on process 0, with every block's index and its rounded linears by name, before the next block starts.
        stored: From a block's index to the values of its linears by name, if it was rounded before; such a block is only run for what the next one sees.
        treat: What to do with a linear, in place of `round_linear`.
        progress: Called with (stage, done, total).
        observe: Called with a linear's event when it is rounded.

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    treat = treat or round_linear
    with clock.stage("calibrate"):
        held = estimator.held if isinstance(estimator, BackpropEstimator) else 0
        hidden = walk.embed(ids[rows_here(len(ids), held)]) if ids is not None else None
    for i in range(len(walk)):
        if (values := stored(i)) is not None:
            with clock.stage("calibrate"):
                hidden = _replay(walk, i, hidden, values if recipe.inputs == "quantized" else {})
            progress("quantize", i + 1, len(walk))
            continue
        with clock.stage("load"):
            walk.load(i)
        krons: dict[str, Kron] = {}
        told: dict[str, dict[str, Any]] = {}
        gate: Heldout | None = None
        if estimator is not None and hidden is not None and walk.chosen(i):
            with clock.stage("hessian"), finite(walk, i, hidden):
                krons = estimator.block(i, hidden)
                gate = estimator.heldout(i) if recipe.chooses and isinstance(estimator, BackpropEstimator) else None
                told = {name: tell(estimator, name, krons[name], ids, gate, recipe) for name in krons}
        if hidden is not None and recipe.inputs == "original" and i + 1 < len(walk):
            with clock.stage("calibrate"):
                hidden = walk.apply(i, hidden)
        with clock.stage("solve"):
            rounded, linears, owners = {}, walk.linears(i), walk.owners(i)
            for name in (name for name in walk.chosen(i) if owners[name] == ranks.rank()):
                whole = f"{walk.prefix(i)}.{name}"
                rounded[name] = _round_one(linears[name], name, whole, krons.pop(name, None), estimator, gate, recipe, dtype, treat)
                rounded[name].event.update({"block": i, "tokens": 0, **told.get(name, {})})
                rounded[name].event["elapsed"] = round(time.perf_counter() - clock.begun, 3)
                rounded[name].event["memory"] = memory()
                observe(rounded[name].event)
                if linears[name].weight.numel() >= LARGE:
                    trim()
            rounded = _exchanged(walk, i, rounded, observe)
        with clock.stage("write"):
            if ranks.first():
                keep(i, rounded)
        del rounded, krons, told, gate  # none of it is there while the next block's Hessians are made
        if hidden is not None and recipe.inputs == "quantized" and i + 1 < len(walk):
            with clock.stage("calibrate"):
                hidden = walk.apply(i, hidden)
        progress("quantize", i + 1, len(walk))


def _round_one(
    linear: Linear,
    name: str,
    whole: str,
    kron: Kron | None,
    estimator: Estimator | None,
    gate: Heldout | None,
    recipe: Recipe,
    dtype: torch.dtype,
    treat: Treat,
) -> Rounded:
    """One linear, called `name` in its block, with its own Hessian, the best of several, or to nearest if it is an expert that few tokens reach."""
    if kron is not None and estimator is not None and starved(linear, estimator.tokens[name]):
        rounded = treat(linear, Kron(torch.eye(linear.in_features)), recipe, dtype, whole)
        rounded.event["fallback"] = "nearest"
        return rounded
    if gate is None or kron is None or not isinstance(estimator, BackpropEstimator):
        return treat(linear, kron, recipe, dtype, whole)
    tried = candidates(*estimator.tried.pop(name), recipe)
    final = candidates(kron, estimator.unweighted.get(name), recipe)
    return round_best(linear, tried, final, recipe, dtype, whole, partial(gate.changes, name))


def _exchanged(walk: Walk, i: int, rounded: dict[str, Rounded], observe: Callable[[dict[str, Any]], None]) -> dict[str, Rounded]:
    """All linears of block i, rounded and in their place, from what each process has rounded."""
    if ranks.size() == 1:
        return rounded
    found, linears, owners = {}, walk.linears(i), walk.owners(i)
    for name in walk.chosen(i):
        own = rounded.get(name)
        codes, grid, event = ranks.told(None if own is None else (own.codes.to(torch.int16), own.grid, own.event), owners[name])
        if own is None:
            codes = codes.to(torch.int32)
            own = Rounded(grid.values(codes), codes, grid, event)
            linears[name].weight.data.copy_(own.values)
            observe(event)
        found[name] = own
    return found


def starved(linear: Linear, tokens: int) -> bool:
    """Whether a linear is one of an expert that too few tokens reach for a Hessian."""
    return isinstance(linear, Routed) and tokens < FEW * linear.in_features


@contextmanager
def finite(walk: Walk, i: int, hidden: Tensor) -> Iterator[None]:
    """Say, if a factor of block i cannot be made, whether and where activations are not finite."""
    try:
        yield
    except FactorError as error:
        with torch.no_grad():
            finite = bool(torch.isfinite(walk.apply(i, hidden)).all())
        if finite:
            raise
        raise ModelError(
            f"activations are not finite, first at {walk.first_bad(i, hidden)}", "finite activations", "Check the model on this text first"
        ) from error


def _replay(walk: Walk, i: int, hidden: Tensor | None, values: dict[str, Tensor]) -> Tensor | None:
    """What block i, with these values in place of its weights, makes of the hidden states."""
    if hidden is None or i + 1 == len(walk):
        return hidden
    walk.load(i)
    for name, linear in walk.linears(i).items():
        if name in values:
            linear.weight.data.copy_(values[name])
    return walk.apply(i, hidden)


def ready(recipe: Recipe) -> None:
    """Compile what the CPU needs, once a machine (it is cached on disk), so that no layer's time holds it."""
    from bakron.solver import tiled

    if recipe.method != "rtn":
        tiled.ready(torch.float32)
    UniformGrid.fit(torch.ones(1, 1), 3, scale="mse")


def round_linear(
    linear: Linear, kron: Kron | None, recipe: Recipe, dtype: torch.dtype, name: str, fitted: dict[Factor, UniformGrid] | None = None
) -> Rounded:
    """Fit a grid, round one linear, put the rounded weight in its place.

    Args:
        linear: Its weight `[m, n]` is replaced by the rounded one.
        kron: Undamped Hessian; None rounds to nearest.
        recipe: Resolved.
        dtype: In which scales are stored.
        name: Of the linear in the checkpoint, for messages.
        fitted: Grids of this linear by damped A, which alone decides them: looked up and added to.

    Returns:
        Values, codes, grid, and what to log.

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    start = time.perf_counter()
    W = linear.weight.detach().float().cpu()
    raised, fallback, order = False, None, recipe.order or "natural"
    if kron is not None:
        kron, raised, fallback = usable(kron if recipe.method == "bakron" else Kron(kron.A), recipe, name)
    factored = time.perf_counter()
    grid = None if fitted is None or kron is None else fitted.get(kron.A)
    if grid is None:
        grid = fit_grid(W, recipe, _in_order(kron, order), dtype)
    if fitted is not None and kron is not None:
        fitted[kron.A] = grid
    ready = time.perf_counter()
    event: dict[str, Any] = {"linear": name, "method": recipe.method, "shape": list(W.shape)}
    if kron is None:
        codes, values = grid.project(W)
        event |= {"damping": {"a": [], "b": []}, "loss": None, "relative_loss": None, "nearest_loss": None}
        seconds = {"factor": 0.0, "fit": ready - factored, "sweep": time.perf_counter() - ready}
    else:
        solution = solve(W, kron, grid, order=order)
        losses = {"sweep": solution.loss}
        if recipe.refit:
            solution, grid = refit(solution, W, kron, grid, reround=True)
            losses["refit"] = solution.loss
        if recipe.polish:
            solution = polish(solution, W, kron, grid, sweeps=recipe.polish)
            losses["polish"] = solution.loss
        codes, values = solution.codes, solution.values
        event |= _describe(solution, kron, W) | {"nearest_loss": _nearest_loss(W, kron, grid), "losses": losses, "damping_raised": raised}
        seconds = {"factor": factored - start, "fit": ready - factored, "sweep": solution.seconds}
    event["seconds"] = {key: round(value, 6) for key, value in seconds.items()}
    if fallback:
        event |= {"fallback": fallback, "failed": True, "damping_raised": True}
    linear.weight.data.copy_(values)
    return Rounded(values, codes, grid, event)


def fit_grid(W: Tensor, recipe: Recipe, kron: Kron | None, dtype: torch.dtype) -> UniformGrid:
    """The grid of a weight `[m, n]`, on scales that the recipe's format can hold."""
    form, rule, levels = formats.holds(recipe.format, recipe.gguf_type).form, recipe.scale or "absmax", recipe.levels or 0
    if kron is None and rule == "curvature":
        rule = "mse"  # a linear that fell back to nearest rounding has no Hessian to take curvature from
    if form.startswith("super"):
        return OffsetGrid.fit_super(W, levels, recipe.group_size or 0, rule, kron, int(form.removeprefix("super")))
    return UniformGrid.fit(W, levels, recipe.group_size, rule, recipe.symmetric, kron, dtype=dtype, scale_format=form)


def round_best(
    linear: Linear,
    tried: dict[str, Candidate],
    final: dict[str, Candidate],
    recipe: Recipe,
    dtype: torch.dtype,
    name: str,
    changes: Callable[[Tensor], Tensor],
) -> Rounded:
    """Round one linear with each of several Hessians, choose the first unless another one does clearly less harm on tokens held out, and round with that one.

    Args:
        linear: Its weight `[m, n]` is replaced by the rounded one.
        tried: Hessians and dampings by name, the default first, made without the tokens held out.
        final: The same made of all tokens: what is rounded with in the end, so that no token is lost to the choice.
        recipe: Resolved.
        dtype: In which scales are stored.
        name: Of the linear in the checkpoint, for messages.
        changes: What an error `[m, n]` does to the loss of each token, `[N, samples, T]`.

    Returns:
        The one rounded last; its event tells the errors of all as `gate`, and the seconds of all together.

    Raises:
        FactorError: A factor stays indefinite at the largest damping.
    """
    start = time.perf_counter()
    W = linear.weight.detach().clone()
    harm, fitted, seconds = {}, dict[Factor, UniformGrid](), []

    def rounded(one: Candidate) -> Rounded:
        linear.weight.data.copy_(W)
        own = recipe.model_copy(update={"damp_a": one.damp_a, "damp_b": one.damp_b})
        result = round_linear(linear, one.kron, own, dtype, name, fitted)
        seconds.append(result.event["seconds"])
        return result

    for candidate, one in tried.items():
        harm[candidate] = changes(rounded(one).values - W.float().cpu())
    gate = choose(harm)
    kept = final[gate["chosen"]]
    best = rounded(kept)
    best.event["seconds"] = {key: round(sum(one[key] for one in seconds), 6) for key in seconds[0]}
    best.event["gate"] = gate | {"damp_a": kept.damp_a, "damp_b": kept.damp_b, "seconds": round(time.perf_counter() - start, 6)}
    return best


def usable(kron: Kron, recipe: Recipe, name: str) -> tuple[Kron | None, bool, str | None]:
    """Damp and factor; what cannot be factored even with the largest damping stops the run, or is done without if the recipe says so.

    Returns:
        The damped Kron, or None for nearest rounding; whether its damping was raised; and what was fallen back to: None, "one-sided" (B = I) or "nearest".

    Raises:
        FactorError: A factor is indefinite at the largest damping, and `on_failure` is "stop".
    """
    try:
        return *damped(kron, recipe, name), None
    except FactorError as error:
        if recipe.on_failure != "fallback":
            raise FactorError(
                error.saw, error.expected, f"{error.do or ''} --on-failure fallback goes on without it".strip(), index=error.index
            ) from error
    try:
        if kron.B is not None:
            return *damped(Kron(kron.A), recipe, name), "one-sided"
    except FactorError:
        pass
    return None, True, "nearest"


def damped(kron: Kron, recipe: Recipe, name: str) -> tuple[Kron, bool]:
    """Damp and factor; where a factor is not positive definite, raise its damping geometrically up to a cap.

    Returns:
        The damped Kron, and whether its damping had to be raised above the recipe's.

    Raises:
        FactorError: It is still indefinite at the cap.
    """
    if recipe.autos:
        raise ValueError("damping auto is a choice between dampings: damp with one of them")
    a, b, rule = float(recipe.damp_a or 0), float(recipe.damp_b or 0), recipe.damping or "diagonal"
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


def _in_order(kron: Kron | None, order: str) -> Kron | None:
    """A Hessian whose pivots are what each input weighs in the loss if it is rounded in that order, for the fit of scales."""
    if kron is None or order == "natural":
        return kron
    columns = arrange(kron.A, order, kron.A.size)
    pivots = torch.empty_like(kron.A.pivots)
    pivots[columns] = kron.A.permuted(columns).pivots
    return Kron(torch.diag(pivots))


def _describe(solution: Solution, kron: Kron, W: Tensor) -> dict[str, Any]:
    """What events.jsonl tells of a solve."""
    heads = () if kron.B is None else kron.B.heads
    left = torch.cat([head.H.to(W) @ rows for head, rows in zip(heads, W.split(heads[0].size))]) if heads else W
    whole = float((W @ kron.A.H.to(W) * left).sum())  # float32 will do: it is for reading
    return {
        "solver": solution.method,
        "damping": {side: [list(pair) for pair in pairs] for side, pairs in solution.damping.items()},
        "order": list(solution.order),
        "dead": solution.dead,
        "loss": solution.loss,
        "relative_loss": solution.loss / whole if whole > 0 else 0.0,
        "rho_a": kron.A.rho,
        "rho_b": None if kron.B is None else kron.B.rho,
    }


def _nearest_loss(W: Tensor, kron: Kron, grid: UniformGrid) -> float:
    """Loss of rounding each weight to its nearest level of the same grid: what error feedback is measured against."""
    E = grid.project(W)[1] - W
    right = E @ kron.A.H.to(E)
    return float((right * (E if kron.B is None else kron.B.times(E))).sum())  # float32 will do: it is for reading


def tell(estimator: Estimator, name: str, kron: Kron, ids: Tensor | None, heldout: Heldout | None, recipe: Recipe) -> dict[str, Any]:
    """What events.jsonl tells of a linear's Hessian."""
    found: dict[str, Any] = {
        "tokens": estimator.tokens[name],
        "effective_tokens": {side: round(n, 1) for side, n in estimator.effective[name].items()},
        "outliers": estimator.outliers[name],
    }
    for side in found["outliers"].values():
        for token in side["largest"]:
            if ids is not None and "position" in token:
                token["id"] = int(ids[token["sequence"], token["position"]])
    if recipe.diagnostics:
        found["top_decile"] = _spectrum(kron)
        if heldout is not None and isinstance(estimator, BackpropEstimator):
            found["alignment"] = heldout.alignment(name, estimator.tried[name][0])
    return found


def _spectrum(kron: Kron) -> dict[str, float | None]:
    """Share of each factor's trace in the largest tenth of its eigenvalues, before damping."""
    return {"a": round(kron.A.top_share(0.1), 5), "b": None if kron.B is None else round(kron.B.top_share(0.1), 5)}


def check_widths(walk: Walk, recipe: Recipe) -> None:
    """Refuse a group size that does not divide some linear's width, and linears that do not fit the format's blocks.

    Raises:
        RecipeError: All such linears are named.
    """
    linears = {name: walk.linears(i)[name] for i in range(len(walk)) for name in walk.chosen(i)}
    check_groups({name: linear.in_features for name, linear in linears.items()}, recipe.group_size)
    formats.check_shapes(recipe.format, recipe.gguf_type, {name: tuple(linear.weight.shape) for name, linear in linears.items()})


def bits_per_weight(levels: int, beside: float, weights: int, scales: int) -> float:
    """Information in codes, and in what stands beside them for each scale (`beside`: bits of a scale and its zero point), per quantized weight."""
    import math

    return math.log2(levels) + beside * scales / max(weights, 1)
