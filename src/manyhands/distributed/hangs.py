"""Hang detection: when a rank waits too long, report what every rank is doing and which ranks have not arrived."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core import Event, event

STALL = 0.25
"""The fraction of the time limit after which an operation counts as stalled."""
ANSWER_SECONDS = 2.0
"""Seconds that a rank may take to report its stack; a frozen rank never does."""
CROSSED_SECONDS = 2.0
"""Seconds for which every rank must have been blocked in a collective to be reported as deadlocked."""
MAX_FRAMES = 12
STEP = "a step"
_ALONE = ("", STEP, "send", "receive")
"""Operations in which a rank does not wait for all other ranks."""


class CollectiveListener(Protocol):
    """Protocol of objects that are notified when a rank starts and stops waiting in a collective."""

    def begin(self, name: str) -> None:
        """Handle the start of a wait."""

    def leave(self) -> None:
        """Handle the end of the wait."""


class CollectiveLog:
    """The current operation of a rank, its start time, and the number of collectives that the rank has started."""

    def __init__(self) -> None:
        self.spans: CollectiveListener | None = None
        """Object that is notified of the waits of this rank while a step is timed; else None."""
        self.operation, self.since, self.number = "", time.monotonic(), 0
        self.thread = threading.get_ident()

    def begin(self, operation: str) -> str:
        """Record the start of a collective; return the previous operation, which the caller must pass to `end`."""
        before = self.operation
        if self.spans is not None and threading.get_ident() == self.thread:
            self.spans.begin("communication")
        self.operation, self.since, self.number = operation, time.monotonic(), self.number + 1
        return before

    def end(self, before: str) -> None:
        """Record the end of a collective and restore the previous operation."""
        if self.spans is not None and threading.get_ident() == self.thread:
            self.spans.leave()
        self.operation, self.since = before, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Record within the context that the rank waits for another rank outside of a collective."""
        before, self.operation, self.since = self.operation, operation, time.monotonic()
        try:
            yield
        finally:
            self.operation, self.since = before, time.monotonic()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record within the context that the rank computes a step."""
        self.operation, self.since = STEP, time.monotonic()
        try:
            yield
        finally:
            self.operation = ""

    def describe(self) -> dict[str, Any]:
        """Return the operation, its duration, the number of collectives so far, and the training thread's stack."""
        seconds = time.monotonic() - self.since if self.operation else 0.0
        frames = traceback.extract_stack(sys._current_frames().get(self.thread))
        stack = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
        return {"operation": self.operation, "seconds": seconds, "number": self.number, "stack": stack}


class StallWatchdog:
    """A thread that reports each operation of its rank that takes more than `seconds`, once."""

    def __init__(self, collective_log: CollectiveLog, seconds: float, report: Callable[[Event], None]) -> None:
        self._log, self._seconds, self._report = collective_log, seconds, report
        self._over = threading.Event()
        self._reported_number = -1
        threading.Thread(target=self._watch, name="manyhands-watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()

    def _watch(self) -> None:
        collective_log = self._log
        while not self._over.wait(self._seconds / 4):
            hangs = collective_log.operation and time.monotonic() - collective_log.since > self._seconds
            if hangs and collective_log.number != self._reported_number:
                self._reported_number = collective_log.number
                self._report(event("stalled", **collective_log.describe()))


@dataclass
class HangReport:
    """The answers of ranks that were asked for their current operation and stack."""

    number: int
    """The number of the collective that hangs."""
    size: int
    began: float = field(default_factory=time.monotonic)
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Return whether every rank has answered, or the time to answer is over."""
        return len(self.answers) >= self.size or time.monotonic() > self.began + ANSWER_SECONDS

    @property
    def crossed(self) -> str:
        """Return which rank waits in which collective if all ranks wait in collectives that do not match; else "".

        Such ranks are deadlocked. Sends and receives are not compared, because they match each other.
        """
        every = sorted(self.answers.items())
        all_wait = all(report["operation"] not in _ALONE and report["seconds"] > CROSSED_SECONDS for _, report in every)
        names = {report["operation"] for _, report in every}
        if len(every) < self.size or not all_wait or len(names) == 1:
            return ""
        return ", ".join(f"rank {rank} in {report['operation']}" for rank, report in every)

    def text(self, hosts: Mapping[int, str]) -> str:
        """Return the report as text: first the ranks that have not arrived, then those that wait, each with its stack.

        >>> waits = {"operation": "all_reduce", "seconds": 9.0, "number": 7, "stack": ["a.py:1 in f: f()"]}
        >>> works = {"operation": "", "seconds": 0.0, "number": 6, "stack": ["a.py:2 in g: sleep()"]}
        >>> print(HangReport(7, 2, answers={0: waits, 1: works}).text({0: "host1", 1: "host2"}))
        rank 0 has waited 9 s in all_reduce for rank 1
          rank 1 on host2 has not arrived; it is outside of collectives, after 6 of them
            a.py:2 in g: sleep()
          rank 0 on host1 waits in all_reduce, its collective number 7
            a.py:1 in f: f()
        """
        waiting = {rank: report for rank, report in self.answers.items() if self._waits(report)}
        late = [rank for rank in hosts if rank not in waiting]
        lines = [self._headline(waiting, late)]
        for rank in [*late, *waiting]:
            report = self.answers.get(rank)
            lines.append(f"  rank {rank} on {hosts[rank]} {self._describe_rank(report)}")
            lines += [f"    {frame}" for frame in _shortened(report["stack"])] if report is not None else []
        return "\n".join(lines)

    def _waits(self, report: Mapping[str, Any]) -> bool:
        return report["operation"] not in ("", STEP) and report["number"] >= self.number

    def _headline(self, waiting: Mapping[int, Mapping[str, Any]], late: list[int]) -> str:
        if not waiting:
            return "a step hangs, but no rank waits in a collective of manyhands"
        rank, report = max(waiting.items(), key=lambda item: item[1]["seconds"])
        for_whom = f" for rank {', '.join(map(str, late))}" if late else ", though all ranks are in it"
        return f"rank {rank} has waited {report['seconds']:.0f} s in {report['operation']}{for_whom}"

    def _describe_rank(self, report: Mapping[str, Any] | None) -> str:
        if report is None:
            return "does not answer: its process is frozen, or in code that does not release the GIL"
        if self._waits(report):
            return f"waits in {report['operation']}, its collective number {report['number']}"
        if report["operation"] not in ("", STEP):
            return f"has not arrived; it waits in {report['operation']}, its collective number {report['number']}"
        where = "in the computation of a step" if report["operation"] == STEP else "outside of collectives"
        return f"has not arrived; it is {where}, after {report['number']} of them"


def stack_event(collective_log: CollectiveLog) -> Event:
    """Return the event with which a rank answers when the coordinator asks for its current operation and stack."""
    return event("stack", **collective_log.describe())


def _shortened(stack: list[str]) -> list[str]:
    """Return the innermost MAX_FRAMES frames, without contextlib's; the outer frames are the same on every rank."""
    return [frame for frame in stack if "/contextlib.py:" not in frame][-MAX_FRAMES:]
