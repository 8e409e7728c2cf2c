"""Command `manyhands explain`: show how a strategy splits a network, without training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import SettingsError, resolve_options
from .generated_options import with_options
from .options import Devices, Distribution, Json, Params, Target, add_command
from .screen import note, only_json, print_json, stdout
from .target import load_task, parse_params

EXAMPLES = (
    "manyhands explain gpt.py --strategy sharded --on 'cpu*4'",
    "manyhands explain gpt.py --strategy tensor=2,replicas=2 --on 'cpu*4'",
    "manyhands explain towers.py --strategy placed --on 'cpu*2' --draw partition.svg",
)
Draw = Annotated[Path | None, typer.Option(help="Where to draw a partitioned network: a path ending in .svg or .html.")]


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, explain, EXAMPLES)


@with_options(Distribution, Devices)
def explain(
    target: Target, params: Params = None, draw: Draw = None, json: Json = False, *, given: dict[str, Any]
) -> None:
    """Show how a strategy would split a network, without training: layers, bytes on each device, and bytes sent."""
    settings = resolve_options((Distribution, Devices), given)
    with only_json(json):
        task = load_task(target)
        import manyhands as mh

        found: Any = mh.explain(
            task, settings.of(Distribution).strategy, on=settings.of(Devices).on, params=parse_params(params or [])
        )
    if draw is not None:
        if not hasattr(found, "show"):
            raise SettingsError(
                "--draw needs a strategy that partitions the network",
                got=f"{found.spec}",
                remedy="omit --draw, or use --strategy placed or pipeline",
            )
        found.show(draw)
    if json:
        print_json(found.to_dict() if hasattr(found, "to_dict") else dataclasses.asdict(found))
    else:
        stdout().print(str(found), markup=False, highlight=False, soft_wrap=True)
        if draw is not None:
            note(f"drawn to {draw}")
