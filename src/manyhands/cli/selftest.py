"""Command `manyhands selftest`: run every strategy on the devices of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import SettingsError, format_duration
from .options import Json, add_command
from .screen import note, only_json, print_json, stdout

if TYPE_CHECKING:
    from ..api.selftest import SelfTest, StrategyTrial

EXAMPLES = (
    "manyhands selftest --gpus 2",
    "manyhands selftest --gpus 8 --minutes 20 --report selftest.json",
    "manyhands selftest --on 'cpu*2' --minutes 3",
)
_STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow", "omitted": "dim"}


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, selftest, EXAMPLES)


def selftest(
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs to test, from cuda:0 on.")] = None,
    on: Annotated[str | None, typer.Option(help="Devices, such as cuda:1,3 or 'cpu*2', instead of --gpus.")] = None,
    minutes: Annotated[float, typer.Option(help="Time after which no further strategy is started.")] = 10.0,
    report: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
    json: Json = False,
) -> None:
    """Run every strategy on several devices, and compare results and speed with one of them.

    Use it before you train on a machine with several GPUs: manyhands is tested with one GPU only. If a strategy fails,
    the exit code is 1; attach the report to an issue.
    """
    if gpus is not None and (on is not None or gpus < 2):
        raise SettingsError(
            "--gpus must be at least 2, and cannot be combined with --on",
            got=f"--gpus {gpus}" + (f" --on {on}" if on is not None else ""),
            remedy="pass --gpus 2, or --on",
        )
    if gpus is not None:
        on = "cuda:" + ",".join(map(str, range(gpus)))
    if report is not None and not report.resolve().parent.is_dir():
        raise SettingsError(
            "the folder of --report must exist", got=f"{report}", remedy=f"run mkdir -p {report.resolve().parent} first"
        )
    from ..api import selftest as tests

    with only_json(json):
        found = tests.selftest(on, minutes=minutes, on_trial=lambda trial: None if json else _show_trial(trial))
    if report is not None:
        found.save(report)
        note(f"the report is in {report}")
    if json:
        print_json(found.to_dict())
    else:
        _show(found)
    raise typer.Exit(0 if found.passed else 1)


def _show_trial(trial: StrategyTrial) -> None:
    facts = [] if trial.loss_difference is None else [f"losses within {trial.loss_difference:.1g}"]
    facts += [] if trial.step_ratio is None else [f"a step takes {trial.step_ratio:.2f} of one device's time"]
    text = f"{trial.outcome:8} {trial.network:14} {trial.strategy:32} {', '.join(facts)}"
    console = stdout()
    console.print(text.rstrip(), style=_STYLES[trial.outcome], markup=False, highlight=False, soft_wrap=True)
    if trial.detail:
        console.print(f"         {trial.detail}", markup=False, highlight=False, soft_wrap=True)


def _show(found: SelfTest) -> None:
    console = stdout()
    for each in found.transfers:
        rate = each.bus_bytes_per_second / 1e9
        text = f"all-reduce of {each.num_bytes:,} bytes: {format_duration(each.seconds)}, {rate:.2f} GB/s"
        console.print(text, markup=False, highlight=False)
    for name, ratio in (("DistributedDataParallel", found.step_over_ddp), ("fully_shard", found.step_over_fsdp)):
        if ratio is not None:
            console.print(f"a step takes {ratio:.2f} of the time of a loop with {name}", markup=False, highlight=False)
    counts = [
        f"{sum(trial.outcome == outcome for trial in found.trials)} {outcome}"
        for outcome in _STYLES
        if any(trial.outcome == outcome for trial in found.trials)
    ]
    console.print(f"{', '.join(counts)} in {found.seconds:.0f} s", style="bold", markup=False, highlight=False)
