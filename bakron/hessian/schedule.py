"""Going backward through a chain of blocks when not all their inputs fit in memory: which inputs to keep, which to compute again. Pure: no model, no tensors.

The chain is halved recursively: to visit units lo .. hi - 1 from the last to the first, run forward from the kept input of lo to some middle, keep the input there,
visit the right part, drop it, visit the left part from the kept input of lo. Where to cut is chosen for the fewest forward runs with the inputs that may be kept at
once (as in Griewank and Walther's binomial checkpointing); with room for all inputs that is every input kept, one forward run a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

State = TypeVar("State")


def fewest_slots(units: int) -> int:
    """Kept inputs that recursive halving of `units` units needs, the one of the first unit included: ceil(log2 units) + 1."""
    return (units - 1).bit_length() + 1


def forward_runs(units: int, slots: int) -> int:
    """Forward runs of single units that a visit of all `units` costs, with at most `slots` inputs kept.

    Args:
        units: At least 1.
        slots: At least `fewest_slots(units)`; more than `units` are of no use.
    """
    return _best(units, min(slots, units))[0]


@cache
def _best(units: int, slots: int) -> tuple[int, int]:
    """Fewest forward runs, and where the first cut is; (a large number, 0) where it cannot be done."""
    if units == 1:
        return 0, 0
    if slots < 2:
        return 1 << 60, 0
    if slots >= units:
        return units - 1, 1
    return min((cut + _best(units - cut, slots - 1)[0] + _best(cut, slots)[0], cut) for cut in range(1, units))


def reverse(
    units: int, slots: int, first: State, forward: Callable[[int, State], State], visit: Callable[[int, State], None]
) -> tuple[int, int]:
    """Visit units from the last to the first, each with its input.

    Args:
        units: Length of the chain.
        slots: Inputs kept at once, at least `fewest_slots(units)`.
        first: Input of unit 0.
        forward: `(unit, its input) -> input of the next unit`.
        visit: Called with (unit, its input).

    Returns:
        Forward runs done, and the most inputs that were kept at once.

    Raises:
        ValueError: Too few slots.
    """
    if slots < fewest_slots(units):
        raise ValueError(f"{slots} slots for {units} units; at least {fewest_slots(units)} are needed")
    kept, runs, most = [first], 0, 1
    del first

    def segment(low: int, high: int, slots: int) -> None:
        nonlocal runs, most
        if high - low == 1:
            visit(low, kept.pop())
            return
        middle = low + _best(high - low, min(slots, high - low))[1]
        state = kept[-1]
        for unit in range(low, middle):
            state = forward(unit, state)
            runs += 1
        kept.append(state)
        most = max(most, len(kept))
        del state
        segment(middle, high, slots - 1)
        segment(low, middle, slots)

    segment(0, units, slots)
    return runs, most
