"""`backprop`: the global Fisher, E[x x^T (x) g g^T] with g the gradient of the model's own log likelihood at a linear's output.

Labels are sampled from the model's softmax, one per token (the true Fisher, which is the Hessian of the KL divergence at the original weights), and losses are
summed, not averaged, so that every token's gradient is its own.

The gradient pass goes over the original model once, before any rounding: block inputs are stored going forward, then the blocks are walked back with
recomputation, so that one block's activations and factors are alive at a time. Of each linear it keeps, on disk, B (packed) and one number a token: its weight in
A, such as |g_t|^2. A is accumulated later, when the block's turn to be rounded comes, on the inputs that the quantized prefix really gives it, weighted by those
numbers. Factorisation `sequence` is no weighted sum over tokens: there A, too, is of the original model's inputs, and comes from the gradient pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bakron import rundir
from bakron.errors import ModelError, RecipeError
from bakron.hessian.factor import Step, Weighting, pack, unpack
from bakron.hessian.factor import weighting as weighting_of
from bakron.hessian.input import input_factors, input_moments
from bakron.kron import Factor, Kron
from bakron.models.walk import Walk

Progress = Callable[[str, int, int], None]
HEAD_TOKENS = 128  # tokens whose logits are alive at a time: a buffer small enough for allocators to recycle
MANIFEST = "manifest.json"


class BackpropEstimator:
    """Factors of the global Fisher from one gradient pass.

    Args:
        walk: The original model.
        ids: Calibration tokens `[N, T]`.
        store: Directory for the gradient pass's results; a complete one of the same model, tokens, seed and weighting of B is reused.
        factor: A name in `FACTORS`, `shampoo:K` or `kl:K`.
        seed: Of the sampled labels.
        fingerprint: Identifies the model's weights.
        progress: Called with (stage, done, total).

    Raises:
        RecipeError: `store` holds another run's results.
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
        progress: Progress | None = None,
    ) -> None:
        self.walk, self.store, self.weighting = walk, store, weighting_of(factor)
        self.tokens: dict[str, int] = {}
        key = {
            "model": fingerprint,
            "tokens": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(ids.shape),
            "seed": seed,
            **self.weighting.b_key,
        }
        if not _complete(store, key):
            gradient_pass(walk, ids, store, seed=seed, weighting=self.weighting, progress=progress or (lambda *_: None))
            rundir.write_text(store / MANIFEST, json.dumps(key, indent=1))

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i for A; B from the gradient pass.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU, usually from the quantized prefix.

        Returns:
            Undamped Kron per linear.
        """
        stored = rundir.read_tensors(_file(self.store, i))
        shape = inputs.shape[:2]
        linears = self.walk.linears(i)
        B = {name: Factor(unpack(stored[f"{name}.B"], linear.out_features)) for name, linear in linears.items()}
        if self.weighting.by_sequence:
            self.tokens = dict.fromkeys(linears, shape.numel())
            return {name: Kron(Factor(unpack(stored[f"{name}.A"], linear.in_features)), B[name]) for name, linear in linears.items()}
        weights = {name: stored[f"{name}.gradient"].reshape(shape) for name in linears} if self.weighting.a_by_gradient else {}
        grams = input_moments(self.walk, i, inputs, weights)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        A = input_factors(self.walk, i, grams)
        return {name: Kron(A[name], B[name]) for name in linears}


def gradient_pass(walk: Walk, ids: Tensor, store: Path, *, seed: int, weighting: Weighting, progress: Progress) -> None:
    """Forward storing block inputs, labels and gradient at the head, then back block by block; one file a block in `store`.

    Args:
        walk: The original model.
        ids: `[N, T]`.
        store: Where files go.
        seed: Of the labels.
        weighting: The factorisation.
        progress: Called with (stage, done, total).

    Raises:
        ModelError: An activation or a gradient is not finite.
    """
    inputs = [walk.embed(ids)]
    for i in range(len(walk)):
        inputs.append(walk.apply(i, inputs[-1]))
        if not bool(torch.isfinite(inputs[-1]).all()):
            raise ModelError(
                f"the activations that leave {walk.prefix(i)} are not finite", "finite activations", "Check the model on this text first"
            )
        progress("forward", i + 1, len(walk))
    gradient = head_gradient(walk, inputs.pop(), seed, progress)
    for i in reversed(range(len(walk))):
        tensors, gradient = block_moments(walk, i, inputs.pop(), gradient, weighting)
        rundir.write_tensors(_file(store, i), tensors)
        progress("backward", len(walk) - i, len(walk))


def head_gradient(walk: Walk, hidden: Tensor, seed: int, progress: Progress) -> Tensor:
    """Gradient of the summed loss, with labels sampled from the model, at the output of the last block.

    Args:
        walk: The model.
        hidden: Output of the last block, `[N, T, d]` on the CPU.
        seed: Of the labels.
        progress: Called with (stage, done, total).

    Returns:
        `[N, T, d]` on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = hidden.reshape(-1, hidden.shape[-1])
    result = torch.empty_like(flat)
    with walk.head_resident():
        for start in range(0, len(flat), HEAD_TOKENS):
            x = flat[start : start + HEAD_TOKENS].to(walk.device).requires_grad_()
            with torch.enable_grad():
                logits = walk.logits(x)
            slope = torch.softmax(logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), -1)
            labels = sample(slope, generator)
            slope[torch.arange(len(x), device=slope.device), labels] -= 1.0  # d loss / d logits = p - onehot(label)
            result[start : start + HEAD_TOKENS] = torch.autograd.grad(logits, x, slope.to(logits.dtype))[0].cpu()
            progress("head", min(start + HEAD_TOKENS, len(flat)), len(flat))
    return result.reshape(hidden.shape)


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row of `[t, vocabulary]`, by inverting the cumulative sum in float64: one uniform number a token, the same on every device."""
    cumulative = probabilities.double().cumsum(-1)
    uniform = torch.rand(len(probabilities), 1, generator=generator, dtype=torch.float64).to(probabilities.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return index.clamp_max(probabilities.shape[1] - 1).flatten()


def block_moments(walk: Walk, i: int, inputs: Tensor, gradient: Tensor, weighting: Weighting) -> tuple[dict[str, Tensor], Tensor]:
    """What the gradient pass keeps of block i: one recomputation of the block a step of the factorisation.

    Args:
        walk: The original model.
        i: Block.
        inputs: `[N, T, d]` on the CPU.
        gradient: At the block's output, `[N, T, d]` on the CPU.
        weighting: The factorisation.

    Returns:
        Per linear `name.B` (packed) and `name.gradient`, the tokens' weights in A `[N T]` (or, by sequence, `name.A`, packed); and the gradient at the block's
        input.

    Raises:
        ModelError: A gradient is not finite.
    """
    linears = walk.linears(i)
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    weights = {name: torch.empty(inputs.shape[:2], dtype=dtype) for name in linears}
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

        def visit(rows: slice, name: str, x: Tensor, g: Tensor, steps: dict[str, Step] = steps) -> None:
            a = steps[name].add(x, g)
            if a is not None:
                weights[name][rows] = a.cpu()

        at_input = block_gradients(walk, i, inputs, gradient, visit)
        if bad := [name for name, step in steps.items() if not step.finite]:
            raise ModelError(
                f"the gradients at {walk.prefix(i)}.{bad[0]} are not finite",
                "finite gradients",
                "Use float32 and check the model on this text first",
            )
    tensors = {}
    for name, step in steps.items():
        tensors[f"{name}.B"] = pack(step.B.value())
        if weighting.by_sequence:
            assert step.A is not None
            tensors[f"{name}.A"] = pack(step.A.value())
        else:
            tensors[f"{name}.gradient"] = weights[name].reshape(-1)
    return tensors, at_input


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
