"""The gradient pass: over the original model once, before any rounding, from the last block to the first.

Labels are sampled from the model's softmax, one per token (the true Fisher, which is the Hessian of the KL divergence at the original weights), or are the text's
own next tokens (`empirical`: another matrix, in which mispredicted tokens weigh most; the last token of a sequence has none and no loss). Losses are summed, not
averaged, so that every token's gradient is its own. With several labels a token, each is taken through the blocks by itself, on one forward run.

Outliers: tokens (by `sequence`: sequences) whose weight in A or B is above a quantile of the weights can be clipped to it, and the first tokens of a sequence,
where models like to put an attention sink, can be left out of both A and B.

Block inputs are kept going forward, as many as the memory for them holds, and computed again where they were not (`schedule`); each block is run once more with
gradients, so that one block's activations, weights and factors are alive on the device at a time. Of each linear the pass leaves, on disk, B (packed) and two
numbers a token: its weight in A, such as |g_t|^2, and what it added to the trace of B.

Of several processes each takes its share of the sequences through the model; sums and numbers a token come together block by block, and process 0 writes what one
process alone would have written. Only the gradient to go on from is kept by each for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from bakron import ranks, rundir
from bakron.errors import ModelError, RecipeError
from bakron.hessian import schedule
from bakron.hessian.factor import Step, Weighting, pack
from bakron.hessian.input import in_parts, refuse_second_use
from bakron.hessian.unfinished import block_file, forget_left, keep_left, left, rows_here
from bakron.models.linears import Routed, in_place
from bakron.models.walk import Walk

Progress = Callable[[str, int, int], None]
HEAD_TOKENS = 128  # tokens whose logits are alive at a time: a buffer small enough for allocators to recycle
IN_FLIGHT = 2  # tensors as large as a block's input beside those kept and the gradients: what enters and leaves the block that runs


def slots_in(walk: Walk, ids: Tensor, memory: int | None, samples: int = 1) -> int:
    """How many block inputs a budget keeps.

    Args:
        walk: The model.
        ids: Tokens `[N, T]`.
        memory: Bytes; None for all.
        samples: Labels a token, each with a gradient of its own.

    Returns:
        At least what recursive halving needs, at most one a block and one for the head.

    Raises:
        RecipeError: The budget is smaller; the smallest one is named.
    """
    units = len(walk) + 1  # the head is the last unit
    if memory is None:
        return units
    one = boundary_bytes(walk, ids)
    needed = (schedule.fewest_slots(units) + IN_FLIGHT + samples) * one
    if memory < needed:
        raise RecipeError(
            f"boundary_memory of {memory:,} bytes for {ids.numel():,} tokens through {len(walk)} blocks",
            f"at least {needed:,} bytes",
            "Give more, or use fewer tokens",
        )
    return min(memory // one - IN_FLIGHT - samples, units)


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
    samples: int = 1,
    clip: float | None = None,
    skip: int = 0,
    held: int = 0,
    dtype: torch.dtype = torch.float32,
    slots: int | None = None,
    key: str = "",
    every: bool = False,
    progress: Progress,
) -> dict[str, int]:
    """Forward to the head, then back block by block; one file a block in `store`. A pass that was cut short there goes on from the last block that is done.

    Args:
        walk: The original model.
        ids: `[N, T]`, those of all processes.
        store: Where files go, the same for all processes.
        seed: Of the labels.
        weighting: The factorisation.
        labels: "sampled" or "empirical".
        samples: Labels a token.
        clip: Quantile of weights, or None.
        skip: First tokens of each sequence that do not count.
        held: Last sequences whose block inputs and gradients are stored; besides the sums, those without these sequences are made as well.
        dtype: Of products and sums.
        slots: Block inputs kept at once, from `slots_in`; None keeps all.
        key: Identifies the pass; one of another key is not gone on with.
        every: Keep what every linear needs, and not only those that are to be quantized.
        progress: Called with (stage, done, total).

    Returns:
        Counters, see `BackpropEstimator.passes`.

    Raises:
        ModelError: An activation or a gradient is not finite.
    """
    sequences, rows = len(ids), rows_here(len(ids), held)
    ids, used = ids[rows], len(rows) - len(range(held)[ranks.share(held)])
    units, gradient = left(walk, store, key, sequences, held)
    if units == 0:
        return {"forward": 0, "backward": 0, "kept": 0, "bytes": 0}
    slots = units if slots is None else min(slots, units)
    total, done = schedule.forward_runs(units, slots), [0, max(len(walk) - units, 0)]
    before = dict(walk.runs)

    def forward(i: int, inputs: Tensor) -> Tensor:
        outputs = walk.apply(i, inputs)
        if not bool(torch.isfinite(outputs).all()):
            raise ModelError(
                f"activations are not finite, first at {walk.first_bad(i, inputs)}",
                "finite activations",
                "Check the model on this text first",
            )
        done[0] += 1
        progress("forward", done[0], total)
        return outputs

    def visit(i: int, inputs: Tensor) -> None:
        nonlocal gradient
        if i == len(walk):
            gradient = head_gradient(walk, inputs, seed, progress, ids if labels == "empirical" else None, samples, rows)
            keep_left(store, key, i, gradient)
            return
        names = list(walk.linears(i)) if every else walk.chosen(i)
        at_output, parts = gradient, (used, len(rows) - used) if held else (used,)
        tensors, gradient = block_moments(walk, i, inputs, at_output, weighting, names, clip=clip, skip=skip, dtype=dtype, parts=parts)
        if held:
            tensors |= {"heldout.inputs": ranks.joined(inputs[used:], 0), "heldout.gradient": ranks.joined(at_output[:, used:], 0, dim=1)}
        if ranks.first():
            rundir.write_tensors(block_file(store, i), tensors)
        keep_left(store, key, i, gradient)
        done[1] += 1
        progress("backward", done[1], len(walk))

    _, kept = schedule.reverse(units, slots, walk.embed(ids), forward, visit)
    if ranks.first():
        forget_left(store)
    return {
        **{way: walk.runs[way] - before[way] for way in walk.runs},
        "kept": kept,
        "bytes": (kept + IN_FLIGHT + samples) * boundary_bytes(walk, ids),
    }


def head_gradient(
    walk: Walk, hidden: Tensor, seed: int, progress: Progress, ids: Tensor | None = None, samples: int = 1, rows: Tensor | None = None
) -> Tensor:
    """Gradient of the summed loss at the output of the last block, with labels sampled from the model or those of the text.

    Args:
        walk: The model.
        hidden: Output of the last block, `[N, T, d]` on the CPU.
        seed: Of the labels.
        progress: Called with (stage, done, total).
        ids: Tokens `[N, T]`, each the label of the one before it; None samples labels.
        samples: Labels sampled a token, spread evenly over its distribution: each is a fair sample, and together they cover it better than independent ones.
        rows: Which sequences of all these are; None for the first ones. Their labels are what they would be if all were here.

    Returns:
        `[samples, N, T, d]` on the CPU.
    """
    following = None if ids is None else torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1).flatten()
    rows = torch.arange(len(hidden)) if rows is None else rows
    uniform = torch.rand(int(rows.max()) + 1, hidden.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    uniform = uniform[rows].flatten()
    flat = hidden.reshape(-1, hidden.shape[-1])
    result = walk.room.empty((samples, *flat.shape), flat.dtype)
    with walk.head_resident():
        for start in range(0, len(flat), HEAD_TOKENS):
            x = flat[start : start + HEAD_TOKENS].to(walk.device).requires_grad_()
            with torch.enable_grad():
                logits = walk.logits(x)
            p = torch.softmax(logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), -1)
            chosen = slice(start, start + len(p))
            for number in range(samples):
                labels = draw(p, (uniform[chosen] + number / samples) % 1) if following is None else following[chosen].to(p.device)
                slope = p.clone()
                slope[torch.arange(len(x), device=p.device), labels] -= 1.0  # d loss / d logits = p - onehot(label)
                slope[labels < 0] = 0.0
                at_input = torch.autograd.grad(logits, x, slope.to(logits.dtype), retain_graph=number + 1 < samples)[0]
                result[number, start : start + HEAD_TOKENS] = at_input.cpu()
            progress("head", min(start + HEAD_TOKENS, len(flat)), len(flat))
    return result.reshape(samples, *hidden.shape)


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row of `[t, vocabulary]`: one uniform number a token, the same on every device."""
    return draw(probabilities, torch.rand(len(probabilities), generator=generator, dtype=torch.float64))


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """One index per row of `[t, vocabulary]`, where its cumulative sum, in float64, passes `u [t]` in [0, 1)."""
    cumulative = probabilities.double().cumsum(-1)
    index = torch.searchsorted(cumulative, u[:, None].to(probabilities.device) * cumulative[:, -1:], right=True)
    return index.clamp_max(probabilities.shape[1] - 1).flatten()


def block_moments(
    walk: Walk,
    i: int,
    inputs: Tensor,
    gradient: Tensor,
    weighting: Weighting,
    names: Collection[str] | None = None,
    *,
    clip: float | None = None,
    skip: int = 0,
    dtype: torch.dtype = torch.float32,
    parts: tuple[int, ...] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """What the gradient pass keeps of block i: one recomputation of the block a step of the factorisation, two if weights in B are clipped.

    With sequences held out, sums are also made without them. Steps before the last one are of the others alone; the last one adds both.

    Args:
        walk: The original model.
        i: Block.
        inputs: `[N, T, d]` on the CPU, of this process.
        gradient: At the block's output, `[samples, N, T, d]` on the CPU.
        weighting: The factorisation.
        names: Of the linears; None for those that are to be quantized.
        clip: Quantile of weights, or None.
        skip: First tokens of each sequence that do not count.
        dtype: Of products and sums; that of the inputs if it is wider.
        parts: How many of the sequences count, and how many more are held out; None if none is.

    Returns:
        Per linear `name.B` (packed; `name.tried.B` without the sequences held out), `name.effective`, the effective sample size behind it, `name.tokens`, how many
        tokens have a gradient there, `name.sizes`, what tokens (by sequence: sequences) added to its trace, and `name.gradient`, the tokens' weights in A `[N T]`
        before clipping (or, by sequence, `name.A` and `name.tried.A`, packed), over the sequences of all processes and on process 0 only; and the gradient at the
        block's input, of this process.

    Raises:
        ModelError: A gradient is not finite.
    """
    linears = {name: walk.linears(i)[name] for name in (walk.chosen(i) if names is None else names)}
    dtype, parts = torch.promote_types(inputs.dtype, dtype), parts or (len(inputs),)
    steps: list[dict[str, Step]] = [{}]  # by part
    for k in range(weighting.steps):
        last = k + 1 == weighting.steps
        steps = [
            {
                name: Step(
                    (linear.out_features, linear.in_features),
                    weighting,
                    steps[0].get(name),
                    with_a=not last,
                    device=walk.device,
                    dtype=dtype,
                )
                for name, linear in linears.items()
            }
            for _ in (parts if last else parts[:1])
        ]
        if clip is not None and weighting.b_by_input:
            _set_limits(walk, i, inputs, gradient, steps, clip, skip)
        weights, sizes, tokens, at_input = _add_all(walk, i, inputs, gradient, steps, parts, skip)
        if bad := [name for part in steps for name, step in part.items() if not step.finite]:
            raise ModelError(
                f"gradients are not finite, first at {_first_bad(walk, i, inputs, gradient, bad) or f'{walk.prefix(i)}.{bad[0]}'}",
                "finite gradients",
                "Use float32 and check the model on this text first",
            )
        for step in (step for part in steps for step in part.values()):
            step.collect(at=0 if last else None)

    def everywhere(one: Tensor) -> Tensor:
        return torch.cat([ranks.joined(part, 0) for part in one.split(parts)])

    weights, sizes = ({name: everywhere(one) for name, one in kind.items()} for kind in (weights, sizes))
    tokens = {name: ranks.sum_(torch.tensor(count), 0) for name, count in tokens.items()}
    tensors = dict[str, Tensor]()
    for name, step in steps[0].items() if ranks.first() else ():
        if len(parts) > 1:
            tensors |= _packed(f"{name}.tried", step)
            step = step.plus(steps[1][name])
        tensors |= _packed(name, step)
        tensors |= {f"{name}.effective": torch.tensor(step.effective, dtype=torch.float64)}
        tensors |= {f"{name}.sizes": sizes[name], f"{name}.tokens": tokens[name] // len(gradient)}
        if not weighting.by_sequence:
            tensors[f"{name}.gradient"] = weights[name].reshape(-1)
    return tensors, at_input


def _packed(name: str, step: Step) -> dict[str, Tensor]:
    """The factors that a step has, as they are stored."""
    return {f"{name}.{side}": pack(gram.value()) for side, gram in (("B", step.B), ("A", step.A)) if gram is not None}


def _add_all(
    walk: Walk, i: int, inputs: Tensor, gradient: Tensor, steps: list[dict[str, Step]], parts: tuple[int, ...], skip: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int], Tensor]:
    """Add every token to each linear's step, of its own part of the sequences; parts without steps are left out.

    Returns:
        Per linear the tokens' weights in A `[N, T]`, what they added to the trace of B (by sequence `[N]`), and how many had a gradient there, summed over
        samples; the gradient at the input.
    """
    weights = {name: torch.zeros(inputs.shape[:2], dtype=step.B.dtype) for name, step in steps[0].items()}
    sizes = {name: weights[name].new_zeros(inputs.shape[: 1 if step.weighting.by_sequence else 2]) for name, step in steps[0].items()}
    tokens = dict.fromkeys(steps[0], 0)

    def visit(rows: slice, name: str, x: Tensor, g: Tensor) -> None:
        tokens[name] += int(g[:, skip:].any(-1).sum())
        for part, within in in_parts(rows.start, len(x), parts[: len(steps)]):
            a, size = steps[part][name].add(x[within, skip:], g[within, skip:])
            if a is None:
                sizes[name][rows][within] += size.cpu()
            else:
                sizes[name][rows][within, skip:] += size.cpu()
                weights[name][rows][within, skip:] += a.cpu()

    return weights, sizes, tokens, block_gradients(walk, i, inputs, gradient, visit, steps[0])


def _first_bad(walk: Walk, i: int, inputs: Tensor, gradient: Tensor, names: Collection[str]) -> str | None:
    """Of these linears of block i the one that is the first, going backward, whose gradient is not finite, in the first sequence where that is so."""
    found: list[tuple[int, int, str]] = []

    def visit(rows: slice, name: str, _x: Tensor, g: Tensor) -> None:
        bad = ~torch.isfinite(g).flatten(1).all(1)
        if bool(bad.any()):
            found.append((rows.start + int(bad.nonzero()[0]), -list(walk.linears(i)).index(name), name))

    block_gradients(walk, i, inputs, gradient, visit, names)
    return f"{walk.prefix(i)}.{min(found)[2]} in sequence {min(found)[0]}{ranks.whose()}" if found else None


def _set_limits(walk: Walk, i: int, inputs: Tensor, gradient: Tensor, steps: list[dict[str, Step]], clip: float, skip: int) -> None:
    """Let each step know the quantiles of its weights: a pass of its own, because a limit must be known before the first token is added."""
    found: dict[str, list[tuple[Tensor, Tensor | None]]] = {name: [] for name in steps[0]}

    def visit(_rows: slice, name: str, x: Tensor, g: Tensor) -> None:
        found[name].append(steps[0][name].weights(x[:, skip:], g[:, skip:]))

    block_gradients(walk, i, inputs, gradient, visit, steps[0])
    for name in found:
        pairs = [pair for part in ranks.gather(found[name]) for pair in part]
        limits = quantile(torch.cat([a for a, _ in pairs]), clip), quantile(torch.cat([b for _, b in pairs if b is not None]), clip)
        for part in steps:
            part[name].limits = limits


def block_gradients(
    walk: Walk,
    i: int,
    inputs: Tensor,
    gradient: Tensor,
    visit: Callable[[slice, str, Tensor, Tensor], None],
    names: Collection[str] | None = None,
) -> Tensor:
    """Recompute block i from its inputs and take the gradient back through it.

    Args:
        walk: The model.
        i: Block.
        inputs: `[N, T, d]` on the CPU.
        gradient: At the block's output, `[samples, N, T, d]` on the CPU.
        visit: Called for each batch, sample and linear with (sequences, linear, its inputs `[b, T, n]`, the gradient at its outputs `[b, T, m]`), on the device.
        names: Of the linears; None for those that are to be quantized.

    Returns:
        The gradient at the block's input, `[samples, N, T, d]` on the CPU.
    """
    linears = {name: walk.linears(i)[name] for name in (walk.chosen(i) if names is None else names)}
    result = walk.room.empty_like(gradient)
    walk.runs["backward"] += len(gradient)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            refuse_second_use(walk, i, name, seen)
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
                ran = [name for name, linear in linears.items() if name in seen or not isinstance(linear, Routed)]
                outputs = [seen[name][1] for name in ran]
                for number, one in enumerate(gradient):
                    at_input, *at_outputs = torch.autograd.grad(y, [x, *outputs], one[rows].to(y), retain_graph=number + 1 < len(gradient))
                    result[number, rows] = at_input.cpu()
                    for name, g in zip(ran, at_outputs, strict=True):
                        visit(rows, name, in_place(linears[name], seen[name][0], len(batch)), in_place(linears[name], g, len(batch)))
                    for name in linears.keys() - set(ran):  # experts that no token of the batch reaches
                        m, n = linears[name].weight.shape
                        visit(rows, name, y.new_zeros(*y.shape[:2], n), y.new_zeros(*y.shape[:2], m))
                seen.clear()
    finally:
        for handle in handles:
            handle.remove()
    return result


def quantile(values: Tensor, share: float) -> float:
    """The smallest of the positive values that at least a share of them do not exceed; 0 where none is positive, as for tokens that reach no expert."""
    flat = values[values > 0]
    return float(flat.kthvalue(max(1, math.ceil(share * flat.numel()))).values) if flat.numel() else 0.0
