"""`manyhands replay`: a committed step of a run, taken again on one device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from .options import Json, On, Target, add_verb
from .screen import only_json, print_json, stdout
from .target import load_task

if TYPE_CHECKING:
    from ..training import Replay

Which = Annotated[
    str, typer.Argument(metavar="RUN@STEP", help="A run's folder, or its name, and a step.", show_default=False)
]
Folder = Annotated[str, typer.Option(help="Where runs are kept.")]

EXAMPLES = (
    "manyhands replay first@1200 digits.py",
    "manyhands replay runs/first@1200 digits.py --on cuda:0 --json",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, replay, EXAMPLES)


def replay(which: Which, target: Target, on: On = None, folder: Folder = "runs", json: Json = False) -> None:
    """Take a committed step of a run again on one device, from the nearest checkpoint, and compare.

    Losses that differ, replicas that said something else of their own samples, and the samples with the largest losses
    are named. The exit code is 1 where something differs.
    """
    path, step = _split(which, Path(folder))
    with only_json(json):
        task = load_task(target)
        from .. import verbs
        from ..training import Run

        found = verbs.replay(Run(path, task), step, on=on)
    if json:
        print_json(_as_dict(found))
    else:
        stdout().print(str(found), markup=False, highlight=False, soft_wrap=True)
    if not found.equal:
        raise typer.Exit(1)


def _split(which: str, folder: Path) -> tuple[Path, int]:
    name, at, step = which.rpartition("@")
    if not at or not name or not step.isdecimal():
        raise SettingsError("a step of a run is written RUN@STEP", got=repr(which), remedy="write runs/first@1200")
    path = Path(name)
    return (path if path.is_dir() else folder / name), int(step)


def _as_dict(found: Replay) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "equal": found.equal, "bad_samples": found.bad_samples}
