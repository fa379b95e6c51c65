"""`input`: A = E[x x^T], B = I. The Hessian of the layer's own squared output error (GPTQ, Frantar et al. 2022)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bakron import ranks
from bakron.errors import FactorError, ModelError
from bakron.hessian.factor import Gram
from bakron.hessian.outliers import outliers
from bakron.kron import Factor, Kron
from bakron.models.linears import Routed, in_place
from bakron.models.walk import Walk


class InputEstimator:
    """Second moments of every linear's inputs.

    Args:
        walk: The model.
        skip: First tokens of each sequence that do not count.
        dtype: Of products and sums.
    """

    def __init__(self, walk: Walk, *, skip: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.walk, self.skip, self.dtype = walk, skip, dtype
        self.tokens: dict[str, int] = {}
        self.effective: dict[str, dict[str, float]] = {}
        self.outliers: dict[str, dict[str, Any]] = {}

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i; linears that see the same input share one Factor.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU.

        Returns:
            Undamped Kron per linear that falls to this process, B = None.
        """
        grams = input_moments(self.walk, i, inputs, {}, skip=self.skip, dtype=self.dtype)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        self.effective = {name: {"a": gram.effective} for name, gram in grams.items()}
        self.outliers = input_outliers(grams, self.skip)
        factors = input_factors(self.walk, i, grams)
        return {name: Kron(factor) for name, factor in factors.items()}


def input_factors(walk: Walk, i: int, grams: Mapping[str, Gram]) -> dict[str, Factor]:
    """One Factor a Gram, so that linears which share the one share the other.

    Args:
        walk: The model.
        i: Block.
        grams: From `input_moments`.

    Returns:
        Factor per linear.

    Raises:
        FactorError: The inputs of a linear are not finite; the first one is named.
    """
    made: dict[int, Factor] = {}
    for name, gram in grams.items():
        if id(gram) not in made:
            try:
                made[id(gram)] = Factor(gram.value())
            except FactorError as error:
                raise FactorError(f"inputs of {walk.prefix(i)}.{name}: {error.saw}", error.expected, error.do, index=error.index) from error
    return {name: made[id(gram)] for name, gram in grams.items()}


def input_outliers(grams: Mapping[str, Gram], skip: int) -> dict[str, dict[str, Any]]:
    """Per linear `{"a": ...}`, see `outliers`; empty where no token outweighs the others.

    Args:
        grams: From `input_moments`.
        skip: First tokens of each sequence that did not count.
    """
    found: dict[int, Any] = {}
    for gram in grams.values():
        if id(gram) not in found:
            found[id(gram)] = outliers(torch.cat(gram.sizes), skip) if gram.sizes else None
    return {name: {"a": found[id(gram)]} if found[id(gram)] else {} for name, gram in grams.items()}


def input_moments(
    walk: Walk,
    i: int,
    inputs: Tensor,
    weights: Mapping[str, Tensor],
    *,
    without: Collection[str] = (),
    skip: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Gram]:
    """`sum_t w_t x_t x_t^T` for every linear of block i that is to be quantized: `moments_by_part` with all sequences in one part."""
    return moments_by_part(walk, i, inputs, weights, (len(inputs),), without=without, skip=skip, dtype=dtype)[0]


def moments_by_part(
    walk: Walk,
    i: int,
    inputs: Tensor,
    weights: Mapping[str, Tensor],
    parts: Sequence[int],
    *,
    without: Collection[str] = (),
    skip: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Gram]]:
    """`sum_t w_t x_t x_t^T` over each of several parts of the sequences, for every linear of block i that is to be quantized, in one pass.

    Args:
        walk: The model.
        i: Block.
        inputs: What enters the block, `[N, T, d]` on the CPU.
        weights: Per linear `[N, T]`; a linear without weights counts every token once, and shares its Gram with those that see the same input.
        parts: How many sequences each has, in order, of this process.
        without: Linears to leave out.
        skip: First tokens of each sequence that do not count.
        dtype: Of products and sums; that of the inputs if it is wider.

    Returns:
        For each part, Gram per linear that falls to this process, over the sequences of all processes, with the tokens' `sizes [b, T - skip]`.
    """
    linears, seen, wanted = walk.linears(i), dict[str, Tensor](), set(walk.chosen(i)) - set(without)
    shared_inputs = [group for names in walk.shared_inputs(i) if (group := [name for name in names if name in wanted])]
    dtype = torch.promote_types(inputs.dtype, dtype)
    found: list[dict[str, Gram]] = [{} for _ in parts]
    for names, grams in itertools.product(shared_inputs, found):
        shared = Gram(linears[names[0]].in_features, walk.device, dtype)
        grams |= {name: Gram(linears[name].in_features, walk.device, dtype) if name in weights else shared for name in names}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            refuse_second_use(walk, i, name, seen)
            seen[name] = arguments[0]

        return hook

    def visit(start: int, batch: Tensor) -> None:
        for (part, rows), names in itertools.product(in_parts(start, len(batch), parts), shared_inputs):
            grams, done = found[part], set[int]()
            for name in names:
                if id(grams[name]) not in done:
                    weight = weights[name][start : start + len(batch)][rows, skip:] if name in weights else None
                    if name not in seen and isinstance(linears[name], Routed):  # no token of the batch reaches this expert
                        sizes = torch.zeros(rows.stop - rows.start, batch.shape[1] - skip, dtype=dtype)
                    else:
                        sizes = grams[name].add(in_place(linears[name], seen[name], len(batch))[rows, skip:], weight).cpu()
                    grams[name].sizes.append(sizes)
                    done.add(id(grams[name]))
        seen.clear()

    handles = [linears[name].register_forward_pre_hook(keep(name)) for names in shared_inputs for name in names]
    try:
        walk.apply(i, inputs, visit)
    finally:
        for handle in handles:
            handle.remove()
    return [collected(walk, i, grams) for grams in found]


def in_parts(start: int, count: int, parts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Which rows of a batch of `count`, that begins at row `start` of all, lie in which part: pairs of part and rows within the batch, empty ones left out.

    Args:
        start: Of the batch.
        count: Rows in it.
        parts: How many rows each part has, in order.
    """
    begin = 0
    for part, size in enumerate(parts):
        rows = slice(max(begin - start, 0), min(begin + size - start, count))
        if rows.start < rows.stop:
            yield part, rows
        begin += size


def together(grams: Mapping[str, Gram], others: Mapping[str, Gram]) -> dict[str, Gram]:
    """Grams over the tokens of both, shared by the linears that share the first ones."""
    sums: dict[int, Gram] = {}
    for name, gram in grams.items():
        if id(gram) not in sums:
            sums[id(gram)] = gram.plus(others[name])
    return {name: sums[id(gram)] for name, gram in grams.items()}


def collected(walk: Walk, i: int, grams: dict[str, Gram]) -> dict[str, Gram]:
    """Grams of the linears of block i that fall to this process, summed over all processes.

    Args:
        walk: The model.
        i: Block.
        grams: Of the sequences of this process, by linear; the same linears on all processes.
    """
    owners = walk.owners(i)
    for gram in {id(gram): gram for gram in grams.values()}.values():
        at = {owners[name] for name, one in grams.items() if one is gram}
        gram.collect(at.pop() if len(at) == 1 else None)
    return {name: gram for name, gram in grams.items() if owners[name] == ranks.rank()}


def refuse_second_use(walk: Walk, i: int, name: str, seen: Container[str]) -> None:
    """A linear that runs twice in one pass of its block has a Hessian of both uses together, which hooks do not see.

    Raises:
        ModelError: `name` is in `seen`.
    """
    if name in seen:
        raise ModelError(f"{walk.prefix(i)}.{name} runs twice in one pass of its block", "each linear once")
