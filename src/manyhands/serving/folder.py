"""The models folder: which models and versions lie there, complete, and under names that are safe."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..core import SettingsError
from ..store import versions

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MANIFEST = "manifest.json"
Print = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of a version's files: another print is another copy."""


def models_in(root: Path) -> dict[str, Path]:
    """The models under a folder, or the folder itself where versions lie in it; links are not followed."""
    if versions(root):
        require_name(root.resolve().name)
        return {root.resolve().name: root}
    if not root.is_dir():
        return {}
    return {
        entry.name: entry
        for entry in sorted(root.iterdir())
        if NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    }


def complete_versions(model: Path, policy: Policy | None = None, rejected: Collection[int] = ()) -> dict[int, Print]:
    """Versions whose files all have the sizes that their manifest says, so that half a copy is not seen.

    A policy that wants the latest ones needs no look at those before them: old versions pile up, and a look is taken
    every second while requests are answered.
    """
    found: dict[int, Print] = {}
    num_fit = 0
    for number in sorted(versions(model), reverse=True):
        print_ = _print_of(model / str(number))
        if print_ is not None:
            found[number] = print_
            num_fit += number not in rejected
        if policy is not None and policy.specific is None and num_fit == policy.latest:
            break
    return found


def _print_of(folder: Path) -> Print | None:
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        stats = {name: (folder / name).lstat() for name in files if "/" not in name}
        if len(stats) < len(files) or any(stats[name].st_size != said["size"] for name, said in files.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()))


def require_name(name: str) -> None:
    """Refuses a name that could mean a path."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            "a model's name is made of letters, digits, dashes and underscores, at most 64 of them",
            got=repr(name)[:100],
            remedy="rename it",
        )


@dataclass(frozen=True)
class Policy:
    """Which versions are served: the latest so many, all, or those that are named.

    >>> Policy.parse("latest:2").wanted({1, 2, 3})
    {2, 3}
    >>> Policy.parse("1,3").wanted({1, 2})
    {1}
    """

    latest: int = 1
    specific: frozenset[int] | None = None

    @classmethod
    def parse(cls, text: str) -> Policy:
        """From "latest", "latest:2", "all" or "1,3"."""
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
        """Of those that are there."""
        if self.specific is not None:
            return set(there) & self.specific
        return set(sorted(there)[-self.latest :] if self.latest else there)
