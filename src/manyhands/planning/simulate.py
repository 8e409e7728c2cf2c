"""Small deterministic discrete-event simulator: tasks that wait for other tasks and for a resource."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A task that takes time on one resource, after others have ended."""

    name: Hashable
    where: Hashable
    seconds: float
    after: tuple[Hashable, ...] = ()
    lag: float = 0.0
    """Seconds between the end of the last dependency and the earliest start, such as a message in flight."""


def run(turns: Sequence[Turn]) -> dict[Hashable, float]:
    """Return when each task ends. A resource runs its tasks in the given order; resources are independent.

    >>> run([Turn("a", "x", 1.0), Turn("b", "y", 2.0, after=("a",)), Turn("c", "x", 1.0)])["b"]
    3.0
    """
    queues: dict[Hashable, list[Turn]] = {}
    for turn in turns:
        queues.setdefault(turn.where, []).append(turn)
    heads = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0.0)
    ends: dict[Hashable, float] = {}
    waiting: dict[Hashable, list[Hashable]] = {}
    ready = [(0.0, index, where) for index, where in enumerate(queues)]
    numbers = {where: index for index, where in enumerate(queues)}
    heapq.heapify(ready)
    while ready:
        _, _, where = heapq.heappop(ready)
        while heads[where] < len(queues[where]):
            turn = queues[where][heads[where]]
            missing = next((name for name in turn.after if name not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(where)
                break
            begin = max([free[where], *(ends[name] + turn.lag for name in turn.after)])
            ends[turn.name] = free[where] = begin + turn.seconds
            heads[where] += 1
            for other in waiting.pop(turn.name, ()):
                heapq.heappush(ready, (ends[turn.name], numbers[other], other))
    assert len(ends) == len(turns), "turns that wait for each other"
    return ends
