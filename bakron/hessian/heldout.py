"""Choosing by sequences that no factor has seen: errors of changes of a linear on their gradients, what is tried, and what is kept.

The error of a change E is `sum_t (g_t^T E x_t)^2` over the tokens held out, without any factorisation. It is an estimate: other tokens would give another one, and
a candidate that is no better often looks so. So the default stays unless another candidate is better by more than the standard error of the difference, which is
taken from sequence to sequence (or part to part of few sequences), where the two are compared on the same tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bakron import ranks
from bakron.config import DAMPINGS, Recipe
from bakron.hessian.gradients import block_gradients
from bakron.kron import Factor, Kron
from bakron.models.walk import Walk

STANDARD_ERRORS = 1.0  # by how many the default must be beaten
PARTS = 8  # at least, that the standard error is taken from
PAIRS = 1024  # tokens whose pairs with as many others are looked at together


class Heldout:
    """Inputs and gradients of the sequences held out, at the linears of one block that fall to this process.

    Args:
        walk: The original model.
        i: Block.
        inputs: What enters it, `[N, T, d]`, of the sequences of this process.
        gradient: At its output, `[samples, N, T, d]`.
        skip: First tokens of each sequence that do not count.
    """

    def __init__(self, walk: Walk, i: int, inputs: Tensor, gradient: Tensor, skip: int = 0) -> None:
        self._inputs: dict[str, dict[tuple[int, int], tuple[Tensor, Tensor]]] = {name: {} for name in walk.linears(i)}
        self._gradients: dict[str, dict[tuple[int, int], list[Tensor]]] = {name: {} for name in walk.linears(i)}

        def visit(rows: slice, name: str, x: Tensor, g: Tensor) -> None:
            counted = x[:, skip:].any(-1)  # not those that do not reach an expert
            self._inputs[name][0, rows.start] = counted.cpu(), x[:, skip:][counted].cpu()
            self._gradients[name].setdefault((0, rows.start), []).append(g[:, skip:][counted].cpu())

        block_gradients(walk, i, inputs, gradient, visit)
        for name, owner in walk.owners(i).items():
            parts = ranks.gather((self._inputs[name], self._gradients[name]), owner)
            self._inputs[name] = {(number, start): one for number, (part, _) in enumerate(parts) for (_, start), one in part.items()}
            self._gradients[name] = {(number, start): one for number, (_, part) in enumerate(parts) for (_, start), one in part.items()}

    def changes(self, name: str, E: Tensor) -> Tensor:
        """What adding `E [m, n]` to the weight of a linear does to each token's loss to first order, `g_t^T E x_t`, float64 `[N, samples, T]`.

        Args:
            name: Of the linear within the block.
            E: Values minus weight, on the CPU.
        """
        found = []
        for start, (counted, x) in self._inputs[name].items():
            one = torch.zeros(len(self._gradients[name][start]), *counted.shape, dtype=torch.float64)
            for sample, g in enumerate(self._gradients[name][start]):
                one[sample][counted] = ((x @ E.to(x).T) * g).sum(-1).double()
            found.append(one.transpose(0, 1))
        return torch.cat(found)

    def error(self, name: str, E: Tensor) -> float:
        """`sum_t (g_t^T E x_t)^2` over the tokens held out, for each label sampled; arguments as for `changes`."""
        return float(self.changes(name, E).square().sum())

    def tokens(self, name: str) -> tuple[Tensor, Tensor]:
        """Inputs `[t, n]` and gradients `[t, m]` of all tokens held out, once for each label sampled."""
        pairs = [(x, g) for start, (_, x) in self._inputs[name].items() for g in self._gradients[name][start]]
        return torch.cat([x for x, _ in pairs]), torch.cat([g for _, g in pairs])

    def alignment(self, name: str, kron: Kron) -> dict[str, float]:
        """How well factors fit the tokens held out: the cosine between their Hessian `H = sum_t x_t x_t^T (x) g_t g_t^T` and A (x) B, and A (x) I.

        From tokens alone: `<H, A (x) B> = sum_t (x_t^T A x_t)(g_t^T B g_t)` and `|H|^2 = sum_tu (x_t . x_u)^2 (g_t . g_u)^2`. H is noisy itself, so compare the two
        numbers of a linear with each other, and not with 1.

        Args:
            name: Of the linear within the block.
            kron: Undamped, with a B.
        """
        assert kron.B is not None
        x, g = (z / z.square().mean().sqrt().clamp_min(torch.finfo(z.dtype).tiny) for z in self.tokens(name))
        norm = math.sqrt(
            sum(
                float(((x[rows] @ x[columns].T) * (g[rows] @ g[columns].T)).double().square().sum())
                for rows in torch.arange(len(x)).split(PAIRS)
                for columns in torch.arange(len(x)).split(PAIRS)
            )
        )
        of_x, of_g = ((z @ factor.H.to(z) * z).sum(-1).double() for z, factor in ((x, kron.A), (g, kron.B)))
        a, b = (float(torch.linalg.norm(factor.H.double())) for factor in (kron.A, kron.B))
        found = {
            "two-sided": (of_x * of_g).sum() / max(norm * a * b, 1e-300),
            "one-sided": (of_x * g.double().square().sum(-1)).sum() / max(norm * a * math.sqrt(g.shape[1]), 1e-300),
        }
        return {side: round(float(cosine), 5) for side, cosine in found.items()}


@dataclass(frozen=True)
class Candidate:
    """A Hessian that a linear can be rounded with.

    Attributes:
        kron: Undamped.
        damp_a: Share to add to A.
        damp_b: Share to add to B; None where B is the identity.
    """

    kron: Kron
    damp_a: float
    damp_b: float | None


def candidates(kron: Kron, unweighted: Factor | None, recipe: Recipe) -> dict[str, Candidate]:
    """What a recipe wants tried for a linear, by name, the default first.

    Damping `auto` adds other amounts for A and for B, one of the two at a time, and (for B) A alone; `gate` adds A alone, and the unweighted A alone.

    Args:
        kron: Undamped Hessian of the linear.
        unweighted: A with every token counted once; None where that is A itself.
        recipe: Resolved.
    """
    two_sided = recipe.method == "bakron"
    amounts = {name: DAMPINGS[name][0] if name in recipe.autos else getattr(recipe, name) for name in DAMPINGS}
    default = "two-sided" if two_sided else "one-sided"
    found = {default: Candidate(kron if two_sided else Kron(kron.A), **amounts)}
    for name in recipe.autos:
        for amount in DAMPINGS[name][1:]:
            found[f"{default}, {name} {amount:g}"] = replace(found[default], **{name: amount})
    if two_sided and (recipe.gate or "damp_b" in recipe.autos):
        found["one-sided"] = Candidate(Kron(kron.A), amounts["damp_a"], None)
    if recipe.gate and unweighted is not None:
        found["unweighted"] = Candidate(Kron(unweighted), amounts["damp_a"], None)
    return found


def choose(changes: dict[str, Tensor]) -> dict[str, Any]:
    """Which candidate to keep: the one with the least error among those that beat the first one by more than the standard error of the difference, or the first.

    Args:
        changes: Per candidate `[N, samples, T]`, from `Heldout.changes`; N >= 2.

    Returns:
        For events.jsonl: `chosen`; `errors`; `margins`, by how many standard errors each other candidate is better than the first; and `sequence_errors`,
        `sum_s (sum_t g_t^T E x_t)^2`, which has the terms between tokens of a sequence that `errors` leaves out, from as many samples as there are sequences.
    """
    first, *others = changes
    split = -(-PARTS // len(changes[first]))  # parts of each sequence
    by_part = {name: torch.cat([part.square().sum((1, 2)) for part in one.chunk(split, 2)]) for name, one in changes.items()}
    errors = {name: float(one.sum()) for name, one in by_part.items()}
    margins = {}
    for name in others:
        gain = by_part[first] - by_part[name]
        spread = float(gain.std()) / math.sqrt(len(gain))
        margins[name] = round(float(gain.mean()) / max(spread, 1e-9 * float(gain.abs().mean()), 1e-300), 3)
    better = [name for name in others if margins[name] > STANDARD_ERRORS]
    return {
        "chosen": min(better, key=lambda name: errors[name]) if better else first,
        "errors": errors,
        "margins": margins,
        "sequence_errors": {name: float(one.sum(-1).square().sum()) for name, one in changes.items()},
    }
