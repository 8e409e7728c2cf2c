"""Interrupts: whether Ctrl-C came, whoever handled it."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Hears Ctrl-C also beside the handler that a verb installs.

    A run may end early by its own wish, so that it ended early does not say that a person interrupted it.
    """

    def __init__(self) -> None:
        self.came = False
        self._here = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._here:
            self._heard, self._said = socket.socketpair()
            self._heard.setblocking(False)
            self._said.setblocking(False)
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
            self._wakeup = signal.set_wakeup_fd(self._said.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGINT, self._handler)
            self.came = self.came or self._was_heard()
            self._heard.close()
            self._said.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def _was_heard(self) -> bool:
        try:
            return signal.SIGINT in self._heard.recv(4096)
        except BlockingIOError:
            return False
