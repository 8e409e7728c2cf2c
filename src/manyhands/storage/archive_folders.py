"""The folders of exported models: numbered versions, written atomically, with exactly the files that export writes."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..core import ArchiveError
from .disk import Digest, Disk, remove_stale, temporary_name
from .tensors import write_tensors

FORMAT = 1
WEIGHTS, PROGRAM, SIGNATURE, MANIFEST = (
    "weights.safetensors",
    "program.json",
    "signature.json",
    "manifest.json",
)
FILES = (WEIGHTS, PROGRAM, SIGNATURE)
VERSION = re.compile(r"[1-9][0-9]{0,8}")
JSON_CAP = 64 << 20
"""Maximum bytes of a JSON file; a program of 100,000 operators has 20 MB."""
WEIGHTS_CAP = 1 << 40


def versions(path: Path) -> list[int]:
    """Return the numbers of the versions in a model folder, ascending; links and unfinished folders are ignored."""
    if not Path(path).is_dir():
        return []
    return sorted(
        int(entry.name) for entry in Path(path).iterdir() if _is_version(entry) and (entry / MANIFEST).is_file()
    )


def publish(path: Path, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]) -> Path:
    """Write a version to a temporary folder, move it to the next free number under `path`, and return its folder."""
    try:
        return _published(Disk(), path, weights, texts)
    except OSError as error:
        raise ArchiveError(
            "a model must be exported to a folder that can be written and has free space",
            got=f"{path} ({error.strerror or error})",
            remedy="choose another folder, or free some space",
        ) from None


def _published(disk: Disk, path: Path, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    remove_stale(disk, path)
    temporary = path / temporary_name()
    try:
        _write(disk, temporary, weights, texts)
        target = _place(disk, temporary, path)
    except BaseException:
        disk.discard(temporary)
        raise
    disk.fsync(path)
    return target


def _write(disk: Disk, folder: Path, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]) -> None:
    disk.make_folder(folder)
    files: dict[str, Digest] = {WEIGHTS: write_tensors(disk, folder / WEIGHTS, weights)}
    for name, text in texts.items():
        files[name] = disk.write(folder / name, [text])
    listed = {name: digest.to_dict() for name, digest in files.items()}
    disk.write(folder / MANIFEST, [to_json({"format": FORMAT, "files": listed})])
    for name in (*files, MANIFEST):
        disk.fsync(folder / name)
    disk.fsync(folder)


def _place(disk: Disk, temporary: Path, path: Path) -> Path:
    """Move a version to the next free number; renaming onto a non-empty folder fails, so two exports cannot collide."""
    while True:
        taken = [int(entry.name) for entry in path.iterdir() if VERSION.fullmatch(entry.name)]
        target = path / str(max(taken, default=0) + 1)
        try:
            disk.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return target


def _is_version(entry: Path) -> bool:
    return bool(VERSION.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()


def version_folder(path: Path) -> Path:
    """Return `path` if it is the folder of a version, else the folder of the newest version in it.

    Raise ArchiveError if there is no version.
    """
    if (path / MANIFEST).exists():
        return path
    found = versions(path)
    if not found:
        raise ArchiveError(
            "a model folder must contain numbered versions",
            got=f"none in {path.name!r}",
            remedy="export a model there first",
        )
    return path / str(found[-1])


def require_plain_folder(folder: Path) -> None:
    """Raise ArchiveError unless a folder has exactly the four regular files: no links, pickles or libraries."""
    if folder.is_symlink():
        raise unsafe("a link as its folder")
    names = {entry.name for entry in folder.iterdir()}
    if odd := sorted(names - {*FILES, MANIFEST}):
        raise unsafe(f"{', '.join(odd[:5])[:200]} beside them")
    if missing := sorted({*FILES, MANIFEST} - names):
        raise ArchiveError(
            "an exported model must have all its files", got=f"no {', '.join(missing)}", remedy="copy the model again"
        )
    for name in names:
        entry = folder / name
        if entry.is_symlink() or not entry.is_file():
            raise unsafe(f"{name}, which is not a regular file")
        cap = WEIGHTS_CAP if name == WEIGHTS else JSON_CAP
        if entry.stat().st_size > cap:
            raise unsafe(f"{name} of more than {cap} bytes")


def to_json(value: object) -> bytes:
    """Return a value as compact JSON; raise ArchiveError if it contains a type that JSON lacks."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ArchiveError(
            "extra must consist of JSON types", got=str(error), remedy="convert it to numbers, strings, lists or dicts"
        ) from error


def unsafe(what: str) -> ArchiveError:
    """Return the error for a folder that `export` did not write; `what` describes what was found in the folder."""
    return ArchiveError(
        f"an exported model must consist of {', '.join(FILES)} and {MANIFEST}",
        got=what,
        remedy="load only folders that export wrote",
    )
