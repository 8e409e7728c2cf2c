"""Command `manyhands dashboard`: a local web page with all runs, studies, plans and servers."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..core import SettingsError
from .interrupts import until_ended
from .options import add_command
from .screen import note

FOLDERS = ("runs", "studies", "plans", "profiles", "logs")
"""Folders that are shown if the command names none; those that do not exist are skipped until they are created."""
PORT = 8600
EXAMPLES = (
    "manyhands dashboard",
    "manyhands dashboard runs/ studies/ --port 9000",
    "manyhands dashboard --server http://127.0.0.1:8501",
)

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FOLDER",
        help=f"Folders to show, with all their subfolders. By default those of {', '.join(FOLDERS)} that exist.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(help="Port on this machine; 0 for any free port.")]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", metavar="URL", help="Running server whose metrics are shown; can be repeated."),
]
Open = Annotated[
    bool | None, typer.Option("--open/--no-open", help="Open the page in a browser; by default from a terminal.")
]


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, dashboard, EXAMPLES)


def dashboard(folders: Folders = None, port: Port = PORT, server: Servers = None, open: Open = None) -> None:
    """Show runs, studies, plans, profiles, servers and the cluster on a local web page.

    The dashboard only reads event logs, and is only reachable from this machine. Ctrl-C stops it.
    """
    from ..dashboard import Dashboard

    with until_ended() as ends, Dashboard(_chosen(folders), port=port, servers=server or []) as page:
        note(f"the dashboard is at {page.url}")
        if open or (open is None and sys.stderr.isatty()):
            webbrowser.open(page.url)
        ends.wait()


def _chosen(folders: list[Path] | None) -> list[Path]:
    """Return the given folders, which must exist, or the default folders, which may be created later."""
    if not folders:
        return [Path(name) for name in FOLDERS]
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(
                "the dashboard needs existing folders of runs or studies",
                got=f"{folder}, which is not a folder",
                remedy="pass runs/, or omit it to use the default folders",
            )
    return folders
