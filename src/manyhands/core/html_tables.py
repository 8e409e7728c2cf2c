"""Small HTML tables and curves for notebooks; every text is escaped, and nothing refers to other files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

MOST_POINTS = 200
WIDTH, HEIGHT = 320, 60


def html_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table.

    >>> html_table("a < b", [("x", 1)], ("name", "value"))
    '<table><caption>a &lt; b</caption><tr><th>name</th><th>value</th></tr><tr><td>x</td><td>1</td></tr></table>'
    """
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}{body}</table>"


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text as one block; an empty text without lines.

    >>> html_lines(["a & b", "c"])
    '<div>a &amp; b<br>c</div>'
    """
    text = "<br>".join(map(escape, lines))
    return f"<div>{text}</div>" if text else ""


def html_curve(values: Sequence[float], name: str) -> str:
    """Return a small curve as SVG, labelled with its name; an empty text for fewer than two finite values."""
    step = max(1, math.ceil(len(values) / MOST_POINTS))
    points = [(at, value) for at, value in enumerate(values) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    picked = [point for point in points if point[0] % step == 0 or point is points[-1]]
    last = max(1, len(values) - 1)
    scale = (HEIGHT - 4) / (high - low) if high > low else 0.0
    places = " ".join(f"{WIDTH * at / last:.1f},{2 + (high - value) * scale:.1f}" for at, value in picked)
    label = escape(f"{name}, from {values[points[0][0]]:.4g} to {points[-1][1]:.4g}", quote=True)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{places}" fill="none" stroke="#2a6fa8" stroke-width="1.5"/></svg>'
    )
