"""`manyhands tune`: searches for the best parameters of a task and says what was found."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, resolve_settings
from .fit import Config, Epochs, GoOn, Name, Quiet
from .interrupts import Interrupts
from .options import Json, On, Params, Target, add_verb
from .screen import only_json, print_json, stdout
from .target import load_task, parse_params
from .wording import in_options

if TYPE_CHECKING:
    from ..tuning import Study


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What a configuration file and the environment may set."""

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
    resume: bool = False
    go_on: bool = False
    keep: int = 1
    seed: int = 0


Space = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=RANGE",
        help="What a parameter may be: lr=loguniform:1e-4..1e-1, width=choice:128,256, depth=integers:1..4, "
        "p=uniform:0..0.5; once for each parameter, or under \\[space] of --config.",
        show_default=False,
    ),
]
Trials = Annotated[int | None, typer.Option(help="How many trials.", show_default=False)]
ObjectiveText = Annotated[
    str | None,
    typer.Option(metavar="NAME[:min|max]", help="What is searched for; 'valid_loss' by default; commas for several."),
]
Search = Annotated[str | None, typer.Option(help="How to search: tpe (default), random, grid or cma.")]
StopText = Annotated[str | None, typer.Option(help="End trials early: asha, hyperband or median.")]
Seconds = Annotated[float | None, typer.Option(help="End after so many seconds.", show_default=False)]
Cost = Annotated[float | None, typer.Option(help="End after so much money, with --price.", show_default=False)]
Price = Annotated[float | None, typer.Option(help="What a device costs in an hour.", show_default=False)]
Execution = Annotated[str | None, typer.Option(help="'stacked' or 'processes'; by default what is faster.")]
PerDevice = Annotated[int | None, typer.Option(help="Processes that share a device; measured by default.")]
Folder = Annotated[str | None, typer.Option(help="Where studies are kept; 'studies' by default.")]
Resume = Annotated[bool | None, typer.Option("--resume/--no-resume", help="Go on with the study of --name.")]
Keep = Annotated[int | None, typer.Option(help="Of how many of the best trials the networks stay; 1 by default.")]
Seed = Annotated[int | None, typer.Option(help="Of the search; 0 by default.")]

EXAMPLES = (
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --space width=choice:64,128 --trials 50",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --epochs 27 --stop asha --trials 100 --on 'cpu*2'",
    "manyhands tune digits.py --space lr=loguniform:1e-4..1e-1 --trials 200 --name first --resume",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, tune, EXAMPLES)


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
    go_on: GoOn = None,
    keep: Keep = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for the best parameters of a task, and keep every trial under studies/.

    Ctrl-C ends the study where it can go on; after that, and after any crash, --name and --resume go on with it.
    optuna-dashboard reads the study's journal.log.
    """
    given = {
        "on": on, "trials": trials, "objective": objective, "epochs": epochs, "search": search, "stop": stop,
        "seconds": seconds, "cost": cost, "price": price, "execution": execution, "per_device": per_device,
        "name": name, "folder": folder, "resume": resume, "go_on": go_on, "keep": keep, "seed": seed,
    }  # fmt: skip
    settings = resolve_settings(TuneSettings, given, file=config, tables=["task", "space"])
    values = settings.values
    with only_json(json), Interrupts() as interrupts:
        task = load_task(target)
        from .. import studies

        with in_options(TuneSettings):
            arguments = {name: getattr(values, name) for name in given}
            if arguments.pop("go_on"):
                arguments["resume"] = "auto"
            arguments["objective"] = [text.strip() for text in values.objective.split(",")]
            study = studies.tune(
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
    """The ranges of the configuration file, and over them those of the command line."""
    ranges = dict(written)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise SettingsError(
                "a range is written NAME=RANGE", got=repr(word), remedy="write --space lr=loguniform:1e-4..1e-1"
            )
        ranges[key] = text
    if not ranges:
        raise SettingsError(
            "a search needs to know what it may vary", got="no range", remedy="pass --space lr=loguniform:1e-4..1e-1"
        )
    return ranges


def show(study: Study, target: str) -> None:
    """The closing table: how trials ended, the best of them, and how to go on."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    told = study.to_dict()
    rows = {"trials": ", ".join(f"{num} {state}" for state, num in told["trials"].items())}
    if told["best"] is not None:
        best = told["best"]
        rows["best trial"] = str(best["number"])
        rows.update({name: f"{value:.4g}" for name, value in best["metrics"].items()})
        rows.update({name: f"{value}" for name, value in best["params"].items()})
    rows["study"] = str(study.path)
    if study.stopped:
        rows["to go on"] = f"the same command with --name {study.name} --resume"
    for name, value in rows.items():
        table.add_row(Text(name.replace("_", " "), style="bold"), Text(value, overflow="fold"))
    console = stdout()
    console.print(table)
    if told["best"] is not None:
        words = [f"{name}={value}" for name, value in told["best"]["params"].items()]
        command = shlex.join(["manyhands", "fit", target, *words])
        console.print(
            Text("train it".ljust(2 + max(map(len, rows))), style="bold") + Text(command, style="not bold"),
            soft_wrap=True,
        )
