"""Options and functions of commands that use trained networks: open a run, read its data, write its predictions."""

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
        help="A .npy or .npz file of arrays, or files such as 'test-*.parquet' that mh.data.files reads.",
        show_default=False,
    ),
]
WRITTEN = (".npy", ".npz", ".csv", ".json")
"""Suffixes of the files to which predictions can be written."""


def folder_of(name: str, folder: str) -> Path:
    """Return the folder of a run: `name` if that is a folder, else the folder of this name in `folder`."""
    return Path(name) if Path(name).is_dir() else Path(folder) / name


def open_run(name: str, folder: str, target: str) -> Run:
    """Return the run with a folder or name, with the task that `FILE.py[:name]` names."""
    from ..training import Run

    return Run(folder_of(name, folder), load_task(target))


def read_data(path: str) -> Any:
    """Return the array of a .npy file, the arrays of a .npz file, or other files as `mh.data.files` reads them.

    Arrays of a .npz file are a dict by name, or a tuple if they were saved without names.
    """
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
            "the data must be a file of arrays", got=f"{path} ({error})", remedy="write the file with numpy.save"
        ) from error


def check_output(path: Path | None) -> None:
    """Raise SettingsError if predictions cannot be written to this file; called before they are computed."""
    if path is not None and (path.suffix not in WRITTEN or not path.parent.is_dir()):
        reason = "" if path.parent.is_dir() else ", whose folder does not exist"
        raise SettingsError(
            f"--out must be a path ending in {', '.join(WRITTEN)}",
            got=f"{path}{reason}",
            remedy="write for example --out predictions.npy",
        )


def write_predictions(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write outputs by name to a .npy, .npz, .csv or .json file; raise SettingsError if its format cannot hold them."""
    import numpy as np

    if path.suffix == ".json":
        path.write_text(json.dumps(finite(as_lists(outputs))) + "\n")
        return
    ragged = [name for name, value in outputs.items() if isinstance(value, list)]
    arrays = {name: np.asarray(value) for name, value in outputs.items() if name not in ragged}
    if ragged or (path.suffix == ".npy" and len(arrays) > 1):
        what = f"rows of different shapes in {ragged[0]}" if ragged else f"{len(arrays)} outputs"
        remedy = "write them to a .json file" if ragged else "write them to a .npz file"
        raise SettingsError(
            f"a {path.suffix} file can only hold arrays, and a .npy file only one", got=what, remedy=remedy
        )
    if path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
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
    """Return outputs by name as nested lists of numbers."""
    return {n: [row.tolist() for row in v] if isinstance(v, list) else v.tolist() for n, v in outputs.items()}
