"""PhaseTimes: how much time a replica spends on what, and the phases of a step that is timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..distributed import World
from ..monitoring import Spans

_UNTIMED = contextlib.nullcontext()


class PhaseTimes:
    """Measures a replica's work other than input, sync and compute, and records phases while a step is timed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seconds = {"optimizer": 0.0, "save": 0.0, "validation": 0.0}
        """Seconds this replica spent on work other than input, sync and compute."""
        self.spans: Spans | None = None
        """Records the phases of a step while that step is timed."""

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the enclosed block to `seconds`; waiting for other replicas counts as sync instead."""
        start, waited = time.perf_counter(), self._world.waited
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start - (self._world.waited - waited)

    def during(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Attribute the enclosed block to this phase of the step, where the step is timed."""
        return _UNTIMED if self.spans is None else self.spans.during(what)
