"""Command `manyhands evaluate`: the loss and the metrics of a run over some data."""

from __future__ import annotations

import typer

from .options import Json, On, Strategy, Target, Timeout, add_command
from .screen import only_json, print_json, stdout
from .trained import Best, Data, RunName, RunsFolder, open_run, read_data

EXAMPLES = (
    "manyhands evaluate first digits.py",
    "manyhands evaluate first digits.py --data 'test-*.parquet' --strategy mirrored --on 'cpu*2' --json",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, evaluate, EXAMPLES)


def evaluate(
    run: RunName,
    target: Target,
    data: Data = None,
    best: Best = False,
    strategy: Strategy = "single",
    on: On = None,
    timeout: Timeout = None,
    folder: RunsFolder = "runs",
    json: Json = False,
) -> None:
    """Print the loss and the metrics of a trained network, by default over the validation data of its task."""
    with only_json(json):
        import manyhands as mh

        from ..distributed import DEFAULT_TIMEOUT

        found = mh.evaluate(
            open_run(run, folder, target),
            None if data is None else read_data(data),
            strategy,
            on=on,
            timeout=timeout or DEFAULT_TIMEOUT,
            best=best,
        )
    if json:
        print_json(found)
    else:
        for name, value in found.items():
            stdout().print(f"{name}  {value:.6g}", markup=False, highlight=False)
