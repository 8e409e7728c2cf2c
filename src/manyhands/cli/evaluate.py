"""Command `manyhands evaluate`: print the loss and the metrics of a run over some data."""

from __future__ import annotations

from typing import Any

import typer

from ..core import resolve_options
from ..options import Recovery
from .generated_options import with_options
from .options import Devices, Distribution, Json, Target, add_command
from .screen import only_json, print_json, stdout
from .trained import Best, Data, RunName, RunsFolder, open_run, read_data

EXAMPLES = (
    "manyhands evaluate first digits.py",
    "manyhands evaluate first digits.py --data 'test-*.parquet' --strategy mirrored --on 'cpu*2' --json",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, evaluate, EXAMPLES)


@with_options(Distribution, Devices, Recovery)
def evaluate(
    run: RunName,
    target: Target,
    data: Data = None,
    best: Best = False,
    folder: RunsFolder = "runs",
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Print the loss and the metrics of a trained network, by default over the validation data of its task."""
    with only_json(json):
        import manyhands as mh

        settings = resolve_options((Devices, Recovery), {"on": given["on"], "timeout": given["timeout"]})
        strategy = given["strategy"] or "single"

        found = mh.evaluate(
            open_run(run, folder, target),
            None if data is None else read_data(data),
            strategy,
            on=settings.of(Devices).on,
            timeout=settings.of(Recovery).timeout,
            best=best,
        )
    if json:
        print_json(found)
    else:
        for name, value in found.items():
            stdout().print(f"{name}  {value:.6g}", markup=False, highlight=False)
