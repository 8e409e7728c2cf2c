"""Interrupts: whether Ctrl-C came, whoever handled it."""

from __future__ import annotations

import signal
import socket
import threading
from types import TracebackType
from typing import Self


class Interrupts:
    """Hears Ctrl-C beside whatever handler a verb installs, because a run may also end early by its own wish."""

    def __init__(self) -> None:
        self._here = threading.current_thread() is threading.main_thread()
        self._before = -1
        self._came = False

    def __enter__(self) -> Self:
        self._heard, self._said = socket.socketpair()
        self._heard.setblocking(False)
        self._said.setblocking(False)
        if self._here:
            self._before = signal.set_wakeup_fd(self._said.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here:
            signal.set_wakeup_fd(self._before)
        try:
            self._came = signal.SIGINT in self._heard.recv(4096)
        except BlockingIOError:
            self._came = False
        self._heard.close()
        self._said.close()

    def came(self) -> bool:
        """Whether it came while this was entered."""
        return self._came
