"""Command `manyhands tune`: search for the best parameters of a task and print the result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, option, resolve_options
from ..options import Algorithm, Budget, Execution, Selection
from .generated_options import typed_values, with_options
from .interrupts import Interrupts
from .options import Config, Devices, Json, Params, Quiet, Target, add_command, in_options
from .screen import only_json, print_json, stdout
from .target import load_task, with_params

if TYPE_CHECKING:
    from ..tuning import Study


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trials: the number of trials, and the metrics that they optimize."""

    trials: int | None = option(None, "Number of trials.")
    objective: tuple[str, ...] = option(
        ("valid_loss",),
        "Metric to optimize, 'valid_loss' by default; several separated by commas.",
        metavar="NAME[:min|max]",
    )
    epochs: int = option(1, "Epochs of a trial that is not stopped early; 1 by default.")


@dataclass(frozen=True, kw_only=True)
class StudyIdentity:
    """Study: its name and folder, and whether it is resumed."""

    name: str | None = option(None, "Name of the study; by default the name of the task and the time.")
    folder: str = option("studies", "Folder of the studies; 'studies' by default.")
    resume: bool | str = option(
        False,
        "Resume a study: [bold]true[/] requires that the study --name exists, [bold]auto[/] starts it if it does not "
        "exist. By default false.",
        metavar="true|auto",
    )


GROUPS = (Trials, Devices, StudyIdentity, Algorithm, Budget, Selection, Execution)

Space = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=RANGE",
        help="Range of a parameter: lr=loguniform:1e-4..1e-1, width=choice:128,256, depth=integers:1..4, "
        "p=uniform:0..0.5. Repeat it for each parameter, or use \\[space] of --config.",
        show_default=False,
    ),
]
EXAMPLES = (
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --space width=choice:64,128 --trials 50",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --epochs 27 --stop asha --trials 100 --on 'cpu*2'",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --trials 200 --name first --resume true",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, tune, EXAMPLES)


@with_options(*GROUPS)
def tune(
    target: Target,
    params: Params = None,
    space: Space = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    given: dict[str, Any],
) -> None:
    """Search for the best parameters of a task, and keep every trial under studies/.

    After Ctrl-C or a crash, the same command with --name NAME --resume true continues the study. optuna-dashboard can
    read the study's journal.log.
    """
    with in_options(*GROUPS):
        settings = resolve_options(GROUPS, typed_values(GROUPS, given), file=config, tables=["task", "space"])
    with only_json(json), Interrupts() as interrupts:
        task = load_task(target)
        import manyhands as mh

        with in_options(*GROUPS):
            count, identity = settings.of(Trials), settings.of(StudyIdentity)
            study = mh.tune(
                with_params(task, params or [], settings.tables.get("task")),
                _space(space or [], settings.tables.get("space") or {}),
                trials=count.trials,
                objective=count.objective,
                epochs=count.epochs,
                on=settings.of(Devices).on,
                name=identity.name,
                folder=identity.folder,
                resume=identity.resume,
                options=[
                    mh.options.Display(progress=False if quiet or json else None),
                    settings.of(Algorithm),
                    settings.of(Budget),
                    settings.of(Selection),
                    settings.of(Execution),
                ],
            )
    if json:
        print_json(study.to_dict())
    else:
        show(study, target)
    if study.stopped and interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _space(words: list[str], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranges of parameters by name: those of the configuration file, overridden by --space options."""
    ranges = dict(written)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise SettingsError(
                "a range must be written NAME=RANGE",
                got=repr(word),
                remedy="write for example --space lr=loguniform:1e-4..1e-1",
            )
        ranges[key] = text
    if not ranges:
        raise SettingsError(
            "a study needs the range of at least one parameter",
            remedy="pass for example --space lr=loguniform:1e-4..1e-1",
        )
    return ranges


def show(study: Study, target: str) -> None:
    """Print a table of a study: how its trials ended, the best trial, and the commands to resume and to train it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    summary = study.to_dict()
    rows = {"trials": ", ".join(f"{num} {state}" for state, num in summary["trials"].items())}
    if summary["best"] is not None:
        best = summary["best"]
        rows["best trial"] = str(best["number"])
        rows.update({name: f"{value:.4g}" for name, value in best["metrics"].items()})
        rows.update({name: f"{value}" for name, value in best["params"].items()})
    rows["study"] = str(study.path)
    if study.stopped:
        rows["to resume"] = f"the same command with --name {study.name} --resume true"
    for name, value in rows.items():
        table.add_row(Text(name.replace("_", " "), style="bold"), Text(value, overflow="fold"))
    console = stdout()
    console.print(table)
    if summary["best"] is not None:
        words = [f"{name}={value}" for name, value in summary["best"]["params"].items()]
        command = shlex.join(["manyhands", "fit", target, *words])
        console.print(
            Text("train it".ljust(2 + max(map(len, rows))), style="bold") + Text(command, style="not bold"),
            soft_wrap=True,
        )
