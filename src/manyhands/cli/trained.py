"""Trained networks of commands: runs by name, exported models, and files of inputs and predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import DataError, SettingsError
from .screen import finite
from .target import load_task

if TYPE_CHECKING:
    from ..training import Run

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Folder or name of a run.", show_default=False)]
RunsFolder = Annotated[str, typer.Option("--folder", help="Folder of the runs.")]
Best = Annotated[bool, typer.Option("--best", help="Use the weights of the best checkpoint instead of the last one.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A .npy or .npz file of arrays, or files such as 'test-*.parquet' that mh.files reads.",
        show_default=False,
    ),
]
WRITTEN = (".npy", ".npz", ".csv", ".json")
"""Kinds of files that predictions are written to."""


def folder_of(name: str, folder: str) -> Path:
    """Return the folder of a run that is given by its folder or its name."""
    return Path(name) if Path(name).is_dir() else Path(folder) / name


def open_run(name: str, folder: str, target: str) -> Run:
    """Open a run with the task that it trained."""
    from ..training import Run

    return Run(folder_of(name, folder), load_task(target))


def read_data(path: str) -> Any:
    """Return arrays of a .npy or .npz file, or what `mh.files` reads."""
    if not path.endswith((".npy", ".npz")):
        from ..data import files

        return files(path)
    import numpy as np

    try:
        held = np.load(path, mmap_mode="c", allow_pickle=False)
        if isinstance(held, np.ndarray):
            return held
        named = dict(held)
        is_tuple = all(name.startswith("arr_") for name in named)  # numpy.savez(file, first, second)
        return tuple(named.values()) if is_tuple else named
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            "the data must be a file of arrays", got=f"{path} ({error})", remedy="write it with numpy.save"
        ) from error


def check_output(path: Path | None) -> None:
    """Raise for a file that predictions cannot be written to, before they are computed."""
    if path is not None and (path.suffix not in WRITTEN or not path.parent.is_dir()):
        reason = "" if path.parent.is_dir() else ", whose folder does not exist"
        raise SettingsError(
            f"--out must be a path ending in {', '.join(WRITTEN)}",
            got=f"{path}{reason}",
            remedy="write for example --out predictions.npy",
        )


def write_predictions(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write predictions by name to a file whose suffix decides the format."""
    import numpy as np

    if path.suffix == ".json":
        path.write_text(json.dumps(finite(as_lists(outputs))) + "\n")
        return
    ragged = [name for name, value in outputs.items() if isinstance(value, list)]
    arrays = {name: np.asarray(value) for name, value in outputs.items() if name not in ragged}
    if ragged or (path.suffix == ".npy" and len(arrays) > 1):
        what = f"rows of different shapes in {ragged[0]}" if ragged else f"{len(arrays)} outputs"
        remedy = "write them to a .json file" if ragged else "write them to a .npz file"
        raise SettingsError(f"a {path.suffix} file holds arrays, one of them in a .npy file", got=what, remedy=remedy)
    if path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with path.open("w", newline="") as file:
            columns = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
            writer = csv.writer(file)
            writer.writerow(
                name if flat.shape[1] == 1 else f"{name}_{at}"
                for name, flat in columns.items()
                for at in range(flat.shape[1])
            )
            writer.writerows(np.concatenate(list(columns.values()), axis=1).tolist())


def as_lists(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return predictions by name as nested lists of numbers."""
    return {n: [row.tolist() for row in v] if isinstance(v, list) else v.tolist() for n, v in outputs.items()}
