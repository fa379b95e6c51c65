"""Tokens that outweigh all others in a factor, such as attention sinks: what each token adds to the trace of A or B, against the median."""

from __future__ import annotations

from typing import Any

from torch import Tensor

LARGE = 100.0  # times the median
SHOWN = 5  # tokens that are named


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
