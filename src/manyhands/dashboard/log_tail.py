"""Incremental reader of a growing file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import LINE_LIMIT, FileError, PartReader, open_regular, parse_json, parts_before

SLICE = 1 << 18
"""Number of bytes that are read at a time, so that one long log does not delay the others."""
FEW_BRACKETS = 64
"""Maximum number of brackets of lines that are parsed together; such lines cannot be nested too deeply."""


class Tail:
    """Read the JSON objects that are appended to a file, a slice per call of `read`.

    The older parts of an event log are read before it, and the rest of a part that was put aside after it.

    A file that was replaced or truncated is read from the start, and `was_replaced` is set. Lines that are damaged or
    longer than `LINE_LIMIT` are counted in `num_damaged`. A file that is not a regular file is not opened, and `error`
    is set.

    Args:
        path: The file, which need not exist yet.
        without: Texts of lines that are skipped without parsing.
    """

    def __init__(self, path: Path, without: tuple[bytes, ...] = ()) -> None:
        self.path, self._without = path, without
        self.offset = self.num_read = 0
        """Offset of the next read, and total bytes read."""
        self.was_replaced = False
        self.num_damaged = 0
        """Number of lines that could not be parsed."""
        self.error = ""
        """Why the file cannot be read at all; empty if it can be read or does not exist."""
        self._file_id: tuple[int, int] | None = None
        self._pending = 0
        self._parts: list[Path] = []
        """Older parts of the log that are still to be read."""
        self._part: PartReader | None = None
        """The older part that is being read."""
        self._rest = b""
        """Its last line, of which not all was read."""
        self._is_skipping = False
        """Whether the next data is the rest of a line that is too long."""

    @property
    def pending(self) -> int:
        """Number of bytes known to be unread."""
        return self._pending

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of the next slice of the file; an incomplete last line is read by a later call."""
        lines = [line for line in self._lines() if line.strip()]
        for part in self._without:
            lines = [line for line in lines if part not in line]
        found = [entry for entry in _parsed(lines) if isinstance(entry, dict)]
        self.num_damaged += len(lines) - len(found)
        return found

    @property
    def _is_behind(self) -> bool:
        """Whether older parts of the log are still to be read."""
        return self._part is not None or bool(self._parts)

    def _lines(self) -> list[bytes]:
        """Return the complete lines of the next slice."""
        if self._is_behind:
            return self._older_lines()
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                self.error = ""
                size = self._look(file.fileno())
                if self._is_behind:
                    return self._older_lines()
                if size == self.offset:
                    return []
                file.seek(self.offset)
                data = file.read(SLICE)
                while b"\n" not in data and self.offset + len(data) < size and len(data) < LINE_LIMIT:
                    data += file.read(SLICE)
        except (OSError, FileError) as error:
            self.error = "" if isinstance(error, FileNotFoundError) else str(error)
            self._pending = 0
            return []
        return self._taken(data, size)

    def _taken(self, data: bytes, size: int) -> list[bytes]:
        """Return the complete lines of data that were read at the current offset, and advance the offset.

        A line that is too long is skipped over several calls. `size` is the size of the file.
        """
        self.num_read += len(data)
        whole = data.rfind(b"\n") + 1
        is_too_long = not whole and len(data) >= LINE_LIMIT
        taken = len(data) if is_too_long or (self._is_skipping and not whole) else whole
        self.offset += taken
        self._pending = max(0, size - self.offset) if taken else 0
        lines = data[:whole].split(b"\n")
        if self._is_skipping and whole:
            lines, self._is_skipping = lines[1:], False
        if is_too_long and not self._is_skipping:
            self._is_skipping = True
            self.num_damaged += 1
        return lines

    def _look(self, file: int) -> int:
        """Return the size of the open file; if the file was replaced or truncated, start again at its beginning."""
        found = os.fstat(file)
        who = (found.st_dev, found.st_ino)
        if self._file_id is None:
            self._parts = parts_before(self.path, file)
        elif who != self._file_id and self._was_put_aside(self._file_id, file):
            self.offset = 0
        elif who != self._file_id or found.st_size < self.offset:
            self.offset, self.was_replaced = 0, True
        self._file_id = who
        self._pending = found.st_size - self.offset
        return found.st_size

    def _was_put_aside(self, file_id: tuple[int, int], file: int) -> bool:
        """Return whether the file that was read is an older part now; then its rest and later parts are read next."""
        parts = parts_before(self.path, file)
        for index, part in enumerate(parts):
            try:
                found = part.lstat()
                if (found.st_dev, found.st_ino) == file_id:
                    self._part, self._parts = PartReader(part, self.offset), parts[index + 1 :]
                    return True
            except (OSError, FileError):
                continue
        return False

    def _older_lines(self) -> list[bytes]:
        """Return the complete lines of the next slice of the older parts."""
        part = self._part = self._part or PartReader(self._parts.pop(0))
        try:
            data = part.read(SLICE)
        except FileNotFoundError:
            # It was compacted, which merges lines that were read already with others.
            data, self._rest, self._parts = b"", b"", []
            self.offset, self._file_id, self.was_replaced = 0, None, True
        except (OSError, FileError):
            data, self._rest = b"", b""
            self.num_damaged += 1
        self.num_read += len(data)
        # The log itself is still to be read too.
        self._pending = len(self._parts) + 1
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data:
            # The last line of a part ends with it.
            lines, self._rest, self._part = [self._rest], b"", None
        if self._is_skipping and (lines or not data):
            lines, self._is_skipping = lines[1:], False
        if len(self._rest) > LINE_LIMIT:
            self.num_damaged += not self._is_skipping
            self._rest, self._is_skipping = b"", True
        return lines


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Return the values of some lines of JSON, with None for damaged lines.

    The lines are parsed together, which is twice as fast, and one by one only if some are damaged.
    """
    if all(line.count(b"[") + line.count(b"{") <= FEW_BRACKETS for line in lines):
        try:
            found = json.loads((b"[%b]" % b",".join(lines)).decode())
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(lines):
            return list(found)
    return [_object(line) for line in lines]


def _object(line: bytes) -> Any:
    """Return the value of a line of JSON; None if it is damaged or nested too deeply."""
    try:
        is_flat = line.count(b"[") + line.count(b"{") <= FEW_BRACKETS
        # An error with a text takes ten times as long, and a slice may have a hundred thousand damaged lines.
        return json.loads(line.decode()) if is_flat else parse_json(line)
    except (ValueError, RecursionError, FileError):
        return None
