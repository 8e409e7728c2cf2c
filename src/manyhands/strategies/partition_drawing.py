"""Text and SVG drawing of a partitioned network: which piece is where, and what is sent."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import counted, format_duration, html_lines
from .placement import Partition, Placement
from .placement_rules import parameters_of
from .split_table import SplitTable

WIDTH, HEIGHT, GAP = 210, 74, 46


@dataclass(frozen=True)
class Box:
    """A piece of a network: operations that one rank computes without waiting for another rank."""

    rank: int
    device: str
    parts: tuple[str, ...]
    """The outermost modules in the piece."""
    num_operations: int
    num_parameters: int
    seconds: float
    """Measured seconds of forward and backward; 0 if not measured."""


@dataclass(frozen=True)
class Arrow:
    """Results that are sent from one piece to another one on another rank."""

    source: int
    to: int
    num_bytes: int


@dataclass(frozen=True)
class Outline:
    """Where the pieces of a partitioned network are: `print` it, or `show("partition.svg")`.

    >>> box = Box(0, "cpu#0", ("tower_a",), 3, 1200, 0.0)
    >>> print(Outline("placed", (box,), ()))
    placed: 1 piece on 1 device, 0 bytes across
      0  cpu#0  tower_a  (3 operations, 1,200 parameters)
    """

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    table: SplitTable | None = None
    """How several ranks of a stage hold it together; bytes are those of the largest stage."""
    notes: tuple[str, ...] = ()
    """Further notes about the partition."""

    def __str__(self) -> str:
        across = sum(arrow.num_bytes for arrow in self.arrows)
        num_devices = len({name for box in self.boxes for name in box.device.split(" ")})
        pieces, devices = counted(len(self.boxes), "piece"), counted(num_devices, "device")
        lines = [f"{self.title}: {pieces} on {devices}, {across:,} bytes across"]
        for index, box in enumerate(self.boxes):
            time = f", {format_duration(box.seconds)}" if box.seconds else ""
            size = f"({counted(box.num_operations, 'operation')}, {counted(box.num_parameters, 'parameter')}{time})"
            lines.append(f"  {index}  {box.device}  {_named(box.parts)}  {size}")
            for arrow in self.arrows:
                if arrow.source == index:
                    lines.append(f"       to {arrow.to} on {self.boxes[arrow.to].device}: {arrow.num_bytes:,} bytes")
        if self.table is not None:
            lines += self.table.lines()
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def show(self, path: str | Path | None = None) -> None:
        """Print the partition; with a path ending in .svg or .html, draw it there instead."""
        if path is None:
            print(self)
            return
        drawn = self.svg()
        if Path(path).suffix == ".html":
            title = html.escape(self.title)
            drawn = f"<!doctype html><meta charset='utf-8'><title>{title}</title><h1>{title}</h1>{drawn}"
        Path(path).write_text(drawn, encoding="utf-8")

    def _repr_html_(self) -> str:
        return self.svg() + html_lines(str(self).splitlines())

    def svg(self) -> str:
        """Return an SVG of the partition: a row per device, pieces in execution order, and arrows for what is sent."""
        ranks = sorted({box.rank for box in self.boxes})
        rows = {rank: row for row, rank in enumerate(ranks)}
        spots = [(20 + i * (WIDTH // 2 + GAP), 20 + rows[b.rank] * (HEIGHT + GAP)) for i, b in enumerate(self.boxes)]
        width = max((x for x, _ in spots), default=0) + WIDTH + 20
        height = 40 + len(ranks) * (HEIGHT + GAP)
        colours = ("#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3", "#ede9fe", "#ffedd5")
        lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-family='sans-serif' "
            "font-size='11'><defs><marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='3' orient='auto'>"
            "<path d='M0,0 L7,3 L0,6 z'/></marker></defs>"
        ]
        for arrow in self.arrows:
            (x1, y1), (x2, y2) = spots[arrow.source], spots[arrow.to]
            lines.append(
                f"<line x1='{x1 + WIDTH // 2}' y1='{y1 + HEIGHT // 2}' x2='{x2}' y2='{y2 + HEIGHT // 2}' "
                f"stroke='#334155' marker-end='url(#tip)'><title>{arrow.num_bytes:,} bytes</title></line>"
            )
        for (x, y), box in zip(spots, self.boxes, strict=True):
            texts = (box.device, _named(box.parts), f"{box.num_parameters:,} parameters")
            shown = "".join(
                f"<text x='{x + 8}' y='{y + 18 + 20 * n}'>{html.escape(text[:34])}</text>"
                for n, text in enumerate(texts)
            )
            fill = colours[rows[box.rank] % len(colours)]
            lines.append(
                f"<rect x='{x}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='6' fill='{fill}' "
                f"stroke='#334155'/>{shown}"
            )
        return "\n".join([*lines, "</svg>"])


def drawn(title: str, partition: Partition, placement: Placement, devices: Sequence[str]) -> Outline:
    """Return the outline of a partition; `devices` are the device names of the ranks."""
    works, pieces = partition.works, [piece for piece in partition.pieces if piece.nodes]
    sizes = {name: parameter.numel() for name, parameter in placement.model.named_parameters()}
    paths = {piece.index: {works.traced.paths[node.name] for node in piece.nodes} for piece in pieces}
    others = {index: set().union(*(paths[other] for other in paths if other != index)) for index in paths}
    boxes = []
    for piece in pieces:
        units = {works.unit_of[node.name] for node in piece.nodes}
        held = parameters_of(works, piece.nodes)
        boxes.append(
            Box(
                piece.rank,
                devices[piece.rank],
                _outermost([works.traced.paths[node.name] for node in piece.nodes], others[piece.index]),
                len(piece.nodes),
                sum(sizes.get(name, 0) for name in dict.fromkeys(held)),
                sum(placement.seconds[unit] for unit in units) if placement.seconds else 0.0,
            )
        )
    places = {piece.index: place for place, piece in enumerate(pieces)}
    crossing: Counter[tuple[int, int]] = Counter()
    for item in partition.crossings:
        if item.source.index in places and item.first.index in places and item.name in works.facts.values:
            pair = places[item.source.index], places[item.first.index]
            crossing[pair] += works.facts.values[item.name].num_bytes
    arrows = tuple(Arrow(source, to, size) for (source, to), size in crossing.items())
    return Outline(title, tuple(boxes), arrows, notes=tuple(placement.notes()))


def _outermost(paths: Sequence[str], others: set[str]) -> tuple[str, ...]:
    """Return the fewest module names that cover some operations and none of the others' modules.

    >>> _outermost(["a.0", "a.1", "b.0"], {"b.1"})
    ('a', 'b.0')
    """
    found: dict[str, None] = {}
    for path in filter(None, paths):
        above = path
        while above and not any(other == above or other.startswith(f"{above}.") for other in others):
            path, above = above, above.rpartition(".")[0]
        found[path] = None
    return tuple(found)


def _named(parts: Sequence[str]) -> str:
    """Join some names, shortened in the middle if there are many.

    >>> _named(("a", "b", "c", "d", "e"))
    'a, b, c … e'
    """
    if len(parts) > 4:
        return f"{', '.join(parts[:3])} … {parts[-1]}"
    return ", ".join(parts) or "between modules"
