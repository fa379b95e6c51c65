"""Tokens that outweigh all others in a factor, such as attention sinks: what each token adds to the trace of A or B, against the median."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

LARGE = 100.0  # times the median
SHOWN = 5  # tokens that are named
ALARMING = 0.5  # share of a trace


def outliers(sizes: Tensor, skip: int = 0) -> dict[str, Any] | None:
    """Tokens that add more than `LARGE` times the median to a factor's trace.

    Args:
        sizes: What each token adds, `[N, T]` without the tokens skipped; `[N]` for whole sequences.
        skip: First tokens of each sequence that did not count.

    Returns:
        For events.jsonl: `tokens`, how many; `share` of the trace that they hold; `largest`, a few of them with `sequence`, `position` (not of whole sequences) and
        `multiple` of the median. None if there are none.
    """
    flat = sizes.flatten().double()
    counted = flat[flat > 0]
    if not len(counted):
        return None
    median = float(counted.median())
    large = (flat > LARGE * median).nonzero().flatten()
    if not len(large):
        return None
    largest = large[flat[large].argsort(descending=True, stable=True)][:SHOWN]
    rows = []
    for index in largest.tolist():
        place = {"sequence": index} if sizes.ndim == 1 else {"sequence": index // sizes.shape[1], "position": index % sizes.shape[1] + skip}
        rows.append(place | {"multiple": round(float(flat[index]) / median, 1)})
    return {"tokens": len(large), "share": round(float(flat[large].sum() / flat.sum()), 5), "largest": rows}


def warning(found: Iterable[dict[str, Any]]) -> str | None:
    """One line on factors that are mostly made of a few tokens; None if there are none.

    Args:
        found: Per linear `{side: outliers}`.
    """
    alarming = [[side for side in sides.values() if side["share"] > ALARMING] for sides in found]
    heavy = [one for one in alarming if one]
    if not heavy:
        return None
    positions = Counter(side["largest"][0].get("position") for one in heavy for side in one)
    position, times = positions.most_common(1)[0]
    where = "whole sequences" if position is None else f"most often position {position}, {times} times"
    return (
        f"warning: in {len(heavy)} of {len(alarming)} linears, tokens above {LARGE:g} times the median hold more than half of the trace of A or B "
        f"({where}; outliers in events.jsonl); skip_first leaves first tokens out, clip lowers large weights"
    )
