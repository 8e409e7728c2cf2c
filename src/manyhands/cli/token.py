"""Command `manyhands token`: create the secret with which the hosts of a job authenticate each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import add_command
from .screen import note

File = Annotated[Path, typer.Argument(metavar="FILE", help="New file to write the token to.", show_default=False)]
Hours = Annotated[float | None, typer.Option(help="Validity in hours; unlimited by default.", min=0.0)]

EXAMPLES = ("manyhands token token --hours 24",)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, token, EXAMPLES)


def token(file: File, hours: Hours = None) -> None:
    """Create a token for --token-file, in a file that only you can read.

    Copy it to every host. Hosts prove to each other that they have it, and never send it.
    """
    from ..launcher import write_token

    write_token(file, hours)
    note(f"wrote {file}; copy it to every host, readable by its owner alone")
