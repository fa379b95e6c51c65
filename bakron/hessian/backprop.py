"""`backprop`: the global Fisher, E[x x^T (x) g g^T] with g the gradient of the model's own log likelihood at a linear's output.

Labels are sampled from the model's softmax, one per token (the true Fisher, which is the Hessian of the KL divergence at the original weights), and losses are
summed, not averaged, so that every token's gradient is its own.

The gradient pass goes over the original model once, before any rounding: block inputs are stored going forward, then the blocks are walked back with
recomputation, so that one block's activations and factors are alive at a time. Of each linear it keeps, on disk, B (packed) and one number a token, |g_t|^2. A is
accumulated later, when the block's turn to be rounded comes, on the inputs that the quantized prefix really gives it, weighted by those numbers.
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
from bakron.hessian.factor import FACTORS, Gram, pack, unpack
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
        factor: A name in `FACTORS`.
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
        self.walk, self.store, self.weighting = walk, store, FACTORS[factor]
        self.tokens: dict[str, int] = {}
        key = {
            "model": fingerprint,
            "tokens": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(ids.shape),
            "seed": seed,
            "b_by_input": self.weighting.b_by_input,
        }
        if not _complete(store, key):
            gradient_pass(walk, ids, store, seed=seed, b_by_input=self.weighting.b_by_input, progress=progress or (lambda *_: None))
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
        weights = {name: stored[f"{name}.gradient"].reshape(shape) for name in linears} if self.weighting.a_by_gradient else {}
        grams = input_moments(self.walk, i, inputs, weights)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        A = input_factors(self.walk, i, grams)
        return {name: Kron(A[name], Factor(unpack(stored[f"{name}.B"], linear.out_features))) for name, linear in linears.items()}


def gradient_pass(walk: Walk, ids: Tensor, store: Path, *, seed: int, b_by_input: bool, progress: Progress) -> None:
    """Forward storing block inputs, labels and gradient at the head, then back block by block; one file a block in `store`.

    Args:
        walk: The original model.
        ids: `[N, T]`.
        store: Where files go.
        seed: Of the labels.
        b_by_input: Weigh B's tokens by |x_t|^2.
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
        moments, gradient = block_gradients(walk, i, inputs.pop(), gradient, b_by_input)
        bad = [name for name, (gram, _) in moments.items() if not bool(torch.isfinite(gram.value()).all())]
        if bad:
            raise ModelError(
                f"the gradients at {walk.prefix(i)}.{bad[0]} are not finite",
                "finite gradients",
                "Use float32 and check the model on this text first",
            )
        tensors = {}
        for name, (gram, norms) in moments.items():
            tensors |= {f"{name}.B": pack(gram.value()), f"{name}.gradient": norms.reshape(-1)}
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
            slope = torch.softmax(logits.detach().float(), -1)
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


def block_gradients(
    walk: Walk, i: int, inputs: Tensor, gradient: Tensor, b_by_input: bool
) -> tuple[dict[str, tuple[Gram, Tensor]], Tensor]:
    """Recompute block i from its inputs and take the gradient back through it.

    Args:
        walk: The model.
        i: Block.
        inputs: `[N, T, d]` on the CPU.
        gradient: At the block's output, `[N, T, d]` on the CPU.
        b_by_input: Weigh B's tokens by |x_t|^2.

    Returns:
        Per linear the running sum of b_t g_t g_t^T and the squared norms |g_t|^2 `[N, T]`; and the gradient at the block's input.
    """
    linears = walk.linears(i)
    grams = {name: Gram(linear.out_features, walk.device) for name, linear in linears.items()}
    norms = {name: torch.empty(inputs.shape[:2], dtype=torch.float32) for name in linears}
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
                    norms[name][rows] = g.float().square().sum(-1).cpu()
                    grams[name].add(g, seen[name][0].float().square().sum(-1) if b_by_input else None)
                seen.clear()
    finally:
        for handle in handles:
            handle.remove()
    return {name: (grams[name], norms[name]) for name in linears}, result


def _file(store: Path, i: int) -> Path:
    return store / f"block_{i:04d}.safetensors"


def _complete(store: Path, key: dict[str, object]) -> bool:
    """Whether `store` holds this gradient pass."""
    manifest = store / MANIFEST
    if not manifest.is_file():
        return False
    try:
        found = dict(json.loads(manifest.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"{manifest} is damaged: {error}", "a manifest as a finished gradient pass leaves it", "Remove that directory"
        ) from error
    if found != key:
        differing = [f"{name} ({found.get(name)} there, {key[name]} here)" for name in key if found.get(name) != key[name]]
        raise RecipeError(
            f"{store} holds the gradients of another run: {'; '.join(differing)}",
            "the same run, or an empty directory",
            "Choose another directory",
        )
    return True
