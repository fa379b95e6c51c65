"""`input`: A = E[x x^T], B = I. The Hessian of the layer's own squared output error (GPTQ, Frantar et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping

import torch
from torch import Tensor, nn

from bakron.errors import FactorError, ModelError
from bakron.hessian.factor import Gram
from bakron.kron import Factor, Kron
from bakron.models.linears import Routed, in_place
from bakron.models.walk import Walk


class InputEstimator:
    """Second moments of every linear's inputs.

    Args:
        walk: The model.
        skip: First tokens of each sequence that do not count.
    """

    def __init__(self, walk: Walk, *, skip: int = 0) -> None:
        self.walk, self.skip = walk, skip
        self.tokens: dict[str, int] = {}
        self.effective: dict[str, dict[str, float]] = {}

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i; linears that see the same input share one Factor.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU.

        Returns:
            Undamped Kron per linear, B = None.
        """
        grams = input_moments(self.walk, i, inputs, {}, skip=self.skip)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        self.effective = {name: {"a": gram.effective} for name, gram in grams.items()}
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


def input_moments(
    walk: Walk, i: int, inputs: Tensor, weights: Mapping[str, Tensor], *, without: Collection[str] = (), skip: int = 0
) -> dict[str, Gram]:
    """`sum_t w_t x_t x_t^T` for every linear of block i.

    Args:
        walk: The model.
        i: Block.
        inputs: What enters the block, `[N, T, d]` on the CPU.
        weights: Per linear `[N, T]`; a linear without weights counts every token once, and shares its Gram with those that see the same input.
        without: Linears to leave out.
        skip: First tokens of each sequence that do not count.

    Returns:
        Gram per linear.
    """
    linears, seen = walk.linears(i), dict[str, Tensor]()
    shared_inputs = [group for names in walk.shared_inputs(i) if (group := [name for name in names if name not in without])]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    grams: dict[str, Gram] = {}
    for names in shared_inputs:
        shared = Gram(linears[names[0]].in_features, walk.device, dtype)
        grams |= {name: Gram(linears[name].in_features, walk.device, dtype) if name in weights else shared for name in names}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            refuse_second_use(walk, i, name, seen)
            seen[name] = arguments[0]

        return hook

    def visit(start: int, batch: Tensor) -> None:
        for names in shared_inputs:
            done = set[int]()
            for name in names:
                if id(grams[name]) not in done and (name in seen or not isinstance(linears[name], Routed)):
                    weight = weights[name][start : start + len(batch), skip:] if name in weights else None
                    grams[name].add(in_place(linears[name], seen[name], len(batch))[:, skip:], weight)
                    done.add(id(grams[name]))
        seen.clear()

    handles = [linears[name].register_forward_pre_hook(keep(name)) for names in shared_inputs for name in names]
    try:
        walk.apply(i, inputs, visit)
    finally:
        for handle in handles:
            handle.remove()
    return grams


def refuse_second_use(walk: Walk, i: int, name: str, seen: Container[str]) -> None:
    """A linear that runs twice in one pass of its block has a Hessian of both uses together, which hooks do not see.

    Raises:
        ModelError: `name` is in `seen`.
    """
    if name in seen:
        raise ModelError(f"{walk.prefix(i)}.{name} runs twice in one pass of its block", "each linear once")
