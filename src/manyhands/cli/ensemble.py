"""Command `manyhands ensemble`: train an ensemble of a task and print its accuracy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import resolve_settings, task_name
from .fit import Config, Epochs, Name, Quiet, as_resume
from .interrupts import Interrupts
from .options import Json, On, Params, Target, add_command, in_options
from .screen import only_json, print_json, stdout
from .target import load_task, parse_params
from .tune import Execution, Folder, Resume


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings:
    """Options that a configuration file and the environment can set."""

    on: str | None = None
    members: int = 5
    combine: str = "mean"
    uncertainty: bool = False
    epochs: int = 1
    execution: str | None = None
    name: str | None = None
    folder: str = "studies"
    resume: bool | str = False
    export: str | None = None


Members = Annotated[int | None, typer.Option(help="Number of networks, each with a different seed; 5 by default.")]
Combine = Annotated[
    str | None, typer.Option(help="How predictions are combined: mean (default), vote, weighted or stacked.")
]
Uncertainty = Annotated[
    bool | None,
    typer.Option("--uncertainty/--no-uncertainty", help="Add the disagreement of the members to the outputs."),
]
Export = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Export the ensemble as the next version in this folder, for serving."),
]

EXAMPLES = (
    "manyhands ensemble digits.py --members 10 --epochs 5",
    "manyhands ensemble digits.py lr=3e-4 --members 5 --combine weighted --export models/digits",
    "manyhands ensemble digits.py --members 10 --epochs 5 --name ensemble --resume true",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, ensemble, EXAMPLES)


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
    export: Export = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several networks of a task as an ensemble; each is saved as a trial of a study under studies/.

    After Ctrl-C or a crash, the same command with --name NAME --resume true continues the training.
    """
    given = {
        "on": on, "members": members, "combine": combine, "uncertainty": uncertainty, "epochs": epochs,
        "execution": execution, "name": name, "folder": folder, "resume": as_resume(resume),
        "export": export,
    }  # fmt: skip
    settings = resolve_settings(EnsembleSettings, given, file=config, tables=["task"])
    values = settings.values
    with only_json(json), Interrupts():
        task = load_task(target)
        import manyhands as mh

        from ..api.ensemble import summary_of

        called = values.name or f"{task_name(task)}-ensemble-{time.strftime('%Y%m%d-%H%M%S')}"
        with in_options(EnsembleSettings):
            trained = mh.ensemble(
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
                resume=values.resume,
                progress=False if quiet or json else None,
            )
        summary = {"study": str(Path(values.folder) / called), **summary_of(trained)}
        if values.export is not None:
            summary["version"] = str(trained.export(values.export))
    if json:
        print_json(summary)
    else:
        _show(summary)


def _show(summary: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = {"members": str(len(summary["members"])), "combine": summary["combine"]}
    if "calibration" in summary:
        for name in ("accuracy", "loss", "error"):
            alone = [one[name] for one in summary["alone"]]
            label = "calibration error" if name == "error" else name
            rows[label] = f"{summary['calibration'][name]:.4f}; mean of single members {sum(alone) / len(alone):.4f}"
    rows["study"] = summary["study"]
    if "version" in summary:
        rows["version"] = summary["version"]
        rows["serve it"] = f"manyhands serve {Path(summary['version']).parents[1]}"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    stdout().print(table)
