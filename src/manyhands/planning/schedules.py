"""Simulation of pipeline schedules: the time of a step, the micro-batches that a stage holds, and balanced stages."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Action = tuple[str, int]
CHUNKS = {"interleaved": 2}
"""Number of stages that each rank has, by schedule; 1 for others."""
IDLE = {"interleaved": 1 / 2, "zero-bubble": 1 / 3}
"""Bubble of a schedule, relative to that of 1f1b with the same ranks and micro-batches."""
MOST_ACTIONS = 1024
"""Number of actions above which a formula replaces the simulation; it is exact if all stages take the same time."""


def orders(schedule: str, stages: int, micros: int) -> list[list[Action]]:
    """Return the actions of each pipeline stage, in order: forward or backward, and the micro-batch.

    >>> orders("1f1b", 2, 2)[1]
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    if schedule == "gpipe":
        every = [("forward", i) for i in range(micros)] + [("backward", i) for i in range(micros)]
        return [every for _ in range(stages)]
    return [_one_each(min(micros, stages - stage - 1), micros) for stage in range(stages)]


def _one_each(ahead: int, micros: int) -> list[Action]:
    """Return a stage's actions under 1f1b: `ahead` forwards, then forwards and backwards in turn, then backwards."""
    actions: list[Action] = [("forward", i) for i in range(ahead)]
    for i in range(micros - ahead):
        actions += [("forward", ahead + i), ("backward", i)]
    return actions + [("backward", i) for i in range(micros - ahead, micros)]


def makespan(
    forward: Sequence[float], backward: Sequence[float], sending: float, micros: int, schedule: str = "1f1b"
) -> float:
    """Return the seconds from the start of the first forward to the end of the last backward of a pipeline.

    Args:
        forward: Seconds of one micro-batch's forward, by stage.
        backward: Seconds of one micro-batch's backward, by stage.
        sending: Seconds to send activations or gradients to the next stage.
        micros: Number of micro-batches.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".

    >>> makespan([1.0, 1.0], [2.0, 2.0], 0.0, 4), makespan([1.0, 1.0], [2.0, 2.0], 0.0, 4, "interleaved")
    (15.0, 13.5)
    """
    if schedule in IDLE:
        busy = micros * max(f + b for f, b in zip(forward, backward, strict=True))
        return busy + IDLE[schedule] * (makespan(forward, backward, sending, micros) - busy)
    stages = len(forward)
    if 2 * stages * micros > MOST_ACTIONS:
        each = [f + b for f, b in zip(forward, backward, strict=True)]
        return sum(each) + 2 * sending * (stages - 1) + (micros - 1) * max(each)
    turns = []
    for stage, actions in enumerate(orders(schedule, stages, micros)):
        for kind, micro in actions:
            before = stage - 1 if kind == "forward" else stage + 1
            after = ((kind, before, micro),) if 0 <= before < stages else ()
            seconds = forward[stage] if kind == "forward" else backward[stage]
            turns.append(Turn((kind, stage, micro), stage, seconds, after, sending))
    return max(run(turns).values())


def in_flight(schedule: str, stage: int, stages: int, micros: int) -> float:
    """Return the maximum number of micro-batches whose activations a pipeline stage holds at a time.

    >>> in_flight("1f1b", 0, 4, 16), in_flight("gpipe", 0, 4, 16), in_flight("interleaved", 0, 4, 16)
    (4, 16, 5.5)
    """
    if schedule == "gpipe":
        return micros
    if schedule == "1f1b":
        return min(micros, stages - stage)
    chunks = CHUNKS.get(schedule, 1)
    return min(micros, ((chunks - 1) * stages + 2 * (stages - stage) - 1) / chunks)


def split_stages(costs: Sequence[float], stages: int) -> list[int]:
    """Partition a sequence into stages so that the most expensive stage is as cheap as possible.

    Return the index of the first element of each stage. `costs` has the cost of each element.

    >>> split_stages([1, 1, 1, 3], 2)
    [0, 3]
    """
    low, high = max(max(costs), sum(costs) / stages), sum(costs)
    for _ in range(40):
        middle = (low + high) / 2
        if len(_filled(costs, middle)) <= stages:
            high = middle
        else:
            low = middle
    starts = _filled(costs, high)
    while len(starts) < stages:  # split the longest stages, so that there are as many as requested
        lengths = [(end - start, start) for start, end in zip(starts, [*starts[1:], len(costs)], strict=True)]
        length, start = max(lengths)
        starts = sorted([*starts, start + length // 2])
    return starts


def _filled(costs: Sequence[float], most: float) -> list[int]:
    starts, total = [0], 0.0
    for index, cost in enumerate(costs):
        if total + cost > most * (1 + 1e-9) and total > 0:
            starts.append(index)
            total = 0.0
        total += cost
    return starts


@dataclass(frozen=True)
class Turn:
    """A task of the simulation, which occupies the resource `where` for `seconds` once the tasks in `after` ended."""

    name: Hashable
    where: Hashable
    seconds: float
    after: tuple[Hashable, ...] = ()
    lag: float = 0.0
    """Seconds between the end of the last dependency and the earliest start, such as a message in flight."""


def run(turns: Sequence[Turn]) -> dict[Hashable, float]:
    """Simulate tasks; return the time in seconds at which each one ends, by name.

    A resource runs its tasks in the given order. Different resources run in parallel.

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
