"""Command `manyhands replay`: repeat a step of a run on one device and compare its losses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, resolve_options
from .generated_options import with_options
from .options import Devices, Json, Target, add_command
from .screen import only_json, print_json, stdout
from .target import load_task
from .trained import RunsFolder, folder_of

if TYPE_CHECKING:
    from ..training import Replay

Which = Annotated[
    str, typer.Argument(metavar="RUN@STEP", help="Folder or name of a run, and a step.", show_default=False)
]

EXAMPLES = (
    "manyhands replay first@1200 digits.py",
    "manyhands replay runs/first@1200 digits.py --on cuda:0 --json",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, replay, EXAMPLES)


@with_options(Devices)
def replay(
    which: Which, target: Target, folder: RunsFolder = "runs", json: Json = False, *, given: dict[str, Any]
) -> None:
    """Repeat a step of a run on one device, from the nearest checkpoint, and compare its losses.

    Losses that differ, replicas that reported other losses for their samples, and the samples with the largest losses
    are printed. The exit code is 1 if there is a difference.
    """
    path, step = _split(which, folder)
    with only_json(json):
        task = load_task(target)
        import manyhands as mh

        from ..training import Run

        found = mh.replay(Run(path, task), step, on=resolve_options((Devices,), given).of(Devices).on)
    if json:
        print_json(_as_dict(found))
    else:
        stdout().print(str(found), markup=False, highlight=False, soft_wrap=True)
    if not found.equal:
        raise typer.Exit(1)


def _split(which: str, folder: str) -> tuple[Path, int]:
    """Return the folder and the step that "RUN@STEP" names."""
    name, at, step = which.rpartition("@")
    if not at or not name or not step.isdecimal():
        raise SettingsError(
            "the step of a run must be written RUN@STEP", got=repr(which), remedy="write for example runs/first@1200"
        )
    return folder_of(name, folder), int(step)


def _as_dict(found: Replay) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "equal": found.equal, "bad_samples": found.bad_samples}
