"""Draw the pictures of the explanation: `python docs/pictures.py` writes docs/images/*.svg, a test checks that they are what it writes."""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
BLUE, RED, GREY, GREEN, DARK = "#3f6fb5", "#c8553d", "#d9dde3", "#5a9367", "#333"


def svg(width: int, height: int, title: str, *parts: str) -> str:
    """A picture on white, readable in light and dark themes."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    style = 'font-family="sans-serif" font-size="14"'
    return "\n".join(
        [f"{head} {style}>", f"<title>{title}</title>", f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""]
    )


def box(x: float, y: float, w: float, h: float, colour: str, label: str = "", opacity: float = 1.0) -> str:
    """A rectangle with a label in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}" fill-opacity="{opacity:g}" stroke="{DARK}" stroke-width="0.7"/>'
    return shape + (text(x + w / 2, y + h / 2 + 5, label) if label else "")


def text(x: float, y: float, label: str, anchor: str = "middle", size: int = 14) -> str:
    """Text at a point."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{DARK}">{label}</text>'


def loss() -> str:
    """tr(B E A E^T) as four blocks."""
    m, n, y = 70, 110, 45
    x = [60.0]
    for width in (m, n, n):
        x.append(x[-1] + width + 26)
    parts = [
        text(34, y + 40, "L = tr", size=16),
        box(x[0], y, m, m, BLUE, "B", 0.5),
        box(x[1], y, n, m, RED, "E = V − W", 0.5),
        box(x[2], y - 20, n, n, GREEN, "A", 0.5),
        box(x[3], y - 20, m, n, RED, "Eᵀ", 0.5),
        text(x[0] + m / 2, y + n + 10, "m × m", size=12),
        text(x[1] + n / 2, y + n + 10, "m × n", size=12),
        text(x[2] + n / 2, y + n + 10, "n × n", size=12),
        text(x[3] + m / 2, y + n + 10, "n × m", size=12),
        text(x[0] + m / 2, 15, "outputs", size=12),
        text(x[2] + n / 2, 15, "inputs", size=12),
    ]
    return svg(500, 175, "L = tr(B E A E^T)", *parts)


def feedback() -> str:
    """Which errors a target sees."""
    cell, rows, columns, i, j = 26, 7, 10, 4, 6
    parts = []
    for r in range(rows):
        for c in range(columns):
            seen = r <= i and c <= j and (r, c) != (i, j)
            done = r + c < i + j
            colour = RED if (r, c) == (i, j) else BLUE if seen else GREY if done else "white"
            parts.append(box(40 + c * cell, 30 + r * cell, cell, cell, colour, "", 0.6))
        if r <= i:
            parts.append(text(34, 30 + r * cell + 18, "·" if r < i else "i", "end", 13))
    parts += [
        text(40 + j * cell + 13, 24, "j", size=13),
        box(330, 60, 16, 16, RED, "", 0.6),
        text(354, 73, "to be rounded now", "start", 13),
        box(330, 90, 16, 16, BLUE, "", 0.6),
        text(354, 103, "its errors are made up for", "start", 13),
        box(330, 120, 16, 16, GREY, "", 0.6),
        text(354, 133, "rounded already, not seen from here", "start", 13),
        box(330, 150, 16, 16, "white", "", 0.6),
        text(354, 163, "to come", "start", 13),
    ]
    return svg(590, 230, "A target depends on the errors above and to the left", *parts)


def schedule() -> str:
    """Panels and tiles."""
    parts = [
        box(40, 30, 300, 80, BLUE, "finished rows: one product with N_B", 0.45),
        box(40, 110, 150, 50, GREEN, "left: one with N_A", 0.45),
        box(190, 110, 50, 50, RED, "tile", 0.6),
        box(240, 110, 100, 50, "white"),
        box(40, 160, 300, 50, "white", "next panels"),
        text(360, 75, "everything above the panel, at once", "start", 13),
        text(360, 133, "inside the tile, entry by entry:", "start", 13),
        text(360, 151, "an anti-diagonal in the lanes of one vector", "start", 13),
    ]
    return svg(640, 230, "Panels of rows, tiles of columns", *parts)


PICTURES = {"loss": loss, "feedback": feedback, "schedule": schedule}

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), "utf-8")
