"""`backprop`: the global Fisher, E[x x^T (x) g g^T] with g the gradient of the model's own log likelihood at a linear's output.

Labels are sampled from the model's softmax, one per token (the true Fisher, which is the Hessian of the KL divergence at the original weights), or are the text's
own next tokens (`empirical`: another matrix, in which mispredicted tokens weigh most; the last token of a sequence has none and no loss). Losses are summed, not
averaged, so that every token's gradient is its own.

Outliers: tokens (by `sequence`: sequences) whose weight in A or B is above a quantile of the weights can be clipped to it, and the first tokens of a sequence,
where models like to put an attention sink, can be left out of both A and B.

The gradient pass goes over the original model once, before any rounding, from the last block to the first. Block inputs are kept going forward, as many as
`boundary_memory` holds, and computed again where they were not (`schedule`); each block is run once more with gradients, so that one block's activations, weights
and factors are alive on the device at a time. Of each linear it keeps, on disk, B (packed) and one number a token: its weight in
A, such as |g_t|^2. A is accumulated later, when the block's turn to be rounded comes, on the inputs that the quantized prefix really gives it, weighted by those
numbers. Factorisation `sequence` is no weighted sum over tokens: there A, too, is of the original model's inputs, and comes from the gradient pass.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bakron import rundir
from bakron.errors import ModelError, RecipeError
from bakron.hessian import schedule
from bakron.hessian.factor import Step, Weighting, pack, unpack
from bakron.hessian.factor import weighting as weighting_of
from bakron.hessian.input import input_factors, input_moments
from bakron.kron import Factor, Kron
from bakron.models.walk import Walk

Progress = Callable[[str, int, int], None]
HEAD_TOKENS = 128  # tokens whose logits are alive at a time: a buffer small enough for allocators to recycle
MANIFEST = "manifest.json"
IN_FLIGHT = 3  # tensors as large as a block's input beside those kept: what enters and leaves the block that runs, and the gradient


class BackpropEstimator:
    """Factors of the global Fisher from one gradient pass.

    Args:
        walk: The original model.
        ids: Calibration tokens `[N, T]`.
        store: Directory for the gradient pass's results; a complete one of the same model, tokens, seed and weighting of B is reused.
        factor: A name in `FACTORS`, `shampoo:K` or `kl:K`.
        seed: Of the sampled labels.
        fingerprint: Identifies the model's weights.
        labels: "sampled" or "empirical".
        clip: Quantile of the weights in A and of those in B above which they are lowered to it; None clips nothing.
        skip: First tokens of each sequence that count neither in A nor in B.
        held: Last sequences that count in neither either: `heldout` measures errors on their gradients.
        boundary_memory: Bytes for block inputs and gradients between blocks; None keeps every block's input. Less memory costs more forward passes, and
            changes nothing else.
        progress: Called with (stage, done, total).

    Attributes:
        unweighted: A of the last block with every token counted once, per linear; only with sequences held out, and where A is weighted.
        passes: What the gradient pass did: runs of single blocks `forward` and `backward`, `kept` block inputs at most and their `bytes` with all that was in
            flight; None if a stored one is reused.

    Raises:
        RecipeError: `store` holds another run's results, or the boundary memory is too small.
        ModelError: A gradient is not finite.
    """

    def __init__(
        self,
        walk: Walk,
        ids: Tensor,
        store: Path,
        *,
        factor: str = "mixed",
        seed: int = 0,
        fingerprint: str = "",
        labels: str = "sampled",
        clip: float | None = None,
        skip: int = 0,
        held: int = 0,
        boundary_memory: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.walk, self.store, self.weighting = walk, store, weighting_of(factor)
        self.clip, self.skip, self.held = clip, skip, held
        self.unweighted: dict[str, Factor] = {}
        self.tokens: dict[str, int] = {}
        self.effective: dict[str, dict[str, float]] = {}
        key = {
            "model": fingerprint,
            "tokens": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(ids.shape),
            "seed": seed,
            **self.weighting.b_key,
            "labels": labels,
            "clip": clip if self.weighting.b_by_input else None,
            "skip": skip,
            "held": held,
        }
        self.passes: dict[str, int] | None = None
        if not _complete(store, key):
            self.passes = gradient_pass(
                walk,
                ids,
                store,
                seed=seed,
                weighting=self.weighting,
                labels=labels,
                clip=clip,
                skip=skip,
                held=held,
                slots=slots_in(walk, ids, boundary_memory),
                progress=progress or (lambda *_: None),
            )
            rundir.write_text(store / MANIFEST, json.dumps(key, indent=1))

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i for A; B from the gradient pass.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU without the sequences held out, usually from the quantized prefix.

        Returns:
            Undamped Kron per linear.
        """
        stored = rundir.read_tensors(_file(self.store, i))
        shape = inputs.shape[:2]
        linears = self.walk.linears(i)
        B = {name: Factor(unpack(stored[f"{name}.B"], linear.out_features)) for name, linear in linears.items()}
        if self.held and self.weighting.a_by_gradient:
            self.unweighted = input_factors(self.walk, i, input_moments(self.walk, i, inputs, {}, skip=self.skip))
        of_b = {name: float(stored[f"{name}.effective"]) for name in linears}
        if self.weighting.by_sequence:
            self.tokens = dict.fromkeys(linears, shape[0] * (shape[1] - self.skip))
            self.effective = {name: {"a": one, "b": one} for name, one in of_b.items()}
            return {name: Kron(Factor(unpack(stored[f"{name}.A"], linear.in_features)), B[name]) for name, linear in linears.items()}
        weights = {}
        if self.weighting.a_by_gradient:
            for name in linears:
                weights[name] = stored[f"{name}.gradient"].reshape(shape)
                if self.clip is not None:
                    weights[name] = weights[name].clamp_max(quantile(weights[name][:, self.skip :], self.clip))
        grams = input_moments(self.walk, i, inputs, weights, skip=self.skip)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        self.effective = {name: {"a": gram.effective, "b": of_b[name]} for name, gram in grams.items()}
        A = input_factors(self.walk, i, grams)
        return {name: Kron(A[name], B[name]) for name in linears}

    def heldout(self, i: int) -> Heldout:
        """Inputs and gradients of the sequences held out, at block i, which must still have its original weights."""
        stored = rundir.read_tensors(_file(self.store, i))
        return Heldout(self.walk, i, stored["heldout.inputs"], stored["heldout.gradient"], self.skip)


class Heldout:
    """The second-order error of a change of a linear, on tokens that its factors have not seen: `sum_t (g_t^T E x_t)^2`, without any factorisation.

    Args:
        walk: The original model.
        i: Block.
        inputs: What enters it, `[N, T, d]`.
        gradient: At its output, `[N, T, d]`.
        skip: First tokens of each sequence that do not count.
    """

    def __init__(self, walk: Walk, i: int, inputs: Tensor, gradient: Tensor, skip: int = 0) -> None:
        self._streams: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in walk.linears(i)}

        def visit(_rows: slice, name: str, x: Tensor, g: Tensor) -> None:
            self._streams[name].append((x[:, skip:].flatten(0, 1).cpu(), g[:, skip:].flatten(0, 1).cpu()))

        block_gradients(walk, i, inputs, gradient, visit)

    def error(self, name: str, E: Tensor) -> float:
        """Error of adding `E [m, n]` to the weight of a linear.

        Args:
            name: Of the linear within the block.
            E: Values minus weight, on the CPU.
        """
        return float(sum(((x @ E.to(x).T) * g).sum(-1).double().square().sum() for x, g in self._streams[name]))


def quantile(values: Tensor, share: float) -> float:
    """The smallest of the values that at least a share of them do not exceed."""
    flat = values.flatten()
    return float(flat.kthvalue(max(1, math.ceil(share * flat.numel()))).values)


def slots_in(walk: Walk, ids: Tensor, memory: int | None) -> int:
    """How many block inputs a budget keeps.

    Args:
        walk: The model.
        ids: Tokens `[N, T]`.
        memory: Bytes; None for all.

    Returns:
        At least what recursive halving needs, at most one a block and one for the head.

    Raises:
        RecipeError: The budget is smaller; the smallest one is named.
    """
    units = len(walk) + 1  # the head is the last unit
    if memory is None:
        return units
    one = boundary_bytes(walk, ids)
    needed = (schedule.fewest_slots(units) + IN_FLIGHT) * one
    if memory < needed:
        raise RecipeError(
            f"boundary_memory of {memory:,} bytes for {ids.numel():,} tokens through {len(walk)} blocks",
            f"at least {needed:,} bytes ({needed / 1e9:.3g}GB)",
            "Give more, or use fewer tokens",
        )
    return min(memory // one - IN_FLIGHT, units)


def boundary_bytes(walk: Walk, ids: Tensor) -> int:
    """Size of the hidden states between two blocks."""
    weight = next(iter(walk.linears(0).values())).weight
    return ids.numel() * weight.shape[1] * weight.element_size()


def gradient_pass(
    walk: Walk,
    ids: Tensor,
    store: Path,
    *,
    seed: int,
    weighting: Weighting,
    labels: str = "sampled",
    clip: float | None = None,
    skip: int = 0,
    held: int = 0,
    slots: int | None = None,
    progress: Progress,
) -> dict[str, int]:
    """Forward to the head, then back block by block; one file a block in `store`.

    Args:
        walk: The original model.
        ids: `[N, T]`.
        store: Where files go.
        seed: Of the labels.
        weighting: The factorisation.
        labels: "sampled" or "empirical".
        clip: Quantile of weights, or None.
        skip: First tokens of each sequence that do not count.
        held: Last sequences that are kept out of all sums, and whose block inputs and gradients are stored instead.
        slots: Block inputs kept at once, from `slots_in`; None keeps all.
        progress: Called with (stage, done, total).

    Returns:
        Counters, see `BackpropEstimator.passes`.

    Raises:
        ModelError: An activation or a gradient is not finite.
    """
    units = len(walk) + 1
    slots = units if slots is None else slots
    total, done = schedule.forward_runs(units, slots), [0, 0]
    gradient = torch.empty(0)

    def forward(i: int, inputs: Tensor) -> Tensor:
        outputs = walk.apply(i, inputs)
        if not bool(torch.isfinite(outputs).all()):
            raise ModelError(
                f"the activations that leave {walk.prefix(i)} are not finite", "finite activations", "Check the model on this text first"
            )
        done[0] += 1
        progress("forward", done[0], total)
        return outputs

    def visit(i: int, inputs: Tensor) -> None:
        nonlocal gradient
        if i == len(walk):
            gradient = head_gradient(walk, inputs, seed, progress, ids if labels == "empirical" else None)
            return
        used = len(inputs) - held
        tensors, at_input = block_moments(walk, i, inputs[:used], gradient[:used], weighting, clip=clip, skip=skip)
        if held:
            tensors |= {"heldout.inputs": inputs[used:], "heldout.gradient": gradient[used:]}
            at_input = torch.cat([at_input, block_gradients(walk, i, inputs[used:], gradient[used:], lambda *_: None)])
        gradient = at_input
        rundir.write_tensors(_file(store, i), tensors)
        done[1] += 1
        progress("backward", done[1], len(walk))

    runs, kept = schedule.reverse(units, slots, walk.embed(ids), forward, visit)
    return {
        "forward": runs,
        "backward": len(walk) * weighting.steps * (1 if clip is None or not weighting.b_by_input else 2),
        "kept": kept,
        "bytes": (kept + IN_FLIGHT) * boundary_bytes(walk, ids),
    }


def head_gradient(walk: Walk, hidden: Tensor, seed: int, progress: Progress, ids: Tensor | None = None) -> Tensor:
    """Gradient of the summed loss at the output of the last block, with labels sampled from the model or those of the text.

    Args:
        walk: The model.
        hidden: Output of the last block, `[N, T, d]` on the CPU.
        seed: Of the labels.
        progress: Called with (stage, done, total).
        ids: Tokens `[N, T]`, each the label of the one before it; None samples labels.

    Returns:
        `[N, T, d]` on the CPU.
    """
    following = None if ids is None else torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1).flatten()
    generator = torch.Generator().manual_seed(seed)
    flat = hidden.reshape(-1, hidden.shape[-1])
    result = torch.empty_like(flat)
    with walk.head_resident():
        for start in range(0, len(flat), HEAD_TOKENS):
            x = flat[start : start + HEAD_TOKENS].to(walk.device).requires_grad_()
            with torch.enable_grad():
                logits = walk.logits(x)
            slope = torch.softmax(logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), -1)
            labels = sample(slope, generator) if following is None else following[start : start + len(x)].to(slope.device)
            slope[torch.arange(len(x), device=slope.device), labels] -= 1.0  # d loss / d logits = p - onehot(label)
            if following is not None:
                slope[labels < 0] = 0.0
            result[start : start + HEAD_TOKENS] = torch.autograd.grad(logits, x, slope.to(logits.dtype))[0].cpu()
            progress("head", min(start + HEAD_TOKENS, len(flat)), len(flat))
    return result.reshape(hidden.shape)


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row of `[t, vocabulary]`, by inverting the cumulative sum in float64: one uniform number a token, the same on every device."""
    cumulative = probabilities.double().cumsum(-1)
    uniform = torch.rand(len(probabilities), 1, generator=generator, dtype=torch.float64).to(probabilities.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return index.clamp_max(probabilities.shape[1] - 1).flatten()


def block_moments(
    walk: Walk, i: int, inputs: Tensor, gradient: Tensor, weighting: Weighting, *, clip: float | None = None, skip: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """What the gradient pass keeps of block i: one recomputation of the block a step of the factorisation, two if weights in B are clipped.

    Args:
        walk: The original model.
        i: Block.
        inputs: `[N, T, d]` on the CPU.
        gradient: At the block's output, `[N, T, d]` on the CPU.
        weighting: The factorisation.
        clip: Quantile of weights, or None.
        skip: First tokens of each sequence that do not count.

    Returns:
        Per linear `name.B` (packed), `name.effective`, the effective sample size behind it, and `name.gradient`, the tokens' weights in A `[N T]` before clipping
        (or, by sequence, `name.A`, packed); and the gradient at the block's input.

    Raises:
        ModelError: A gradient is not finite.
    """
    linears = walk.linears(i)
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    weights = {name: torch.zeros(inputs.shape[:2], dtype=dtype) for name in linears}
    steps: dict[str, Step] = {}
    for k in range(weighting.steps):
        steps = {
            name: Step(
                (linear.out_features, linear.in_features),
                weighting,
                steps.get(name),
                with_a=k + 1 < weighting.steps,
                device=walk.device,
                dtype=dtype,
            )
            for name, linear in linears.items()
        }
        if clip is not None and weighting.b_by_input:
            _set_limits(walk, i, inputs, gradient, steps, clip, skip)

        def visit(rows: slice, name: str, x: Tensor, g: Tensor, steps: dict[str, Step] = steps) -> None:
            a = steps[name].add(x[:, skip:], g[:, skip:])
            if a is not None:
                weights[name][rows, skip:] = a.cpu()

        at_input = block_gradients(walk, i, inputs, gradient, visit)
        if bad := [name for name, step in steps.items() if not step.finite]:
            raise ModelError(
                f"the gradients at {walk.prefix(i)}.{bad[0]} are not finite",
                "finite gradients",
                "Use float32 and check the model on this text first",
            )
    tensors = {}
    for name, step in steps.items():
        tensors |= {f"{name}.B": pack(step.B.value()), f"{name}.effective": torch.tensor(step.effective, dtype=torch.float64)}
        if weighting.by_sequence:
            assert step.A is not None
            tensors[f"{name}.A"] = pack(step.A.value())
        else:
            tensors[f"{name}.gradient"] = weights[name].reshape(-1)
    return tensors, at_input


def _set_limits(walk: Walk, i: int, inputs: Tensor, gradient: Tensor, steps: dict[str, Step], clip: float, skip: int) -> None:
    """Let each step know the quantiles of its weights: a pass of its own, because a limit must be known before the first token is added."""
    found: dict[str, list[tuple[Tensor, Tensor | None]]] = {name: [] for name in steps}

    def visit(_rows: slice, name: str, x: Tensor, g: Tensor) -> None:
        found[name].append(steps[name].weights(x[:, skip:], g[:, skip:]))

    block_gradients(walk, i, inputs, gradient, visit)
    for name, pairs in found.items():
        steps[name].limits = (
            quantile(torch.cat([a for a, _ in pairs]), clip),
            quantile(torch.cat([b for _, b in pairs if b is not None]), clip),
        )


def block_gradients(walk: Walk, i: int, inputs: Tensor, gradient: Tensor, visit: Callable[[slice, str, Tensor, Tensor], None]) -> Tensor:
    """Recompute block i from its inputs and take the gradient back through it.

    Args:
        walk: The model.
        i: Block.
        inputs: `[N, T, d]` on the CPU.
        gradient: At the block's output, `[N, T, d]` on the CPU.
        visit: Called for each batch and linear with (sequences, linear, its inputs `[b, T, n]`, the gradient at its outputs `[b, T, m]`), on the device.

    Returns:
        The gradient at the block's input, `[N, T, d]` on the CPU.
    """
    linears = walk.linears(i)
    result = torch.empty_like(gradient)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (arguments[0].detach(), output)

        return hook

    handles = [linear.register_forward_hook(keep(name)) for name, linear in linears.items()]
    try:
        with walk.resident(i):
            for start, batch in walk.batches(inputs):
                rows = slice(start, start + len(batch))
                x = batch.detach().requires_grad_()
                with torch.enable_grad():
                    y = walk.run(i, x)
                outputs = [seen[name][1] for name in linears]
                at_input, *at_outputs = torch.autograd.grad(y, [x, *outputs], gradient[rows].to(y))
                result[rows] = at_input.cpu()
                for name, g in zip(linears, at_outputs, strict=True):
                    visit(rows, name, seen[name][0], g)
                seen.clear()
    finally:
        for handle in handles:
            handle.remove()
    return result


def _file(store: Path, i: int) -> Path:
    return store / f"block_{i:04d}.safetensors"


def _complete(store: Path, key: dict[str, object]) -> bool:
    """Whether `store` holds this gradient pass."""
    manifest = store / MANIFEST
    if not manifest.is_file():
        return False
    found = json.loads(manifest.read_text("utf-8"))
    if found != key:
        differing = [f"{name} ({found.get(name)} there, {key[name]} here)" for name in key if found.get(name) != key[name]]
        raise RecipeError(
            f"{store} holds the gradients of another run: {'; '.join(differing)}",
            "the same run, or an empty directory",
            "Choose another directory",
        )
    return True
