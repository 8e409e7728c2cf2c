"""A queue and a thread for every sink, so that none of them can hold training up."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ...core import Event
from .sink import FAILED, FINISHED, STOPPED, About, Sink

MAX_WAITING = 1000
"""Events that may wait for a sink; they come a few times a second, so it hangs for minutes before it is dropped."""
CLOSE_SECONDS = 30.0
"""What all sinks together get to write their last at the end of a run."""
QUIET_SECONDS = 2.0
"""How long the end of a run may take before the person hears what it waits for."""

DROPPED = "was dropped, the run does without it"
"""In a notice: the part that a person should hear even where nothing else is shown."""


class SinkDispatcher:
    """Gives a run's events to its sinks and says, once each, which of them had to be dropped."""

    def __init__(self, sinks: Sequence[Sink], about: About) -> None:
        self._outlets = [_Outlet(sink, about) for sink in sinks]
        self._status = FAILED
        self._closed = False

    def take(self, entry: Event) -> Iterator[str]:
        """Passes an event on, and yields what has to be told about sinks; it never waits."""
        if entry["kind"] == "end":
            self._status = STOPPED if entry["stopped"] else FINISHED
        for outlet in self._outlets:
            if entry["kind"] != "failed" or outlet.has_begun:
                outlet.put(entry)
        return self._news()

    def close(self, say: Callable[[str], None]) -> None:
        """Lets the sinks write their last, within bounded time, and tells what became of those that could not."""
        if self._closed:
            return
        self._closed = True
        for outlet in self._outlets:
            outlet.finish(self._status)
        start = time.monotonic()
        self._wait(start + QUIET_SECONDS)
        if slow := [str(outlet.sink) for outlet in self._outlets if outlet.is_alive]:
            say(f"waiting for {', '.join(slow)} to write the last events, {CLOSE_SECONDS:.0f} s at most")
        self._wait(start + CLOSE_SECONDS)
        for outlet in self._outlets:
            if outlet.is_alive:
                outlet.drop(f"it did not end within {CLOSE_SECONDS:.0f} s")
        for text in self._news():
            say(text)

    def _wait(self, deadline: float) -> None:
        for outlet in self._outlets:
            outlet.join(max(0.0, deadline - time.monotonic()))

    def _news(self) -> Iterator[str]:
        for outlet in self._outlets:
            while outlet.news:
                yield f"log_to {outlet.sink}{outlet.news.popleft()}"


class _Outlet:
    """One sink, its queue and its thread, which begins with the first event."""

    def __init__(self, sink: Sink, about: About) -> None:
        self.sink, self._about = sink, about
        self._waiting: queue.Queue[Event | str] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = False
        self.news: collections.deque[str] = collections.deque()
        """What the person should hear of it, left here by its thread."""

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
            # A daemon: a sink that hangs must not keep the program from ending.
            self._thread = threading.Thread(target=self._run, name=f"log_to {self.sink}", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self.drop(f"it is too slow, {MAX_WAITING} events wait for it")

    def finish(self, status: str) -> None:
        """Nothing comes any more; a sink that never began is left alone."""
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
