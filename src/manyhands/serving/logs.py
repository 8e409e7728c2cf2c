"""The event log and the access log of a server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ..core import EventLog, open_regular
from .http import Request

MAX_ACCESS_BYTES = 256 << 20
"""Size in bytes at which access.jsonl is renamed to access.1.jsonl, which replaces the previous one."""


class Logs:
    """Both logs of a server; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._events = EventLog(folder / "events.jsonl") if folder is not None else None
        self._folder = folder
        self._access: BinaryIO | None = None
        self._failed = False
        if folder is not None:
            try:
                self._access = _opened(folder / "access.jsonl")
            except BaseException:
                self.close()
                raise

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder to write to."""
        return self._folder is not None

    def event(self, entry: dict[str, Any]) -> None:
        """Write an event to the event log."""
        if self._events is not None:
            self._events.write(entry)

    def access(self, request: Request, status: int, size: int) -> None:
        """Write an answered request to the access log; lines are buffered, so a crash may lose the last ones."""
        self.call(request.method, request.path, status, len(request.body), size, request.arrived)

    def call(self, method: str, path: str, status: int, num_in: int, num_out: int, arrived: float) -> None:
        """Write a call to the access log, for gRPC with the equivalent HTTP status; write errors drop the line."""
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
        """Write buffered lines, so that readers are not far behind; rotate the file if it is too large."""
        if self._access is None or self._folder is None:
            return
        try:
            self._access.flush()
            self._failed = False
            if self._access.tell() >= MAX_ACCESS_BYTES:
                path = self._folder / "access.jsonl"
                path.replace(path.with_name("access.1.jsonl"))
                full, self._access = self._access, _opened(path)
                full.close()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write buffered lines and close both logs."""
        if self._events is not None:
            self._events.close()
        if self._access is not None:
            with contextlib.suppress(OSError):
                self._access.close()

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            path = f"{self._folder}/access.jsonl"
            # With the time, because Python shows equal warnings only once.
            since = time.strftime("%H:%M:%S")
            warnings.warn(
                f"requests are not logged from {since} on, because {path} cannot be written: {error}", stacklevel=3
            )


def _opened(path: Path) -> BinaryIO:
    """Open a log for appending, with a lock that shows readers that the server is running."""
    file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    log = os.fdopen(file, "ab", buffering=1 << 16)
    with contextlib.suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH)
    return log
