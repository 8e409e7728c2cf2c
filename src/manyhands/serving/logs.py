"""The event log and the access log of a server."""

from __future__ import annotations

import contextlib
import fcntl
import time
import warnings
from pathlib import Path
from typing import Any

import orjson

from ..core import EventLog
from .http import Request


class Logs:
    """Both logs, where they are wished for."""

    def __init__(self, folder: Path | None) -> None:
        self._events = EventLog(folder / "events.jsonl") if folder is not None else None
        self._access = (folder / "access.jsonl").open("ab", buffering=1 << 16) if folder is not None else None
        self._failed = False
        if self._access is not None:
            with contextlib.suppress(OSError):  # whoever reads the logs sees by this lock that the server is there
                fcntl.flock(self._access, fcntl.LOCK_SH)

    def event(self, entry: dict[str, Any]) -> None:
        """Writes an event."""
        if self._events is not None:
            self._events.write(entry)

    def access(self, request: Request, status: int, size: int) -> None:
        """Writes a line about an answered request; lines are gathered, so a crash may cost the last ones."""
        self.call(request.method, request.path, status, len(request.body), size, request.arrived)

    def call(self, method: str, path: str, status: int, num_in: int, num_out: int, arrived: float) -> None:
        """The same for a call over gRPC, whose status is what HTTP would have said; a full disk costs the line."""
        if self._access is None:
            return
        milliseconds = 1000 * (time.perf_counter() - arrived)
        line = b'{"t":%.6f,"method":"%b","path":%b,"status":%d,"in":%d,"out":%d,"ms":%.3f}\n' % (
            time.time(), method.encode(), orjson.dumps(path[:200]), status, num_in, num_out, milliseconds
        )  # fmt: skip
        try:
            self._access.write(line)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Writes what was gathered, so that whoever reads the log is not far behind."""
        if self._access is None:
            return
        try:
            self._access.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Writes the rest."""
        if self._events is not None:
            self._events.close()
        if self._access is not None:
            with contextlib.suppress(OSError):
                self._access.close()

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            name = getattr(self._access, "name", "")
            warnings.warn(f"requests are not logged, {name} cannot be written: {error}", stacklevel=3)
