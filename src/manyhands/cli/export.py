"""Command `manyhands export`: write the network of a run as a model that can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Target, add_command
from .screen import only_json, print_json, stdout
from .trained import Best, RunName, RunsFolder, open_run

Into = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder of the model, which gets a new version in it.", show_default=False),
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="Write a plain state dict to one .safetensors file instead.")
]
EXAMPLES = (
    "manyhands export first digits.py models/digits --best",
    "manyhands export first digits.py digits.safetensors --weights-only",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, export, EXAMPLES)


def export(
    run: RunName,
    target: Target,
    into: Into,
    best: Best = False,
    weights_only: WeightsOnly = False,
    folder: RunsFolder = "runs",
    json: Json = False,
) -> None:
    """Export the network of a run as the next version of a model, which `manyhands serve` can serve."""
    with only_json(json):
        path = open_run(run, folder, target).export(into, best=best, weights_only=weights_only)
    if json:
        print_json({"path": str(path)})
    else:
        stdout().print(f"exported to {path}", markup=False, highlight=False, soft_wrap=True)
