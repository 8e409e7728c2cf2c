"""Command `manyhands doctor`: check this machine for problems."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json, add_command
from .screen import print_json, stdout

if TYPE_CHECKING:
    from ..diagnostics import Finding

Folder = Annotated[str, typer.Option(help="Folder in which runs will be saved.")]

EXAMPLES = (
    "manyhands doctor",
    "manyhands doctor --folder /data/runs --json",
)
_STYLES = {"ok": "green", "slow": "yellow", "broken": "bold red"}


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, doctor, EXAMPLES)


def doctor(folder: Folder = "runs", json: Json = False) -> None:
    """Check this machine for problems that prevent manyhands from working or make it slow, with remedies.

    It checks drivers, shared memory, limits, threads, the clock, the network and disks. The exit code is 1 if a check
    finds something broken.
    """
    from .. import diagnostics

    found = diagnostics.doctor(folder)
    if json:
        print_json([dataclasses.asdict(finding) for finding in found])
    else:
        _show(found)
    raise typer.Exit(1 if any(finding.verdict == "broken" for finding in found) else 0)


def _show(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in found:
        text = Text(finding.found, overflow="fold")
        if finding.verdict != "ok":
            text.append(f"\n{finding.why}\n", style="dim")
            text.append(f"remedy: {finding.remedy}", style="bold")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.name), text)
    console = stdout()
    console.print(table)
    bad = [f"{sum(finding.verdict == kind for finding in found)} {kind}" for kind in ("broken", "slow")]
    console.print(f"{len(found)} checks: {', '.join(bad)}", style="dim", highlight=False)
