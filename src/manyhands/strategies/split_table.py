"""Table of which parameters go where, and of the bytes held and sent by each device, computed before a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..core import StrategySpec, format_bytes, html_lines, html_table

if TYPE_CHECKING:
    from .tensor import Layout

HEADER = ("layers", "kind", "way", "whole", "a device")


@dataclass(frozen=True)
class LayerRow:
    """Layers of one kind: those whose names differ only in numbers."""

    name: str
    kind: str
    way: str
    """How the layers are computed along the tensor axis; empty without that axis."""
    count: int
    whole: int
    """Bytes of the layers' parameters, and of what each device holds of them."""
    held: int


@dataclass(frozen=True)
class SplitTable:
    """How a network is split. Bytes are those of the first device; the others hold as much or less."""

    spec: StrategySpec
    rows: tuple[LayerRow, ...]
    parameters: int
    gradients: int
    optimizer: int
    whole: int
    """Bytes of all parameters of the network."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a device sends per step, by purpose."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-serializable data."""
        return {**asdict(self), "spec": self.spec.to_dict(), "traffic": dict(self.traffic)}

    def _named(self) -> list[tuple[str, str, str, str, str]]:
        """Return the cells of the row of each kind of layer."""
        return [
            (f"{row.name} x{row.count}" if row.count > 1 else row.name or "the network's own", row.kind, row.way,
             format_bytes(row.whole), format_bytes(row.held)) for row in self.rows
        ]  # fmt: skip

    def lines(self) -> list[str]:
        """Return a line for each kind of layer, one for memory and one for communication."""
        table = [HEADER, *self._named()]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        lines = [
            "  ".join((*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=False)),
                       *(cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True)))).rstrip()
            for row in table
        ]  # fmt: skip
        return [*lines, *self._totals()]

    def _totals(self) -> list[str]:
        """Return what a device holds and sends, and the notes."""
        held = {"parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
        lines = [f"a device holds {format_bytes(sum(held.values()))}: {parts}"]
        sent = ", ".join(f"{what} {format_bytes(size)}" for what, size in self.traffic.items())
        if self.spec.num_devices == 1:
            lines.append('this is a single device, so nothing is split; pass several, such as on="cpu*2"')
        else:
            lines.append(f"a device sends {format_bytes(sum(self.traffic.values()))} a step: {sent or 'nothing'}")
        return [*lines, *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return html_table(f"where everything goes, {self.spec}", self._named(), HEADER) + html_lines(self._totals())


def table_of(
    model: nn.Module,
    spec: StrategySpec,
    *,
    layout: Layout | None = None,
    slots: float = 0.0,
    rows: float = 0.0,
    names: Collection[str] | None = None,
    notes: Collection[str] = (),
) -> SplitTable:
    """Return the table of a network under a spec with definite axes.

    Args:
        slots: Bytes of optimizer state per byte of parameter.
        rows: A rank's batch as a multiple of the samples that the layout was found with.
        names: The parameters that a device holds at least a part of; default: all.
        notes: Messages about how the network is split, in addition to the layout's.
    """
    placements = {} if layout is None else layout.placements(model)
    found = {name: p for name, p in model.named_parameters() if names is None or name in names}
    held = {name: _held(p, spec, placements.get(name)) for name, p in found.items()}
    trained = {name for name, p in found.items() if p.requires_grad}
    at_rest = {name: held[name][spec.sharding != "optimizer"] for name in held}
    gradients = sum(at_rest[name] for name in trained)
    shards, replicas = spec.axes.get("shards", 1), spec.axes.get("replicas", 1)
    num_bytes = sum(whole for whole, _ in held.values())
    traffic: dict[str, int] = {}
    if shards > 1:
        # With micro-batches a stage's parameters are gathered once for all of them.
        rounds = 3 if spec.sharding == "full" and spec.stages == 1 else 2
        traffic["shards"] = rounds * num_bytes * (shards - 1) // shards
    if replicas > 1:
        traffic["replicas"] = 2 * gradients * (replicas - 1) // replicas
    if spec.context > 1:
        # Without keys and values, which depend on the length of the sequences.
        traffic["context"] = 2 * gradients * (spec.context - 1) // spec.context
    if layout is not None:
        traffic["tensor"] = round(layout.traffic * rows)
    return SplitTable(
        spec=spec,
        rows=tuple(_rows(model, held, at_rest, layout)),
        parameters=sum(at_rest.values()),
        gradients=gradients,
        optimizer=round(slots * sum(held[name][1] for name in trained)),
        whole=sum(p.numel() * p.element_size() for p in model.parameters()),
        traffic=traffic,
        notes=(*(() if layout is None else layout.notes), *notes),
    )


def _held(parameter: Tensor, spec: StrategySpec, place: Any) -> tuple[int, int]:
    """Return a parameter's bytes on the first rank without sharding, and with sharding."""
    shape = list(parameter.shape)
    if place is not None:
        shape[place.dim] = -(-shape[place.dim] // spec.tensor)
    whole = prod(shape) * parameter.element_size()
    if not shape:
        return whole, whole
    shape[0] = -(-shape[0] // spec.axes.get("shards", 1))
    return whole, prod(shape) * parameter.element_size()


def _rows(
    model: nn.Module, held: Mapping[str, tuple[int, int]], at_rest: Mapping[str, int], layout: Layout | None
) -> Iterator[LayerRow]:
    found: dict[tuple[str, str, str], list[int]] = {}
    whole = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        own = [f"{name}.{key}".lstrip(".") for key, _ in module._parameters.items()]
        mine = [key for key in own if key in held]
        if not mine:
            continue
        way = "" if layout is None else layout.way_of(name)
        key = (re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name), type(module).__name__, way)
        entry = found.setdefault(key, [0, 0, 0])
        entry[0] += 1
        entry[1] += sum(whole[k] for k in mine)
        entry[2] += sum(at_rest[k] for k in mine)
    for (name, kind, way), (count, size, part) in found.items():
        yield LayerRow(name, kind, way, count, size, part)
