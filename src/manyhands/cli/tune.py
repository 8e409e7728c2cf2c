"""Command `manyhands tune`: search for the best parameters of a task and print the result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, resolve_settings
from .fit import Config, Epochs, Name, Quiet, as_resume
from .interrupts import Interrupts
from .options import Json, On, Params, Target, add_command, in_options
from .screen import only_json, print_json, stdout
from .target import load_task, parse_params

if TYPE_CHECKING:
    from ..tuning import Study


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Options that a configuration file and the environment can set."""

    on: str | None = None
    trials: int | None = None
    objective: str = "valid_loss"
    epochs: int = 1
    search: str = "tpe"
    stop: str | None = None
    seconds: float | None = None
    cost: float | None = None
    price: float | None = None
    execution: str | None = None
    per_device: int | None = None
    name: str | None = None
    folder: str = "studies"
    resume: bool | str = False
    keep: int = 1
    seed: int = 0


Space = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=RANGE",
        help="Range of a parameter: lr=loguniform:1e-4..1e-1, width=choice:128,256, depth=integers:1..4, "
        "p=uniform:0..0.5. Repeat it for each parameter, or use \\[space] of --config.",
        show_default=False,
    ),
]
Trials = Annotated[int | None, typer.Option(help="Number of trials.", show_default=False)]
ObjectiveText = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:min|max]", help="Metric to optimize, 'valid_loss' by default; several separated by commas."
    ),
]
Search = Annotated[str | None, typer.Option(help="Search algorithm: tpe (default), random, grid or cma.")]
StopText = Annotated[str | None, typer.Option(help="Stop bad trials early: asha, hyperband or median.")]
Seconds = Annotated[float | None, typer.Option(help="Stop the study after this many seconds.", show_default=False)]
Cost = Annotated[float | None, typer.Option(help="Stop the study at this cost; needs --price.", show_default=False)]
Price = Annotated[float | None, typer.Option(help="Price of one device per hour.", show_default=False)]
Execution = Annotated[str | None, typer.Option(help="'stacked' or 'processes'; by default the faster one.")]
PerDevice = Annotated[int | None, typer.Option(help="Processes per device; by default measured.")]
Folder = Annotated[str | None, typer.Option(help="Folder of the studies; 'studies' by default.")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="true|auto",
        help="Resume a study: [bold]true[/] requires that the study --name exists, [bold]auto[/] starts it if it does "
        "not exist. By default false.",
        show_default=False,
    ),
]
Keep = Annotated[int | None, typer.Option(help="Number of best trials whose networks are kept; 1 by default.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the search; 0 by default.")]

EXAMPLES = (
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --space width=choice:64,128 --trials 50",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --epochs 27 --stop asha --trials 100 --on 'cpu*2'",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --trials 200 --name first --resume true",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, tune, EXAMPLES)


def tune(
    target: Target,
    params: Params = None,
    space: Space = None,
    trials: Trials = None,
    objective: ObjectiveText = None,
    epochs: Epochs = None,
    search: Search = None,
    stop: StopText = None,
    seconds: Seconds = None,
    cost: Cost = None,
    price: Price = None,
    execution: Execution = None,
    per_device: PerDevice = None,
    on: On = None,
    name: Name = None,
    folder: Folder = None,
    resume: Resume = None,
    keep: Keep = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for the best parameters of a task, and keep every trial under studies/.

    After Ctrl-C or a crash, the same command with --name NAME --resume true continues the study. optuna-dashboard can
    read the study's journal.log.
    """
    given = {
        "on": on, "trials": trials, "objective": objective, "epochs": epochs, "search": search, "stop": stop,
        "seconds": seconds, "cost": cost, "price": price, "execution": execution, "per_device": per_device,
        "name": name, "folder": folder, "resume": as_resume(resume), "keep": keep, "seed": seed,
    }  # fmt: skip
    settings = resolve_settings(TuneSettings, given, file=config, tables=["task", "space"])
    values = settings.values
    with only_json(json), Interrupts() as interrupts:
        task = load_task(target)
        import manyhands as mh

        with in_options(TuneSettings):
            arguments = {name: getattr(values, name) for name in given}
            arguments["objective"] = [text.strip() for text in values.objective.split(",")]
            study = mh.tune(
                task,
                _space(space or [], settings.tables.get("space") or {}),
                params=parse_params(params or [], settings.tables.get("task")),
                progress=False if quiet or json else None,
                **arguments,
            )
    if json:
        print_json(study.to_dict())
    else:
        show(study, target)
    if study.stopped and interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _space(words: list[str], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranges of the configuration file, overridden by those of the command line."""
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
            "a search needs at least one parameter to vary", remedy="pass for example --space lr=loguniform:1e-4..1e-1"
        )
    return ranges


def show(study: Study, target: str) -> None:
    """Print the closing table: how trials ended, the best one, and how to resume."""
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
