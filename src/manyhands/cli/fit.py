"""Command `manyhands fit`: train a task and print the result."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import Resolved, SettingsError, Task, as_task, resolve_settings
from .interrupts import Interrupts
from .options import (
    Hosts,
    HostsSettings,
    JoinAt,
    Json,
    On,
    Params,
    Strategy,
    Target,
    Timeout,
    TlsFolder,
    TokenFile,
    add_command,
    as_timeout,
    in_options,
)
from .screen import note, only_json, print_json, stdout
from .target import load_task, parse_params

if TYPE_CHECKING:
    from ..training import Patience, Run


@dataclass(frozen=True, kw_only=True)
class FitSettings(HostsSettings):
    """Options that a configuration file and the environment can set."""

    epochs: int = 1
    steps: int | None = None
    name: str | None = None
    folder: str = "runs"
    resume: bool | str = False
    save_every: int | None = None
    keep: int = 2
    patience: str | None = None
    start_from: str | None = None
    log_to: str = ""
    deterministic: bool = False
    memory: str | None = None
    fit_in: str | None = None
    profile: bool = False
    verify: bool = True


Epochs = Annotated[int | None, typer.Option(help="Passes over the data; 1 by default.")]
Steps = Annotated[int | None, typer.Option(help="Stop after this many steps, even within an epoch.")]
Name = Annotated[str | None, typer.Option(help="Name of the run; by default the name of the task and the time.")]
Folder = Annotated[str | None, typer.Option(help="Folder of the runs; 'runs' by default.")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="true|auto|PATH",
        help="Resume from the last checkpoint: [bold]true[/] requires that the run --name exists, [bold]auto[/] starts "
        "it if it does not exist (for a command that is restarted by a script or a scheduler), a path names a run. "
        "By default false.",
        show_default=False,
    ),
]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints, in addition to those at epoch ends.")]
Keep = Annotated[
    int | None, typer.Option(help="Number of checkpoints to keep in addition to the best one; 2 by default.")
]
PatienceText = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:EPOCHS",
        help="Stop if a metric does not improve for this many epochs: valid_loss:5, valid_score:5:max; several "
        "with commas.",
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Start with the weights of a run, a file, an exported model or a Hugging Face folder."
    ),
]
LogTo = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Log to tensorboard, wandb, mlflow or csv; several separated by commas."),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Draw the same random numbers, including dropout, on any number of devices.",
    ),
]
FitIn = Annotated[
    str | None,
    typer.Option(help="Choose recompute, accumulate and sharding so that a step fits into this memory, such as 24GiB."),
]
Memory = Annotated[
    str | None, typer.Option(help="Memory limit of each replica on its device, such as 8GiB.", show_default=False)
]
Profile = Annotated[
    bool | None,
    typer.Option("--profile/--no-profile", help="Profile one step in fifty; see manyhands profile RUN."),
]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Before training, compare the first steps with those of one device."),
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with these options as keys, and the parameters of the task under \\[task]."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, no progress.")]


EXAMPLES = (
    "manyhands fit digits.py",
    "manyhands fit digits.py lr=3e-4 width=512 --strategy mirrored --on 'cpu*2' --epochs 3",
    "manyhands fit digits.py --name first --epochs 6 --resume true",
    "manyhands fit digits.py --hosts 4 --join host1:7777 --token-file token   (on every host)",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, fit, EXAMPLES)


def fit(
    target: Target,
    params: Params = None,
    strategy: Strategy = None,
    on: On = None,
    hosts: Hosts = None,
    join: JoinAt = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    timeout: Timeout = None,
    epochs: Epochs = None,
    steps: Steps = None,
    name: Name = None,
    folder: Folder = None,
    resume: Resume = None,
    save_every: SaveEvery = None,
    keep: Keep = None,
    patience: PatienceText = None,
    start_from: StartFrom = None,
    log_to: LogTo = None,
    deterministic: Deterministic = None,
    memory: Memory = None,
    fit_in: FitIn = None,
    profile: Profile = None,
    verify: Verify = None,
    config: Config = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a task, distributed over devices by a strategy, and save it under runs/.

    Ctrl-C stops the run after the current step and saves a checkpoint to resume from. Options can also be set in the
    file of --config or in the environment (MANYHANDS_EPOCHS, ...). The command line takes precedence over the file, and
    the file over the environment.
    """
    given = {
        "strategy": strategy, "on": on, "hosts": hosts, "join": join, "token_file": token_file, "tls": tls,
        "epochs": epochs, "steps": steps, "name": name, "folder": folder,
        "resume": as_resume(resume), "save_every": save_every, "keep": keep, "patience": patience,
        "start_from": start_from, "log_to": log_to, "deterministic": deterministic, "memory": memory,
        "fit_in": fit_in, "profile": profile, "verify": verify,
    }  # fmt: skip
    settings = resolve_settings(FitSettings, given, file=config, tables=["task"])
    words = params or []
    if not (quiet or json):
        _show_settings(settings)
    with only_json(json), Interrupts() as interrupts:
        task = load_task(target)
        import manyhands as mh

        with in_options(FitSettings):
            values = parse_params(words, settings.tables.get("task"))
            run = mh.fit(
                task,
                params=values,
                progress=False if quiet else None,
                on=settings.values.place(Path(target.partition(":")[0]), target.partition(":")[2], *words),
                **as_timeout(timeout),
                **_arguments(settings.values, lambda: as_task(task, values)),
            )
    if json:
        print_json(as_dict(run, settings))
    elif not run.num_steps:
        note(f"done: the run is saved on the first host, in {run.path}")
    else:
        _show(run, _next_command(target, words, given, config, run, settings.values))
    if run.stopped and interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _arguments(settings: FitSettings, make: Callable[[], Task]) -> dict[str, Any]:
    """Return the settings as arguments of `mh.fit`."""
    given = dataclasses.asdict(settings)
    for name in ("on", "hosts", "join", "token_file", "tls"):
        del given[name]
    patience = given.pop("patience")
    return {**given, "stop": [_patience(text.strip(), make) for text in patience.split(",")] if patience else None}


def as_resume(text: str | None) -> bool | str | None:
    """Return the value of --resume as `mh.fit` and `mh.tune` take it.

    >>> as_resume("true"), as_resume("auto")
    (True, 'auto')
    """
    return None if text is None else {"true": True, "false": False}.get(text.lower(), text)


def _patience(text: str, make: Callable[[], Task]) -> Patience:
    """Parse patience. The error for an unknown metric takes precedence over that for an unknown direction."""
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


def as_dict(run: Run, settings: Resolved[FitSettings]) -> dict[str, Any]:
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
        "settings": dataclasses.asdict(settings.values),
        "sources": dict(settings.sources),
    }


def _show_settings(settings: Resolved[FitSettings]) -> None:
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
    """Return the rows of the final table: metrics, time, and the folder."""
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
    """Return the shares of the first replica's time, the largest first.

    >>> shares({"total": 4.0, "compute": 3.0, "input": 1.0, "save": 0.0})
    'compute 75%, input 25%'
    """
    total = seconds.get("total") or 1e-9
    parts = sorted(((value / total, name) for name, value in seconds.items() if name != "total"), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005)


def _next_command(
    target: str, words: Sequence[str], given: dict[str, Any], config: Path | None, run: Run, settings: FitSettings
) -> str:
    """Return the command that resumes this run: to its end if it was stopped, else for as many epochs again."""
    times = 1 if run.stopped else 2
    steps = None if settings.steps is None else times * settings.steps
    options = {
        "config": config, "strategy": given["strategy"], "on": given["on"], "hosts": given["hosts"],
        "join": given["join"], "token-file": given["token_file"], "tls": given["tls"],
        "epochs": times * settings.epochs, "steps": steps, "folder": given["folder"],
        "save-every": given["save_every"], "keep": given["keep"], "patience": given["patience"],
        "log-to": given["log_to"], "memory": given["memory"], "fit-in": given["fit_in"],
        "name": run.name,
    }  # fmt: skip
    spelled = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    flags = [f"--{name}" for name in ("deterministic", "profile") if given[name]]
    flags += ["--no-verify"] if given["verify"] is False else []
    return shlex.join(["manyhands", "fit", target, *words, *spelled, *flags, "--resume", "true"])
