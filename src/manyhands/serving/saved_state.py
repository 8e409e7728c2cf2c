"""Labels, traffic splits and rollbacks that survive a restart: a small file per name, replaced atomically."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import FileError, fields, open_regular, read_json
from .folder import LABEL, NAME

FOLDER = ".serving"
"""Folder of the state files, in the folder of models. Its name is none of a model."""
MAX_STATES = 10_000
MAX_BYTES = 1 << 20
"""Maximum number of state files that are read, and bytes of each."""


@dataclass(frozen=True)
class TrafficShare:
    """Weighted share of a traffic split, and the model version that answers it."""

    model: str
    version: int | None
    weight: float


_SHARE = fields.having(
    model=lambda value: fields.text(value) and NAME.fullmatch(value) is not None,
    version=fields.maybe(fields.count),
    weight=lambda value: fields.number(value) and 0 < value < float("inf"),
)
_STATE: fields.Fields = {
    "labels": lambda value: fields.named(fields.count)(value) and all(map(LABEL.fullmatch, value)),
    "shares": fields.listed(_SHARE),
    "rejected": fields.listed(fields.count),
    "asked": fields.listed(fields.count),
    "unloaded": lambda value: isinstance(value, bool),
}


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What was set by management under one name.

    Attributes:
        labels: Versions by label.
        shares: The traffic split of the name; empty for none.
        rejected: Versions that were rolled back.
        asked: Versions loaded on request.
        is_unloaded: Whether the model was unloaded on request.
    """

    labels: Mapping[str, int]
    shares: tuple[TrafficShare, ...]
    rejected: frozenset[int]
    asked: frozenset[int]
    is_unloaded: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was set, so that no file is needed."""
        return not (self.labels or self.shares or self.rejected or self.asked or self.is_unloaded)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "labels": dict(self.labels),
            "shares": [vars(share) for share in self.shares],
            "rejected": sorted(self.rejected),
            "asked": sorted(self.asked),
            "unloaded": self.is_unloaded,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SavedState:
        """Parse `to_dict`'s JSON; raises FileError for other contents."""
        if not fields.holds(value, _STATE):
            raise FileError("the file must hold the state of a served name", got="other contents", remedy="remove it")
        return cls(
            labels=value["labels"],
            shares=tuple(TrafficShare(one["model"], one.get("version"), one["weight"]) for one in value["shares"]),
            rejected=frozenset(value["rejected"]),
            asked=frozenset(value["asked"]),
            is_unloaded=value["unloaded"],
        )


class StateFolder:
    """Reads and writes the state files. Its methods block, so they run in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, SavedState], dict[str, str]]:
        """Return the states by name, and why files cannot be read, by name."""
        states: dict[str, SavedState] = {}
        refused: dict[str, str] = {}
        try:
            self._require_own()
            paths = sorted(self.path.glob("*.json"))[:MAX_STATES]
        except FileNotFoundError:
            return {}, {}
        except (FileError, OSError) as error:
            return {}, {"": str(error).replace(f"{self.path.parent}/", "")}
        for path in paths:
            if not NAME.fullmatch(path.stem):
                continue
            try:
                states[path.stem] = SavedState.from_dict(read_json(path, MAX_BYTES))
            except FileError as error:
                refused[path.stem] = str(error).replace(f"{self.path}/", "")
            except OSError as error:
                refused[path.stem] = error.strerror or type(error).__name__
        return states, refused

    def write(self, name: str, state: SavedState) -> None:
        """Replace the file of a name atomically, or remove it if nothing is set; raises OSError or FileError."""
        path = self.path / f"{name}.json"
        if state.is_empty:
            path.unlink(missing_ok=True)
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_own()
        # Servers that share a folder may write the same state at the same time.
        temporary = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                json.dump(state.to_dict(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _require_own(self) -> None:
        """Raise FileError if another user could have made the folder: its files direct the traffic of all models."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            raise FileError(
                f"{self.path} must be a folder of the server's user that others cannot write to",
                got=f"mode {stat.S_IMODE(found.st_mode):o}, owner {found.st_uid}",
                remedy="remove it, or pass another folder as --state",
            )
