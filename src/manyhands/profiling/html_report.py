"""HTML page of a profile: one file with tables, memory as SVG, and a timeline with zoom and search."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from ..core import format_bytes, format_duration
from .memory import KINDS
from .perfetto import bars
from .report import closing, headline, memory_rows, module_rows, operation_rows

if TYPE_CHECKING:
    from .memory import MemoryProfile
    from .profile import Profile

COLOURS = {
    "input": "#e0b040",
    "copy": "#e8d080",
    "forward": "#4f9d69",
    "backward": "#2f7a4d",
    "captured": "#4f9d69",
    "communication": "#c0504d",
    "optimizer": "#4878a8",
    "idle": "#d8d8d8",
}
KIND_COLOURS = dict(zip(KINDS, ("#4878a8", "#2f7a4d", "#8064a2", "#e0b040", "#b0b0b0"), strict=True))
WIDTH, HEIGHT = 900, 180


def html(profile: Profile) -> str:
    """Return the HTML page of a profile."""
    title = escape(headline(profile))
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    advice = "".join(f"<li>{escape(str(one))}</li>" for one in profile.advice)
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in closing(profile)[: len(profile.notes)])
    tables = [
        _table("Modules, first rank", ("module", "forward", "backward"), module_rows(profile)),
        _table("Operations, first rank", ("operation", "times a step", "seconds"), operation_rows(profile)),
        _table("Peak memory", *memory_rows(profile)),
    ]
    curves = "".join(
        f"<h3>rank {one.rank}</h3>{held_svg(one.memory)}" for one in profile.ranks if one.memory is not None
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<h1>{title}</h1>{paragraphs}<h2>Advice</h2><ol>{advice or '<li>no advice</li>'}</ol>"
        f"<h2>Where a step's time goes</h2>{_phases(profile)}{''.join(tables)}"
        f"{'<h2>Memory over a step</h2>' + curves if curves else ''}"
        "<h2>Timeline</h2><p>Wheel: zoom. Drag: move. Hover: what and how long. "
        '<input id="find" placeholder="find an operation"></p><div id="timeline"></div><div id="tip"></div>'
        f'<script type="application/json" id="data">{_data(profile)}</script><script>{script}</script></html>\n'
    )


def _phases(profile: Profile) -> str:
    rows, longest = [], max(sum(one.parts.seconds.values()) for one in profile.ranks) or 1e-9
    for one in profile.ranks:
        x, parts = 0.0, []
        for name, seconds in one.parts.seconds.items():
            width = WIDTH * seconds / longest
            hint = escape(f"{name}: {format_duration(seconds)}")
            colour = COLOURS.get(name, "#888")
            parts.append(
                f'<rect x="{x:.1f}" width="{width:.1f}" height="22" fill="{colour}"><title>{hint}</title></rect>'
            )
            x += width
        drawn = f'<svg width="{WIDTH}" height="22">{"".join(parts)}</svg>'
        rows.append(f"<tr><td>rank {one.rank}</td><td>{format_duration(one.breakdown.total)}</td><td>{drawn}</td></tr>")
    names = [name for name, seconds in profile.phases.items() if seconds]
    legend = "".join(
        f'<span class="key"><i style="background:{COLOURS.get(name, "#888")}"></i>{escape(name)} '
        f"{profile.share(name):.0%}</span>"
        for name in names
    )
    return f"<p>{legend}</p><table>{''.join(rows)}</table>"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>"


def held_svg(memory: MemoryProfile) -> str:
    """Return an SVG chart of the bytes by kind over a step, as stacked areas."""
    top = max(memory.totals) or 1
    below = [0.0] * len(memory.moments)
    areas = []
    for kind, sizes in memory.bytes.items():
        above = [low + one for low, one in zip(below, sizes, strict=True)]
        upper = [_point(at, value / top) for at, value in zip(memory.moments, above, strict=True)]
        lower = [_point(at, value / top) for at, value in zip(memory.moments, below, strict=True)]
        hint = escape(f"{kind}: {format_bytes(max(sizes), 3)} at the most")
        path = " ".join([*upper, *reversed(lower)])
        areas.append(f'<polygon points="{path}" fill="{KIND_COLOURS[kind]}"><title>{hint}</title></polygon>')
        below = above
    legend = "".join(
        f'<span class="key"><i style="background:{KIND_COLOURS[kind]}"></i>{kind} '
        f"{format_bytes(memory.peak[kind], 3)}</span>"
        for kind in memory.bytes
    )
    label = f'<text x="4" y="12" font-size="11">{format_bytes(top, 3)}, in {escape(memory.peak_phase)}</text>'
    return f'<p>{legend}</p><svg width="{WIDTH}" height="{HEIGHT}">{"".join(areas)}{label}</svg>'


def _point(moment: float, part: float) -> str:
    return f"{WIDTH * moment:.1f},{HEIGHT - (HEIGHT - 16) * part:.1f}"


def _data(profile: Profile) -> str:
    """Return the bars of the timeline as JSON: the tracks of each rank, with each name stored once."""
    names: dict[str, int] = {}
    tracks: dict[str, list[list[float]]] = {}
    for one in profile.ranks:
        for bar in bars(one):
            row = [names.setdefault(bar.name, len(names)), round(1e6 * bar.start, 1), round(1e6 * bar.end, 1)]
            tracks.setdefault(f"rank {one.rank}, {bar.track}", []).append(row)
    data = {"names": list(names), "tracks": [{"name": name, "bars": rows} for name, rows in tracks.items()]}
    # A name must not be able to close the script element.
    return json.dumps({**data, "colours": COLOURS}).replace("<", "\\u003c")
