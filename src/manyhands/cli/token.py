"""`manyhands token`: a secret by which the hosts of a job know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import add_verb
from .screen import note

File = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; a new file.", show_default=False)]
Hours = Annotated[float | None, typer.Option(help="For how long it lets hosts join; by default for ever.", min=0.0)]

EXAMPLES = ("manyhands token token --hours 24",)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, token, EXAMPLES)


def token(file: File, hours: Hours = None) -> None:
    """Make a token for --token-file, in a file that only you can read.

    Copy it to every host. Hosts prove to each other that they have it and never send it.
    """
    from ..launcher import write_token

    write_token(file, hours)
    note(f"wrote {file}; copy it to every host, readable by its owner alone")
