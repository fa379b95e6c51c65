"""Small plots: from figures to the points, lines and ticks of an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

WIDTH, WIDE, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 300, 900, 150, 44, 22, 8, 10
DOTS = 48  # points of a line that are marked
TINY = 1e-30  # smaller figures are zero


@dataclass(frozen=True)
class Series:
    """Points `(x, y, what they say)` of one color; `dashed` tells a second series of the same color apart."""

    name: str
    color: int
    points: list[tuple[float, float, str]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A plot, its geometry worked out: lines as SVG points, ticks as (position, text)."""

    title: str
    width: int
    lines: list[dict[str, Any]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def panel(
    title: str,
    series: Iterable[Series],
    *,
    log: bool = False,
    zero: bool = False,
    top: float = -math.inf,
    unit: Callable[[float], str] | None = None,
    width: int = WIDTH,
) -> Panel | None:
    """Lay out a plot.

    Args:
        title: Above it.
        series: What to draw.
        log: A logarithmic y axis; values that are not positive are left out.
        zero: The y axis starts at 0.
        top: The y axis reaches at least so far.
        unit: Writes a y value.
        width: Of the picture, in its own units.

    Returns:
        The plot, or None if there is nothing to draw.
    """
    drawn = [Series(one.name, one.color, [p for p in one.points if p[1] > TINY or not log], one.dashed) for one in series]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        return None
    scale: Callable[[float], float] = math.log10 if log else float
    xs = [x for one in drawn for x, _, _ in one.points]
    ys = [scale(y) for one in drawn for _, y, _ in one.points]
    low, high, y_ticks = (log_ticks if log else ticks)(0.0 if zero else min(ys), max([top, *ys]))
    lonely = all(len(one.points) == 1 for one in drawn)  # no lines: points need room at the edges
    left, right, x_ticks = ticks(min(xs), max(xs), whole=all(x == int(x) for x in xs))
    if not lonely:
        left, right = min(xs), max(xs)

    def place(value: float, start: float, end: float, first: float, last: float) -> float:
        return round(first + (last - first) * ((value - start) / (end - start) if end > start else 0.5), 1)

    def point(x: float, y: float) -> tuple[float, float]:
        return place(x, left, right, LEFT, width - RIGHT), place(scale(y), low, high, HEIGHT - BOTTOM, TOP)

    lines = []
    for one in drawn:
        spots = [(*point(x, y), text) for x, y, text in one.points]
        path = " ".join(f"{x},{y}" for x, y, _ in spots)
        radius = 4 if lonely else 2.2 if len(spots) <= DOTS else 0
        lines.append({"name": one.name, "color": one.color, "dashed": one.dashed, "path": path, "dots": spots[:1000], "radius": radius})
    x_marks = [(place(x, left, right, LEFT, width - RIGHT), number(x)) for x in x_ticks if left <= x <= right]
    y_marks = [(place(y, low, high, HEIGHT - BOTTOM, TOP), (unit or number)(10**y if log else y)) for y in y_ticks]
    return Panel(title, width, lines, x_marks, y_marks)


def ticks(low: float, high: float, whole: bool = False) -> tuple[float, float, list[float]]:
    """Round limits around a range, and three to five round places in it."""
    if high - low <= max(TINY, 1e-9 * max(abs(low), abs(high))):
        low, high = (low - 1, high + 1) if whole or abs(low) <= TINY else (min(0.9 * low, 1.1 * low), max(0.9 * low, 1.1 * low))
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 4)
    step = max(1.0, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = [round(i * step, 12) for i in range(first, last + 1)]
    return places[0], places[-1], places


def log_ticks(low: float, high: float) -> tuple[float, float, list[float]]:
    """Limits and places, as `ticks`, for values that are logarithms: powers of ten, or parts of them where the range is small."""
    marks = (0.0,) if high - low > 2 else (0.0, math.log10(2), math.log10(5))
    places = [power + mark for power in range(math.floor(low), math.ceil(high) + 1) for mark in marks]
    first = max([p for p in places if p <= low + 1e-9], default=places[0])
    last = min([p for p in places if p >= high - 1e-9], default=places[-1])
    if last <= first:
        first, last = first - 1, first + 1
    places = [p for p in places if first <= p <= last] or [first, last]
    return first, last, places[:: -(-len(places) // 5)]


def number(value: float) -> str:
    """A number in few characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def memory(value: float) -> str:
    """Bytes in words."""
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"
