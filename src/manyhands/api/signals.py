"""Handling of Ctrl-C and SIGTERM while a public function runs: the first signal stops it after the current step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..distributed import current_world
from ..monitoring import View

_STOPPING: dict[int, str] = {
    signal.SIGINT: "stopping after this step; Ctrl-C again stops at once",
    signal.SIGTERM: "SIGTERM received: stopping after this step, then the program ends; a second signal stops at once",
}


@contextlib.contextmanager
def interruptible(stop: Callable[[], None], view: View, checks_stop: bool = True) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM in this context, and raise KeyboardInterrupt on the second one.

    After a SIGTERM, the previous handler is called at the end, because the signal is meant for the whole program. In
    other threads than the main thread, and without `checks_stop`, signals are not handled.

    Args:
        stop: Requests a stop after the current step.
        view: View that displays that the stop was requested.
        checks_stop: Whether what runs in the context can stop on request.
    """
    if not checks_stop or threading.current_thread() is not threading.main_thread():
        yield
        return

    asked: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        stop()
        view.line(_STOPPING[number])

    before = {number: signal.signal(number, interrupt) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGTERM in asked:
        _pass_on(before[signal.SIGTERM])


@contextlib.contextmanager
def defer_sigterm() -> Iterator[None]:
    """Delay the previous SIGTERM handler to the end of this context if `interruptible` inside handles the signal.

    `interruptible` calls the handler that this context installs; any other SIGTERM is passed on at once.
    """
    if threading.current_thread() is not threading.main_thread() or current_world() is not None:
        yield
        return
    signals: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: Any) -> None:
        if frame is None:
            signals.append(number)
        else:
            _pass_on(before, frame)

    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if signals:
        _pass_on(before)


def _pass_on(handler: Any, frame: Any = None) -> None:
    """Call a SIGTERM handler; for the default handler exit the program.

    `frame` is None if the run was stopped before, so that handlers can tell this from a signal that arrives now.
    """
    if callable(handler):
        handler(signal.SIGTERM, frame)
    elif handler != signal.SIG_IGN:
        raise SystemExit(128 + signal.SIGTERM)
