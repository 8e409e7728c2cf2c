"""Command `manyhands ensemble`: train an ensemble of a task and print its accuracy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..core import option, resolve_options, task_name
from ..options import Combining, Execution
from .generated_options import typed_values, with_options
from .interrupts import Interrupts
from .options import Config, Devices, Json, Params, Quiet, Target, add_command, in_options
from .screen import only_json, print_json, stdout
from .target import load_task, with_params
from .tune import StudyIdentity


@dataclass(frozen=True, kw_only=True)
class Members:
    """Members: the networks, and how their predictions are combined."""

    members: int = option(5, "Number of networks, each with a different seed; 5 by default.")
    combine: str = option("mean", "How predictions are combined: mean (default), vote, weighted or stacked.")
    epochs: int = option(1, "Passes over the data; 1 by default.")
    export: str | None = option(
        None, "Export the ensemble as the next version in this folder, for serving.", metavar="FOLDER"
    )


GROUPS = (Members, Combining, Devices, StudyIdentity, Execution)

EXAMPLES = (
    "manyhands ensemble digits.py --members 10 --epochs 5",
    "manyhands ensemble digits.py lr=3e-4 --members 5 --combine weighted --export models/digits",
    "manyhands ensemble digits.py --members 10 --epochs 5 --name ensemble --resume true",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, ensemble, EXAMPLES)


@with_options(*GROUPS)
def ensemble(
    target: Target,
    params: Params = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    given: dict[str, Any],
) -> None:
    """Train several networks of a task as an ensemble; each is saved as a trial of a study under studies/.

    After Ctrl-C or a crash, the same command with --name NAME --resume true continues the training.
    """
    with in_options(*GROUPS):
        settings = resolve_options(GROUPS, typed_values(GROUPS, given), file=config, tables=["task"])
    members, identity = settings.of(Members), settings.of(StudyIdentity)
    with only_json(json), Interrupts():
        task = load_task(target)
        import manyhands as mh

        from ..api.ensemble import summary_of

        called = identity.name or f"{task_name(task)}-ensemble-{time.strftime('%Y%m%d-%H%M%S')}"
        with in_options(*GROUPS):
            trained = mh.ensemble(
                with_params(task, params or [], settings.tables.get("task")),
                members.members,
                combine=members.combine,
                epochs=members.epochs,
                on=settings.of(Devices).on,
                name=called,
                folder=identity.folder,
                resume=identity.resume,
                options=[
                    mh.options.Display(progress=False if quiet or json else None),
                    settings.of(Combining),
                    settings.of(Execution),
                ],
            )
        summary = {"study": str(Path(identity.folder) / called), **summary_of(trained)}
        if members.export is not None:
            summary["version"] = str(trained.export(members.export))
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
    if "comparison" in summary:
        found = summary["comparison"]
        best = f"{found['best']:.4f} ({found['member']})"
        rows["best member"] = f"{found['measure']} {best}; together {found['together']:.4f}"
        if found["is_worse"]:
            rows["what would help"] = found["advice"]
    rows["study"] = summary["study"]
    if "version" in summary:
        rows["version"] = summary["version"]
        rows["serve it"] = f"manyhands serve {Path(summary['version']).parents[1]}"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    stdout().print(table)
