"""Run a user's script as the main program of a rank."""

from __future__ import annotations

import contextlib
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..core import RunError

if TYPE_CHECKING:
    from ..training import Hand


class ScriptExit(RunError):
    """Raised if a script has exited with a code other than 0."""

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(text)
        self.exit_code, self.text = exit_code, text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.exit_code, self.text)


def run_script(hand: Hand, script: str, args: Sequence[str]) -> None:
    """Run a script as `__main__` in this rank; tracebacks of its errors begin at the script's first frame."""
    run_main(script, args, hand.world.size)


def run_main(script: str, args: Sequence[str], num_ranks: int = 1) -> None:
    """Run a script as `__main__` in this process, which is one of `num_ranks` ranks.

    Raises:
        ScriptExit: The script has exited with a code other than 0.
    """
    try:
        with _as_main_program(script, args), _default_signals(num_ranks):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        _end(error.code)
    except Exception as error:
        raise error.with_traceback(_own_part(error.__traceback__, script)) from error.__cause__


def _end(code: object) -> None:
    """Raise ScriptExit for the value of a SystemExit, except for 0 and None; a text means exit code 1, as in Python."""
    if isinstance(code, int) or code is None:
        if code:
            raise ScriptExit(code)
    else:
        raise ScriptExit(1, str(code))


@contextlib.contextmanager
def _as_main_program(script: str, args: Sequence[str]) -> Iterator[None]:
    """Set sys.argv and sys.path as `python script.py` would within the context, and flush output after every line."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


@contextlib.contextmanager
def _default_signals(size: int) -> Iterator[None]:
    """Restore Python's handling of Ctrl-C within the context if there is one rank, which runs in the user's process."""
    if size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _own_part(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Return a traceback from the script's first frame on; the whole one if it has no frame of the script."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename != script:
        part = part.tb_next
    return part or trace
