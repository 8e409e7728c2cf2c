"""Models folder: finds models and versions that are complete and have safe names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core import FileError, SettingsError, fields, parse_json, read_file

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
MANIFEST = "manifest.json"
PYTHON_FILE = "predictor.py"
"""Python code of a version, which is executed only if the operator trusts it."""
NOT_TRUSTED = (
    f"{PYTHON_FILE} is Python code, which runs with the rights of this server; start it with --trust-python, or "
    "mh.serving.Replicas(trust_python=True), if you trust all who can write to the folder of models"
)
MANIFEST_LIMIT = 64 << 10
"""Maximum bytes of a manifest, which lists three files."""
MOST_REFUSED = 50
"""Maximum versions of a model refused per scan, so that a folder full of them does not delay other models."""
MAX_ENTRIES = 10_000
"""Maximum folder entries that the scan of a folder of models, or of one model, reads."""
MAX_EXAMINED = 1000
"""Maximum versions of a model whose manifests one scan reads."""
MAX_FILES = 100
"""Maximum files of an incomplete version whose times are read."""
SETTLED_SECONDS = 0.5
"""Seconds without a change after which a partial copy is reported as incomplete."""
PYTHON_SETTLED_SECONDS = 2.0
"""Seconds without a change after which a folder with Python code, which has no manifest, is loaded."""
Print = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of a version's files, as a fingerprint that changes with every copy."""


class ScanBudget:
    """Number of folder entries that one scan may still read, over all folders that it lists."""

    def __init__(self) -> None:
        self.left = MAX_ENTRIES
        self.is_exceeded = False

    def subfolders(self, folder: Path) -> list[str]:
        """Return the names of a folder's subfolders, links excluded, as far as the budget goes; none on errors."""
        names = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self.left == 0:
                    self.is_exceeded = True
                    break
                self.left -= 1
                if entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
        return names


def models_in(root: Path, budget: ScanBudget | None = None) -> dict[str, Path]:
    """Return the models under a folder, or the folder itself if it contains versions; links are not followed.

    Versions beside models with versions do not make the folder a model: a user who can add one folder must not be able
    to hide the others.
    """
    if not root.is_dir():
        return {}
    budget = budget or ScanBudget()
    names = budget.subfolders(root)
    if _is_one_model(root, names, budget):
        require_name(root.resolve().name)
        return {root.resolve().name: root}
    return {name: root / name for name in sorted(names) if NAME.fullmatch(name)}


def is_one_model(root: Path) -> bool:
    """Return whether a folder itself contains versions, and none of its subfolders does."""
    budget = ScanBudget()
    return _is_one_model(root, budget.subfolders(root), budget)


def _is_one_model(root: Path, names: Collection[str], budget: ScanBudget) -> bool:
    if not _has_versions(root, _numbers(names)):
        return False
    is_beside = any(_has_versions(root / name, _numbers(budget.subfolders(root / name))) for name in names)
    # Beyond the budget there may be models that this folder must not hide.
    return not is_beside and not budget.is_exceeded


def _has_versions(model: Path, numbers: Collection[int]) -> bool:
    return any(os.path.lexists(model / str(number) / name) for number in numbers for name in (MANIFEST, PYTHON_FILE))


def _numbers(names: Collection[str]) -> list[int]:
    """Return the numbers of folders named like versions, highest first."""
    return sorted((int(name) for name in names if VERSION.fullmatch(name)), reverse=True)


@dataclass(frozen=True)
class Versions:
    """The complete versions of a model, the invalid ones, and those whose copy has stopped, with the reason."""

    complete: dict[int, Print]
    refused: dict[int, str]
    incomplete: dict[int, str] = field(default_factory=dict)
    is_truncated: bool = False
    """Whether the folder has more entries or versions than a scan examines."""


@dataclass(frozen=True)
class VersionFilter:
    """Which versions of a model a scan examines.

    Attributes:
        policy: If it selects the latest versions, older ones are not examined; None for all.
        rejected: Versions that were rolled back, which do not count as the latest.
        first: Versions that are examined before the others.
        python: Whether versions with Python code are served.
    """

    policy: VersionPolicy | None = None
    rejected: Collection[int] = ()
    first: Collection[int] = ()
    python: bool = False


@dataclass(frozen=True)
class FolderScan:
    """Result of a scan: the models that have versions, and what could not be scanned."""

    models: dict[str, tuple[Path, Versions]]
    truncated: set[str]
    """Names of models whose folder was examined in part; "" for the folder of models itself."""
    failed: dict[str, str]
    """Type of the exception by the name of the model whose scan raised it."""


def scan_models(
    root: Path, known: Mapping[str, VersionFilter], usual: VersionFilter, only: Collection[str] | None = None
) -> FolderScan:
    """Scan a folder of models: it reads files, so it runs in a thread while requests are answered.

    Args:
        root: The folder of models.
        known: Which versions are examined, by the names of the models that the server knows. Their folders are
            examined even if the folder of models has too many entries.
        usual: Which versions of other models are examined.
        only: Names of the models to scan; None for all.
    """
    budget = ScanBudget()
    found = models_in(root, budget)
    if budget.is_exceeded:
        found |= {name: root / name for name in known if (root / name).is_dir() and not (root / name).is_symlink()}
    scan = FolderScan({}, {""} if budget.is_exceeded else set(), {})
    for name, path in found.items():
        if only is not None and name not in only:
            continue
        asked = known.get(name, usual)
        try:
            versions = complete_versions(path, asked.policy, asked.rejected, asked.first, python=asked.python)
        except Exception as error:
            # An error in one model must not affect the others.
            scan.failed[name] = type(error).__name__
            continue
        if versions.is_truncated:
            scan.truncated.add(name)
        # A folder without a version is not a model yet.
        if versions.complete or versions.refused or versions.incomplete or name in known:
            scan.models[name] = path, versions
    return scan


def complete_versions(
    model: Path,
    policy: VersionPolicy | None = None,
    rejected: Collection[int] = (),
    first: Collection[int] = (),
    *,
    python: bool = False,
) -> Versions:
    """Find versions whose files all have the sizes in their manifest, so that partial copies are not loaded.

    A partial copy that has not changed for `SETTLED_SECONDS` is reported as incomplete.

    If the policy selects the latest versions, older ones are not examined: they pile up, and the folder is scanned
    every second while requests are answered. At most `MAX_EXAMINED` versions are examined, those in `first` before
    the others.
    """
    budget = ScanBudget()
    found = Versions({}, {})
    num_fit = 0
    named = first or (policy.specific if policy is not None else None) or ()
    numbers = sorted(_numbers(budget.subfolders(model)), key=lambda number: (number not in named, -number))
    is_truncated = budget.is_exceeded
    for num_examined, number in enumerate(numbers):
        if len(found.refused) + len(found.incomplete) >= MOST_REFUSED:
            break
        if num_examined == MAX_EXAMINED:
            is_truncated = True
            break
        folder = model / str(number)
        has_python = os.path.lexists(folder / PYTHON_FILE)
        if has_python and not python:
            found.refused[number] = NOT_TRUSTED
            continue
        try:
            print_ = _python_print(folder) if has_python else _print_of(folder)
        except FileError as error:
            name = PYTHON_FILE if has_python else MANIFEST
            found.refused[number] = f"{name} is refused: {error}".replace(f"{model}/{number}/", "")
            continue
        if print_ is None:
            continue
        if isinstance(print_, str):
            if _is_settled(model / str(number)):
                found.incomplete[number] = print_
        else:
            found.complete[number] = print_
            num_fit += number not in rejected
        if policy is not None and policy.specific is None and num_fit == policy.latest:
            break
    return replace(found, is_truncated=is_truncated)


def _print_of(folder: Path) -> Print | str:
    """Return the fingerprint of a version, or what is missing in it. Raises FileError if it is invalid."""
    name = MANIFEST
    stats: dict[str, os.stat_result] = {}
    try:
        text = read_file(folder / MANIFEST, MANIFEST_LIMIT)
        if _is_unfinished(text):
            return f"the version is incomplete: {MANIFEST} ends after {len(text)} bytes"
        files = _files(parse_json(text))
        for name in files:
            stats[name] = (folder / name).lstat()
    except FileNotFoundError:
        return f"the version is incomplete: {name} is missing"
    except OSError as error:
        raise FileError("files must be readable", got=error.strerror, remedy="correct their permissions") from None
    if irregular := [name for name, found in stats.items() if not stat.S_ISREG(found.st_mode)]:
        raise FileError(
            "files must be regular files",
            got=f"{irregular[0]}, which is a link or a folder",
            remedy="copy the file itself",
        )
    for name, size in files.items():
        if stats[name].st_size != size:
            return f"the version is incomplete: {name} has {stats[name].st_size} bytes, but the manifest lists {size}"
    return tuple(sorted((name, found.st_size, found.st_mtime_ns) for name, found in stats.items()))


def _python_print(folder: Path) -> Print | None:
    """Return the fingerprint of a version with Python code; None while it is being copied.

    There is no manifest, so the folder must not have changed for some seconds.
    """
    try:
        if not stat.S_ISREG((folder / PYTHON_FILE).lstat().st_mode):
            raise FileError("files must be regular files", got=f"{PYTHON_FILE}, which is a link or a folder")
        with os.scandir(folder) as entries:
            names = {entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False)}
        stats = [(name, os.lstat(folder / name)) for name in sorted(names | {PYTHON_FILE})]
    except OSError:
        # A file was renamed or removed at this moment.
        return None
    if not _is_settled(folder, PYTHON_SETTLED_SECONDS):
        return None
    return tuple((name, one.st_size, one.st_mtime_ns) for name, one in stats if stat.S_ISREG(one.st_mode))


def _is_settled(folder: Path, seconds: float = SETTLED_SECONDS) -> bool:
    """Return whether nothing in a version's folder has changed for a while, so that no copy is in progress."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False)]
        changed = [os.lstat(folder / name).st_ctime for name in ("", *names)]
    except OSError:
        # A file was renamed or removed at this moment.
        return False
    # The clock of a file server may differ from this one.
    return abs(time.time() - max(changed)) > seconds


def _files(manifest: Any) -> dict[str, int]:
    """Return the files of a manifest with their sizes."""
    listed: Any = manifest.get("files") if isinstance(manifest, dict) else None
    if not fields.named(fields.having(size=fields.count))(listed) or not all(FILE.fullmatch(name) for name in listed):
        raise FileError(
            "the manifest must list the files of a version with their sizes",
            got="other contents",
            remedy="copy or export the version again",
        )
    return {name: about["size"] for name, about in listed.items()}


def _is_unfinished(text: bytes) -> bool:
    """Return whether a text is a prefix of JSON, as while a copy is being made."""
    try:
        json.loads(text.decode())
    except json.JSONDecodeError as error:
        return error.pos >= len(text.decode().rstrip()) or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def require_name(name: str) -> None:
    """Raise SettingsError for a name that could be a path."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            "the name of a model must consist of letters, digits, dashes and underscores, at most 64 characters",
            got=repr(name)[:100],
            remedy="rename it",
        )


@dataclass(frozen=True)
class VersionPolicy:
    """Which versions are served: a number of latest ones, all, or specific ones.

    >>> VersionPolicy.parse("latest:2").wanted({1, 2, 3})
    {2, 3}
    >>> VersionPolicy.parse("1,3").wanted({1, 2})
    {1}
    """

    latest: int = 1
    specific: frozenset[int] | None = None

    @classmethod
    def parse(cls, text: str) -> VersionPolicy:
        """Parse "latest", "latest:2", "all" or "1,3"."""
        kind, _, rest = text.partition(":")
        if kind == "latest" and (not rest or (rest.isdecimal() and int(rest) > 0)):
            return cls(int(rest or 1))
        if text == "all":
            return cls(0)
        if text and all(part.isdecimal() for part in text.split(",")):
            return cls(0, frozenset(map(int, text.split(","))))
        raise SettingsError(
            "versions must be latest, latest:N, all, or numbers",
            got=repr(text),
            remedy='pass for example versions="latest:2"',
        )

    def wanted(self, there: Collection[int]) -> set[int]:
        """Return the selected versions among the available ones."""
        if self.specific is not None:
            return set(there) & self.specific
        return set(sorted(there)[-self.latest :] if self.latest else there)
