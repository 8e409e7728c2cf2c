"""Models folder: finds models and versions that are complete and have safe names."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import FileError, SettingsError, fields, parse_json, read_file

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 10
"""Maximum bytes of a manifest, which lists three files."""
MOST_REFUSED = 50
"""Maximum versions of a model refused per scan, so that a folder full of them does not delay other models."""
Print = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of a version's files, as a fingerprint that changes with every copy."""


def models_in(root: Path) -> dict[str, Path]:
    """Return the models under a folder, or the folder itself if it contains versions; links are not followed.

    Versions beside models with versions do not make the folder a model: a user who can add one folder must not be able
    to hide the others.
    """
    if not root.is_dir():
        return {}
    found = {
        entry.name: entry
        for entry in sorted(root.iterdir())
        if NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    }
    if is_one_model(root):
        require_name(root.resolve().name)
        return {root.resolve().name: root}
    return found


def is_one_model(root: Path) -> bool:
    """Return whether a folder itself contains versions, and none of its subfolders does."""
    with os.scandir(root) as entries:
        folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return _has_versions(root) and not any(_has_versions(folder) for folder in folders)


@dataclass(frozen=True)
class Versions:
    """The complete versions of a model, and the invalid ones with the reason."""

    complete: dict[int, Print]
    refused: dict[int, str]


def complete_versions(model: Path, policy: VersionPolicy | None = None, rejected: Collection[int] = ()) -> Versions:
    """Find versions whose files all have the sizes in their manifest, so that partial copies are ignored.

    If the policy selects the latest versions, older ones are not examined: they pile up, and the folder is scanned
    every second while requests are answered.
    """
    found = Versions({}, {})
    num_fit = 0
    for number in _numbers(model):
        if len(found.refused) == MOST_REFUSED:
            break
        try:
            print_ = _print_of(model / str(number))
        except FileError as error:
            found.refused[number] = f"{MANIFEST} is refused: {error}".replace(f"{model}/{number}/", "")
            continue
        if print_ is not None:
            found.complete[number] = print_
            num_fit += number not in rejected
        if policy is not None and policy.specific is None and num_fit == policy.latest:
            break
    return found


def _has_versions(model: Path) -> bool:
    return any(os.path.lexists(model / str(number) / MANIFEST) for number in _numbers(model))


def _numbers(model: Path) -> list[int]:
    """Return the numbers of folders named like versions, highest first."""
    try:
        with os.scandir(model) as entries:
            names = [e.name for e in entries if VERSION.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(map(int, names), reverse=True)


def _print_of(folder: Path) -> Print | None:
    """Return the fingerprint of a version; None while it is being copied. Raises FileError if it is invalid."""
    try:
        text = read_file(folder / MANIFEST, MANIFEST_LIMIT)
        if _is_unfinished(text):
            return None
        files = _files(parse_json(text))
        stats = {name: (folder / name).lstat() for name in files}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError("files must be readable", got=error.strerror) from None
    if odd := [name for name, found in stats.items() if not stat.S_ISREG(found.st_mode)]:
        raise FileError("files must be regular ones", got=f"{odd[0]}, which is none")
    if any(stats[name].st_size != size for name, size in files.items()):
        return None
    return tuple(sorted((name, found.st_size, found.st_mtime_ns) for name, found in stats.items()))


def _files(manifest: Any) -> dict[str, int]:
    """Return the files of a manifest with their sizes."""
    listed: Any = manifest.get("files") if isinstance(manifest, dict) else None
    if not fields.named(fields.having(size=fields.count))(listed) or not all(FILE.fullmatch(name) for name in listed):
        raise FileError("it must list the files of a version with their sizes", got="something else")
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
            "a model's name is made of letters, digits, dashes and underscores, at most 64 of them",
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
            "versions are latest, latest:N, all, or numbers", got=repr(text), remedy='pass versions="latest:2"'
        )

    def wanted(self, there: Collection[int]) -> set[int]:
        """Return the selected versions among the available ones."""
        if self.specific is not None:
            return set(there) & self.specific
        return set(sorted(there)[-self.latest :] if self.latest else there)
