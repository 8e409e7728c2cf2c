"""Hangs: when a rank has waited too long, what every rank is doing, and who has not arrived, in one report."""

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
"""The part of the time limit after which an operation stands still."""
ANSWER_SECONDS = 2.0
"""How long a rank may take to say where it is; one that is frozen never does."""
CROSSED_SECONDS = 2.0
"""How long every rank must have stood where it is, for one of them has stood too long already."""
MAX_FRAMES = 12
STEP = "a step"
_ALONE = ("", STEP, "send", "receive")
"""What a rank does that needs not all of the others."""


class CollectiveListener(Protocol):
    """Who wants to know when a rank begins and ends to wait in a collective."""

    def begin(self, name: str) -> None:
        """It begins."""

    def leave(self) -> None:
        """It has ended."""


class Diary:
    """What a rank is doing: the operation, since when, and how many collectives it has begun."""

    def __init__(self) -> None:
        self.spans: CollectiveListener | None = None
        """Where waiting is noted, while a step is timed."""
        self.operation, self.since, self.number = "", time.monotonic(), 0
        self.thread = threading.get_ident()

    def begin(self, operation: str) -> str:
        """A collective begins; what `end` takes."""
        before = self.operation
        if self.spans is not None and threading.get_ident() == self.thread:
            self.spans.begin("communication")
        self.operation, self.since, self.number = operation, time.monotonic(), self.number + 1
        return before

    def end(self, before: str) -> None:
        """It has ended, and the rank goes on with what it did before."""
        if self.spans is not None and threading.get_ident() == self.thread:
            self.spans.leave()
        self.operation, self.since = before, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """It waits for another rank, in no collective."""
        before, self.operation, self.since = self.operation, operation, time.monotonic()
        try:
            yield
        finally:
            self.operation, self.since = before, time.monotonic()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, with what computes and what waits in it."""
        self.operation, self.since = STEP, time.monotonic()
        try:
            yield
        finally:
            self.operation = ""

    def told(self) -> dict[str, Any]:
        """All of it, with the stack of the thread that computes."""
        seconds = time.monotonic() - self.since if self.operation else 0.0
        frames = traceback.extract_stack(sys._current_frames().get(self.thread))
        stack = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
        return {"operation": self.operation, "seconds": seconds, "number": self.number, "stack": stack}


class Watchman:
    """A thread beside a rank that reports when an operation stands still, once for each."""

    def __init__(self, diary: Diary, seconds: float, report: Callable[[Event], None]) -> None:
        self._diary, self._seconds, self._report = diary, seconds, report
        self._over = threading.Event()
        self._told = -1
        threading.Thread(target=self._watch, name="manyhands-watchman", daemon=True).start()

    def close(self) -> None:
        """The rank has left; nobody waits any more."""
        self._over.set()

    def _watch(self) -> None:
        diary = self._diary
        while not self._over.wait(self._seconds / 4):
            stands = diary.operation and time.monotonic() - diary.since > self._seconds
            if stands and diary.number != self._told:
                self._told = diary.number
                self._report(event("stalled", **diary.told()))


@dataclass
class HangReport:
    """What ranks answered when they were asked where they are."""

    number: int
    """Of the collective that stands still."""
    size: int
    began: float = field(default_factory=time.monotonic)
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether everybody has answered, or had the time to."""
        return len(self.answers) >= self.size or time.monotonic() > self.began + ANSWER_SECONDS

    @property
    def crossed(self) -> str:
        """Who stands where, if no rank can ever go on because they are in collectives that do not fit; else nothing.

        Between two ranks sending and receiving do fit.
        """
        every = sorted(self.answers.items())
        stand = all(told["operation"] not in _ALONE and told["seconds"] > CROSSED_SECONDS for _, told in every)
        names = {told["operation"] for _, told in every}
        if len(every) < self.size or not stand or len(names) == 1:
            return ""
        return ", ".join(f"rank {rank} in {told['operation']}" for rank, told in every)

    def text(self, hosts: Mapping[int, str]) -> str:
        """The report: first who has not arrived, then who waits, each with its stack.

        >>> waits = {"operation": "all_reduce", "seconds": 9.0, "number": 7, "stack": ["a.py:1 in f: f()"]}
        >>> works = {"operation": "", "seconds": 0.0, "number": 6, "stack": ["a.py:2 in g: sleep()"]}
        >>> print(HangReport(7, 2, answers={0: waits, 1: works}).text({0: "host1", 1: "host2"}))
        rank 0 has waited 9 s in all_reduce for rank 1
          rank 1 on host2 has not arrived; it is outside of collectives, after 6 of them
            a.py:2 in g: sleep()
          rank 0 on host1 waits in all_reduce, its collective number 7
            a.py:1 in f: f()
        """
        waiting = {rank: told for rank, told in self.answers.items() if self._waits(told)}
        late = [rank for rank in hosts if rank not in waiting]
        lines = [self._headline(waiting, late)]
        for rank in [*late, *waiting]:
            told = self.answers.get(rank)
            lines.append(f"  rank {rank} on {hosts[rank]} {self._said(told)}")
            lines += [f"    {frame}" for frame in _shortened(told["stack"])] if told is not None else []
        return "\n".join(lines)

    def _waits(self, told: Mapping[str, Any]) -> bool:
        return told["operation"] not in ("", STEP) and told["number"] >= self.number

    def _headline(self, waiting: Mapping[int, Mapping[str, Any]], late: list[int]) -> str:
        if not waiting:
            return "a step stands still, and nobody waits in a collective of ours"
        rank, told = max(waiting.items(), key=lambda item: item[1]["seconds"])
        for_whom = f" for rank {', '.join(map(str, late))}" if late else ", though all ranks are in it"
        return f"rank {rank} has waited {told['seconds']:.0f} s in {told['operation']}{for_whom}"

    def _said(self, told: Mapping[str, Any] | None) -> str:
        if told is None:
            return "does not answer: it is frozen, or in code that never lets other threads run"
        if self._waits(told):
            return f"waits in {told['operation']}, its collective number {told['number']}"
        if told["operation"] not in ("", STEP):
            return f"has not arrived; it waits in {told['operation']}, its collective number {told['number']}"
        where = "in the computation of a step" if told["operation"] == STEP else "outside of collectives"
        return f"has not arrived; it is {where}, after {told['number']} of them"


def answer(diary: Diary) -> Event:
    """What a rank says when it is asked where it is."""
    return event("stack", **diary.told())


def _shortened(stack: list[str]) -> list[str]:
    """The innermost frames: how a rank came to run the program is the same everywhere, and so is the plumbing."""
    return [frame for frame in stack if "/contextlib.py:" not in frame][-MAX_FRAMES:]
