"""CallTrace: which files of the package call each other while a thread runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import manyhands

PACKAGE = str(Path(manyhands.__file__).parent) + "/"
BASE = ("core", "distributed", "monitoring", "capture", "launcher")
"""Packages whose functions every other package calls: plain functions, collectives, clocks, processes."""


class CallTrace:
    """Records every call from one file of the package into another one, in the thread that started it.

    Calls into the packages of `BASE` are left out, and a call that passes through foreign code (autograd, the event
    loop) counts for the file that called it.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        """The files in the order in which they were entered first."""
        self.calls: dict[tuple[str, str], str] = {}
        """An example of a call by the files that call and are called."""

    def start(self) -> None:
        """Begin to record calls."""
        sys.setprofile(self._look)

    def stop(self) -> None:
        """Record no further calls."""
        sys.setprofile(None)

    def _look(self, frame: FrameType, kind: str, value: Any) -> None:
        if kind != "call":
            return
        called = _file_of(frame)
        if called is None:
            return
        self.files.setdefault(called)
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        source = None if caller is None else _file_of(caller)
        if source is not None and source != called:
            assert caller is not None
            self.calls.setdefault((source, called), f"{caller.f_code.co_name} -> {frame.f_code.co_name}")


def _file_of(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    if not name.startswith(PACKAGE):
        return None
    path = name.removeprefix(PACKAGE)
    return None if path.partition("/")[0] in BASE else path
