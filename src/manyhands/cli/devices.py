"""Command `manyhands devices`: list the devices of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .options import Json, add_command
from .screen import amount, print_json, stdout

if TYPE_CHECKING:
    from ..distributed import Device


EXAMPLES = (
    "manyhands devices",
    "manyhands devices --json",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, devices, EXAMPLES)


def devices(json: Json = False) -> None:
    """List the devices of this machine with their memory, and why a device cannot be used."""
    from .. import distributed

    found = distributed.devices()
    if json:
        print_json([as_dict(device) for device in found])
    else:
        _print_table(found)


def as_dict(device: Device) -> dict[str, Any]:
    """Return a device as JSON-ready data."""
    return {
        "name": device.name,
        "kind": device.kind,
        "index": device.index,
        "model": device.model,
        "memory": device.memory,
        "free": device.free,
        "capability": device.capability,
        "links": device.links,
        "usable": not device.remedy,
        "note": device.remedy,
    }


def _print_table(found: list[Device]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for title in ("device", "model", "memory", "free", "capability", "links", "note"):
        table.add_column(title, justify="right" if title in ("memory", "free") else "left", overflow="fold")
    for d in found:
        cells = (d.name, d.model, amount(d.memory), amount(d.free), d.capability, d.links, d.remedy or "ready")
        table.add_row(*map(Text, cells), style="yellow" if d.remedy else "")
    stdout().print(table)
