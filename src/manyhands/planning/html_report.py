"""HTML report of a plan as one standalone file, and its saturation curve as an SVG image."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ..core import counted, html_lines, html_table
from .report import BATCH_COLUMNS, BATCH_TITLE, batch_rows, cells, closing, header, lines

if TYPE_CHECKING:
    from .comparison import Comparison
    from .curve import Curve
    from .plan import Plan

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 400, 60, 40
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    "tr.pick{font-weight:bold;background:#eef6ee}tr.not{color:#888}"
)


def svg(curve: Curve, here: int) -> str:
    """Return an SVG chart of the speed-up by number of devices, with the ideal speed-up; both axes are logarithmic.

    `here` is the number of devices of the cluster, which is marked.
    """
    top = max(1.0, math.log2(curve.points[-1].num_devices))

    def place(devices: float, speed: float) -> str:
        x = LEFT + (WIDTH - LEFT - 20) * math.log2(devices) / top
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * max(0.0, math.log2(max(speed, 1.0))) / top
        return f"{x:.1f},{y:.1f}"

    path = " ".join(place(point.num_devices, point.speedup) for point in curve.points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<polyline points="{place(1, 1)} {place(2**top, 2**top)}" stroke="#bbb" stroke-dasharray="4" fill="none"/>',
        f'<polyline points="{path}" stroke="#2a6fa8" stroke-width="2" fill="none"/>',
    ]
    for power in range(int(top) + 1):
        x = place(2**power, 1).split(",")[0]
        y = place(1, 2**power).split(",")[1]
        parts.append(f'<text x="{x}" y="{HEIGHT - 20}" text-anchor="middle">{2**power}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{2**power}</text>')
    marks = [(curve.saturates, "#b03030", "saturates")] if not curve.never else []
    for devices, colour, text in [*marks, (here, "#308030", "this cluster")]:
        nearest = min(curve.points, key=lambda point: abs(math.log2(point.num_devices / devices)))
        x, y = place(devices, nearest.speedup).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(
            f'<text x="{x}" y="{float(y) - 8:.1f}" fill="{colour}" text-anchor="middle">{text}: {devices}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">devices</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">speed-up</text></svg>')
    return "\n".join(parts) + "\n"


def html(plan: Plan, most: int = 30) -> str:
    """Return an HTML page with the table (at most `most` strategies), the curve, its reason, and what would help."""
    return _page(_title(plan), _body(plan, most))


def comparison_page(comparison: Comparison, most: int = 12) -> str:
    """Return an HTML page with all clusters side by side, and the plan for each with at most `most` strategies."""
    from .comparison import COLUMNS

    title = f"{comparison.plans[0].name}: clusters side by side"
    sides = html_table("time, price and energy of a million samples", comparison.rows(), COLUMNS)
    plans = "".join(f"<h1>{escape(_title(plan))}</h1>{_body(plan, most)}" for plan in comparison.plans)
    return _page(title, f"{sides}{html_lines(comparison.lines())}{plans}")


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>\n"
    )


def _title(plan: Plan) -> str:
    return f"{plan.name}: {counted(plan.workload.batch_size, 'sample')} a step on {plan.cluster}"


def _body(plan: Plan, most: int) -> str:
    best = plan.best.option
    rows = []
    for option in plan.options[:most]:
        kind = ' class="pick"' if option is best else "" if option.can_run else ' class="not"'
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells(plan, option))
        rows.append(f"<tr{kind}>{columns}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in header(plan))
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines(plan))
    batches = batch_rows(plan)
    target = html_table(BATCH_TITLE, batches, BATCH_COLUMNS) if batches else ""
    end = "".join(f"<p>{escape(line)}</p>" for line in closing(plan.curve) if line)
    return (
        f"{paragraphs}<table><tr>{head}</tr>{''.join(rows)}</table>{target}"
        f"<h2>Speed against devices</h2>{svg(plan.curve, plan.cluster.num_devices)}{end}"
    )


def table(plan: Plan, most: int = 6) -> str:
    """Return a small table for a notebook: the best options, plain data parallel, the pick and the saturation."""
    shown = list(plan.options[:most])
    if plan.control not in shown:
        shown.append(plan.control)
    title = _title(plan)
    rows = [cells(plan, option) for option in shown]
    return html_table(title, rows, header(plan)) + html_lines([*lines(plan), *filter(None, closing(plan.curve))])
