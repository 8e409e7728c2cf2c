"""Samples of the line of user code that runs while data is read: in `__getitem__`, in `collate`, or below them."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

T = TypeVar("T")
Line = tuple[str, int, str]
"""A file, the number of a line in it, and the function."""

INTERVAL = 0.002
"""Seconds between two samples."""
OWN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Where packages are installed, one of which may hold the dataset."""
STANDARD = (sysconfig.get_path("stdlib"), "<frozen")


class LineSampler:
    """Counts the lines that a function runs in this thread, as another thread sees them a few hundred times a second.

    A call into a library counts for the user's line that made it.
    """

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()

    def during(self, call: Callable[[], T]) -> T:
        """Call a function and count the lines that it runs."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(threading.get_ident(), done), daemon=True)
        watcher.start()
        try:
            return call()
        finally:
            done.set()
            watcher.join()

    def take(self) -> Counter[Line]:
        """Return the counts so far, and start over."""
        taken, self.counts = self.counts, Counter()
        return taken

    def _watch(self, thread: int, done: threading.Event) -> None:
        while not done.wait(INTERVAL):
            line = _line_of(sys._current_frames().get(thread))
            if line is not None:
                self.counts[line] += 1


def sampled(items: Iterator[T], sampler: LineSampler) -> Iterator[T]:
    """Yield the items of an iterator while the lines that produce them are counted."""
    end = object()
    while (item := sampler.during(lambda: next(items, end))) is not end:
        yield item  # type: ignore[misc]


def _line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of user code within `during`; without one, that of an installed package; else None."""
    installed = None
    while frame is not None and (file := frame.f_code.co_filename) != __file__:
        if file.startswith(INSTALLED):
            installed = installed or (None if file.startswith(OWN) else _place(frame))
        elif not file.startswith((*OWN, *STANDARD)):
            return _place(frame)
        frame = frame.f_back
    return installed


def _place(frame: FrameType) -> Line:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
