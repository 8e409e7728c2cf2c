"""`manyhands ensemble`: trains several networks of a task that answer as one, and says how right they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import resolve_settings, task_name
from .fit import Config, Epochs, GoOn, Name, Quiet
from .interrupts import Interrupts
from .options import Json, On, Params, Target, add_verb
from .screen import only_json, print_json, stdout
from .target import load_task, parse_params
from .tune import Execution, Folder, Resume
from .wording import in_options


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings:
    """What a configuration file and the environment may set."""

    on: str | None = None
    members: int = 5
    combine: str = "mean"
    uncertainty: bool = False
    epochs: int = 1
    execution: str | None = None
    name: str | None = None
    folder: str = "studies"
    resume: bool = False
    go_on: bool = False
    export: str | None = None


Members = Annotated[int | None, typer.Option(help="How many networks, each with a seed of its own; 5 by default.")]
Combine = Annotated[str | None, typer.Option(help="How they answer: mean (default), vote, weighted or stacked.")]
Uncertainty = Annotated[
    bool | None, typer.Option("--uncertainty/--no-uncertainty", help="Tell with every answer how far they disagree.")
]
Export = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where the team becomes the next version to serve.")]

EXAMPLES = (
    "manyhands ensemble digits.py --members 10 --epochs 5",
    "manyhands ensemble digits.py lr=3e-4 --members 5 --combine weighted --export models/digits",
    "manyhands ensemble digits.py --members 10 --epochs 5 --name team --resume",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, ensemble, EXAMPLES)


def ensemble(
    target: Target,
    params: Params = None,
    members: Members = None,
    combine: Combine = None,
    uncertainty: Uncertainty = None,
    epochs: Epochs = None,
    execution: Execution = None,
    on: On = None,
    name: Name = None,
    folder: Folder = None,
    resume: Resume = None,
    go_on: GoOn = None,
    export: Export = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several networks of a task that answer as one; each is kept as a trial of a study under studies/.

    After Ctrl-C and after any crash --name and --resume go on with them.
    """
    given = {
        "on": on, "members": members, "combine": combine, "uncertainty": uncertainty, "epochs": epochs,
        "execution": execution, "name": name, "folder": folder, "resume": resume, "go_on": go_on,
        "export": export,
    }  # fmt: skip
    settings = resolve_settings(EnsembleSettings, given, file=config, tables=["task"])
    values = settings.values
    with only_json(json), Interrupts():
        task = load_task(target)
        from .. import teams

        called = values.name or f"{task_name(task)}-team-{time.strftime('%Y%m%d-%H%M%S')}"
        with in_options(EnsembleSettings):
            team = teams.ensemble(
                task,
                values.members,
                combine=values.combine,
                uncertainty=values.uncertainty,
                epochs=values.epochs,
                params=parse_params(params or [], settings.tables.get("task")),
                on=values.on,
                execution=values.execution,
                name=called,
                folder=values.folder,
                resume="auto" if values.go_on else values.resume,
                progress=False if quiet or json else None,
            )
        told = {"study": str(Path(values.folder) / called), **teams.told(team)}
        if values.export is not None:
            told["version"] = str(team.export(values.export))
    if json:
        print_json(told)
    else:
        _show(told)


def _show(told: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = {"members": str(len(told["members"])), "combine": told["combine"]}
    if "calibration" in told:
        for name in ("accuracy", "loss", "error"):
            alone = [one[name] for one in told["alone"]]
            label = "calibration error" if name == "error" else name
            rows[label] = f"{told['calibration'][name]:.4f}, of one alone {sum(alone) / len(alone):.4f}"
    rows["study"] = told["study"]
    if "version" in told:
        rows["version"] = told["version"]
        rows["serve it"] = f"manyhands serve {Path(told['version']).parents[1]}"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    stdout().print(table)
