"""Dispatcher of a run's events to its sinks: each sink has a queue and a thread, so that it cannot block training."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ...core import Event
from .sink import FAILED, FINISHED, STOPPED, About, Sink

MAX_WAITING = 1000
"""Maximum number of events queued for a sink. One with more, which has hung for minutes, is dropped."""
CLOSE_SECONDS = 30.0
"""Seconds that all sinks together have to finish at the end of a run."""
QUIET_SECONDS = 2.0
"""Seconds after which a notice names the sinks that the end of a run waits for."""

DROPPED = "was dropped, and the run continues without it"
"""Text in the notice about a dropped sink, by which callers recognise that the notice must always be printed."""


class SinkDispatcher:
    """Pass a run's events to its sinks; a sink that fails or hangs is dropped and reported once."""

    def __init__(self, sinks: Sequence[Sink], about: About) -> None:
        self._outlets = [_Outlet(sink, about) for sink in sinks]
        self._status = FAILED
        self._closed = False

    def take(self, entry: Event) -> Iterator[str]:
        """Queue an event for every sink without blocking, and return the notices about sinks."""
        if entry["kind"] == "end":
            self._status = STOPPED if entry["stopped"] else FINISHED
        for outlet in self._outlets:
            if entry["kind"] != "failed" or outlet.has_begun:
                outlet.put(entry)
        return self._news()

    def close(self, notify: Callable[[str], None]) -> None:
        """End all sinks within `CLOSE_SECONDS`, and pass notices about those that fail to `notify`."""
        if self._closed:
            return
        self._closed = True
        for outlet in self._outlets:
            outlet.finish(self._status)
        start = time.monotonic()
        self._wait(start + QUIET_SECONDS)
        if slow := [str(outlet.sink) for outlet in self._outlets if outlet.is_alive]:
            notify(f"waiting for {', '.join(slow)} to write the last events, {CLOSE_SECONDS:.0f} s at most")
        self._wait(start + CLOSE_SECONDS)
        for outlet in self._outlets:
            if outlet.is_alive:
                outlet.drop(f"it did not end within {CLOSE_SECONDS:.0f} s")
        for text in self._news():
            notify(text)

    def _wait(self, deadline: float) -> None:
        for outlet in self._outlets:
            outlet.join(max(0.0, deadline - time.monotonic()))

    def _news(self) -> Iterator[str]:
        for outlet in self._outlets:
            while outlet.news:
                yield f"log_to {outlet.sink}{outlet.news.popleft()}"


class _Outlet:
    """A sink with its queue and its thread, which starts with the first event."""

    def __init__(self, sink: Sink, about: About) -> None:
        self.sink, self._about = sink, about
        self._waiting: queue.Queue[Event | str] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = False
        self.news: collections.deque[str] = collections.deque()
        """Notices for the user, appended by the sink's thread."""

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    @property
    def is_alive(self) -> bool:
        return not self._dropped and self._thread is not None and self._thread.is_alive()

    def put(self, entry: Event | str) -> None:
        if self._dropped:
            return
        if self._thread is None:
            # A daemon thread: a sink that hangs must not keep the program from exiting.
            self._thread = threading.Thread(target=self._run, name=f"log_to {self.sink}", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self.drop(f"it is too slow, {MAX_WAITING} events wait for it")

    def finish(self, status: str) -> None:
        """Queue the end of the run with its status, unless the sink has had no event."""
        if self.has_begun:
            self.put(status)

    def join(self, seconds: float) -> None:
        if self._thread is not None and not self._dropped:
            self._thread.join(seconds)

    def drop(self, reason: str) -> None:
        if not self._dropped:
            self.news.append(f" {DROPPED}: {reason}")
        self._dropped = True

    def _run(self) -> None:
        try:
            self.sink.start(self._about)
            if self.sink.link:
                self.news.append(f": {self.sink.link}")
            while not self._dropped:
                item = self._waiting.get()
                if isinstance(item, str):
                    return self.sink.end(item)
                self.sink.take(item)
        except BaseException as error:
            self.drop(f"{type(error).__name__}: {error}")
