"""Detection of Ctrl-C and SIGTERM, also if other code handles them."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Context that detects Ctrl-C and SIGTERM, also while the code inside has installed its own handlers.

    A command needs this for its exit code: a run can also stop early by itself, so that it was stopped does not show
    that there was a signal.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        """The exit code of the program: 130 after Ctrl-C, 143 after a SIGTERM, 0 without a signal."""
        self._here = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._here:
            self._reader, self._writer = socket.socketpair()
            self._reader.setblocking(False)
            self._writer.setblocking(False)
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
            self._on_end = signal.signal(signal.SIGTERM, self._end)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGINT, self._handler)
            signal.signal(signal.SIGTERM, self._on_end)
            self.exit_code = self.exit_code or self._read_code()
            self._reader.close()
            self._writer.close()
            if isinstance(error, KeyboardInterrupt) and self.exit_code:
                error.exit_code = self.exit_code  # type: ignore[attr-defined]

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        raise KeyboardInterrupt

    def _end(self, number: int, frame: FrameType | None) -> None:
        # `frame` is None if the command has handled the signal, and will report its result.
        if frame is not None:
            raise SystemExit(128 + number)

    def _read_code(self) -> int:
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return 0
        return next((128 + number for number in (signal.SIGINT, signal.SIGTERM) if number in numbers), 0)


@contextlib.contextmanager
def until_ended() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second signal has its previous effect, such as to exit."""
    ending = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        ending.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, on_signal)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
