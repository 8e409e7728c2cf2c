"""Command `manyhands predict`: compute the predictions of a run or an exported model for the rows of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import SettingsError, resolve_options
from ..options import Recovery
from .generated_options import with_options
from .options import Devices, Distribution, Json, add_command
from .screen import note, only_json, print_json, stdout
from .trained import (
    Best,
    Data,
    RunName,
    RunsFolder,
    as_lists,
    check_output,
    folder_of,
    open_run,
    read_data,
    write_predictions,
)

OptionalTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py[:name]", help="The file of the run's task; an exported model needs none.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="File to write, ending in .npy, .npz, .csv or .json; by default JSON is printed."),
]
EXAMPLES = (
    "manyhands predict first digits.py --data images.npy --out predictions.npy",
    "manyhands predict models/digits/1 --data images.npy --out predictions.csv",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, predict, EXAMPLES)


@with_options(Distribution, Devices, Recovery)
def predict(
    run: RunName,
    target: OptionalTarget = None,
    data: Data = None,
    out: Out = None,
    best: Best = False,
    folder: RunsFolder = "runs",
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Compute the predictions of a run or an exported model for every row of some data, in order."""
    if data is None:
        raise SettingsError("predict needs --data", remedy="write for example --data images.npy")
    check_output(out)
    with only_json(json):
        import manyhands as mh

        settings = resolve_options((Devices, Recovery), {"on": given["on"], "timeout": given["timeout"]})
        strategy = given["strategy"] or "single"

        if target is not None:
            trained = open_run(run, folder, target)
            on, timeout = settings.of(Devices).on, settings.of(Recovery).timeout
            found = mh.predict(trained, read_data(data), strategy, on=on, timeout=timeout, best=best)
        elif (folder_of(run, folder) / "run.json").exists():
            raise SettingsError(
                "the predictions of a run need the file of its task",
                got=f"{run} alone",
                remedy=f"write manyhands predict {run} FILE.py --data {data}",
            )
        else:
            model = mh.load(Path(run))
            found = mh.predict(model, read_data(data))
    outputs = found if isinstance(found, Mapping) else {"output": found}
    if out is not None:
        write_predictions(out, outputs)
        note(f"{len(next(iter(outputs.values())))} predictions written to {out}")
    elif json:
        print_json(as_lists(outputs))
    else:
        for name, values in as_lists(outputs).items():
            for value in values:
                stdout().print(f"{name}  {value}", markup=False, highlight=False, soft_wrap=True)
