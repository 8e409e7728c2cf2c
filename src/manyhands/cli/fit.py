"""Command `manyhands fit`: train a task and print the result."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import ResolvedOptions, SettingsError, Task, as_task, option, resolve_options
from ..options import Checkpoints, Equality, Logging, Recovery, Resources
from .generated_options import as_words, typed_values, with_options
from .interrupts import Interrupts
from .options import (
    Config,
    Devices,
    Distribution,
    Json,
    Params,
    Quiet,
    SeveralHosts,
    Target,
    add_command,
    in_options,
)
from .screen import note, only_json, print_json, stdout
from .target import TaskLike, load_task, with_params

if TYPE_CHECKING:
    from ..training import Patience, Run


@dataclass(frozen=True, kw_only=True)
class Length:
    """Length: when training ends."""

    epochs: int = option(1, "Passes over the data; 1 by default.")
    steps: int | None = option(None, "Stop after this many steps, even within an epoch.")
    patience: str | None = option(
        None,
        "Stop if a metric does not improve for this many epochs: valid_loss:5, valid_score:5:max; several with commas.",
        metavar="NAME:EPOCHS",
    )


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Run: its name and folder, and whether it is resumed."""

    name: str | None = option(None, "Name of the run; by default the name of the task and the time.")
    folder: str = option("runs", "Folder of the runs; 'runs' by default.")
    resume: bool | str = option(
        False,
        "Resume from the last checkpoint: [bold]true[/] requires that the run --name exists, [bold]auto[/] starts it "
        "if it does not exist (for a command that is restarted by a script or a scheduler), a path names a run. By "
        "default false.",
        metavar="true|auto|PATH",
    )


GROUPS = (
    Distribution, Devices, SeveralHosts, Length, RunIdentity, Checkpoints, Logging, Resources, Recovery, Equality,
)  # fmt: skip

EXAMPLES = (
    "manyhands fit digits.py",
    "manyhands fit digits.py lr=3e-4 width=512 --strategy mirrored --on 'cpu*2' --epochs 3",
    "manyhands fit digits.py --name first --epochs 6 --resume true",
    "manyhands fit digits.py --hosts 4 --join host1:7777 --token-file token   (on every host)",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, fit, EXAMPLES)


@with_options(*GROUPS)
def fit(
    target: Target,
    params: Params = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
    *,
    given: dict[str, Any],
) -> None:
    """Train a task, distributed over devices by a strategy, and save it under runs/.

    Ctrl-C stops the run after the current step and saves a checkpoint to resume from. Options can also be set in the
    file of --config or in the environment (MANYHANDS_EPOCHS, ...). The command line takes precedence over the file, and
    the file over the environment.
    """
    words = params or []
    with in_options(*GROUPS):
        settings = resolve_options(GROUPS, typed_values(GROUPS, given), file=config, tables=["task"])
    if not (quiet or json):
        _show_settings(settings)
    with only_json(json), Interrupts() as interrupts:
        task = load_task(target)
        import manyhands as mh

        with in_options(*GROUPS):
            task = with_params(task, words, settings.tables.get("task"))
            length, run_identity = settings.of(Length), settings.of(RunIdentity)
            strategy = settings.of(Distribution).strategy
            place = settings.of(SeveralHosts).place(
                settings.of(Devices).on,
                Path(target.partition(":")[0]),
                str(strategy),
                target.partition(":")[2],
                *words,
            )
            run = mh.fit(
                task,
                strategy,
                epochs=length.epochs,
                steps=length.steps,
                on=place,
                name=run_identity.name,
                folder=run_identity.folder,
                resume=run_identity.resume,
                callbacks=_patience(length.patience, task),
                options=[
                    mh.options.Display(progress=False if quiet else None),
                    settings.of(Checkpoints),
                    settings.of(Logging),
                    settings.of(Resources),
                    settings.of(Recovery),
                    settings.of(Equality),
                ],
            )
    if json:
        print_json(as_dict(run, settings))
    elif not run.num_steps:
        note(f"done: the run is saved on the first host, in {run.path}")
    else:
        _show(run, _next_command(target, words, config, run, settings))
    if run.stopped and interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _patience(texts: str | None, task: TaskLike) -> list[Patience]:
    return [_one_patience(text.strip(), lambda: as_task(task)) for text in texts.split(",")] if texts else []


def _one_patience(text: str, make: Callable[[], Task]) -> Patience:
    """Parse an option such as "valid_loss:5"; raise for an unknown metric before an unknown direction of a metric."""
    from ..training import Patience, check_patience

    name, _, epochs = text.partition(":")
    try:
        return Patience.parse(text)
    except SettingsError:
        if not (name and epochs.isdecimal() and int(epochs)):
            raise
    check_patience([Patience(name, int(epochs), "min")], make())
    raise SettingsError(
        "the direction of a metric must be known", got=repr(text), remedy=f"write --patience {text}:max or {text}:min"
    )


def as_dict(run: Run, settings: ResolvedOptions) -> dict[str, Any]:
    """Return a run as JSON-ready data."""
    return {
        "run": str(run.path),
        "name": run.name,
        "metrics": run.metrics,
        "steps": run.num_steps,
        "seconds": run.seconds,
        "stopped": run.stopped,
        "verdict": run.verdict,
        "strategy": run.record["spec"],
        "devices": run.record["devices"],
        "params": run.record["params"],
        "settings": settings.flat,
        "sources": dict(settings.sources),
    }


def _show_settings(settings: ResolvedOptions) -> None:
    chosen = {name: f"{name}={value} ({source})" for name, (value, source) in settings.chosen().items()}
    if chosen:
        note("settings: " + ", ".join(chosen.values()))


def _show(run: Run, command: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    shown = rows(run)
    for name, value in shown.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    console = stdout()
    console.print(table)
    label = Text("to resume".ljust(2 + max(map(len, shown))), style="bold")
    console.print(label + Text(command, style="not bold"), soft_wrap=True)


def rows(run: Run) -> dict[str, str]:
    """Return the rows of the table that is printed after training: metrics, steps, time, and the run's folder."""
    shown = {name.replace("_", " "): f"{value:.4g}" for name, value in run.metrics.items()}
    total = run.seconds.get("total", 0.0)
    return {
        **shown,
        "steps": f"{run.num_steps}{' (stopped)' if run.stopped else ''}",
        "seconds": f"{total:.2f}",
        "time spent on": shares(run.seconds),
        "run": str(run.path),
    }


def shares(seconds: dict[str, float]) -> str:
    """Return the shares of a run's time by activity as text, the largest first; shares below 0.5% are omitted.

    >>> shares({"total": 4.0, "compute": 3.0, "input": 1.0, "save": 0.0})
    'compute 75%, input 25%'
    """
    total = seconds.get("total") or 1e-9
    parts = sorted(((value / total, name) for name, value in seconds.items() if name != "total"), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005)


CHANGED = ("start_from", "epochs", "steps", "name", "resume")
"""Options that the command for resuming a run omits or sets to other values."""


def _next_command(target: str, words: Sequence[str], config: Path | None, run: Run, settings: ResolvedOptions) -> str:
    """Return the command that resumes a run: up to its end if it was stopped, else for twice as many epochs."""
    times = 1 if run.stopped else 2
    length = settings.of(Length)
    given = {name: value for name, (value, source) in settings.chosen().items() if source == "argument"}
    given = {name: value for name, value in given.items() if name not in CHANGED}
    given["epochs"] = times * length.epochs
    if length.steps is not None:
        given["steps"] = times * length.steps
    given |= {"name": run.name, "resume": True}
    options = [] if config is None else ["--config", str(config)]
    for name, value in given.items():
        options += as_words(name, value)
    return shlex.join(["manyhands", "fit", target, *words, *options])
