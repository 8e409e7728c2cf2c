"""Pipeline schedules, executed symbolically: how long a step takes, and how many micro-batches a stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from .simulate import Turn, run

Action = tuple[str, int]
MOST_ACTIONS = 1024
"""Beyond so many actions the closed form is used, which is exact where stages are equal."""


def orders(schedule: str, stages: int, micros: int) -> list[list[Action]]:
    """What each stage does, one after another.

    >>> orders("1f1b", 2, 2)[1]
    [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    if schedule == "gpipe":
        every = [("forward", i) for i in range(micros)] + [("backward", i) for i in range(micros)]
        return [every for _ in range(stages)]
    return [_one_each(min(micros, stages - stage - 1), micros) for stage in range(stages)]


def _one_each(ahead: int, micros: int) -> list[Action]:
    """So many forwards first, then one forward and one backward by turns."""
    actions: list[Action] = [("forward", i) for i in range(ahead)]
    for i in range(micros - ahead):
        actions += [("forward", ahead + i), ("backward", i)]
    return actions + [("backward", i) for i in range(micros - ahead, micros)]


def makespan(
    forward: Sequence[float], backward: Sequence[float], sending: float, micros: int, schedule: str = "1f1b"
) -> float:
    """Seconds from the first forward to the last backward.

    >>> makespan([1.0, 1.0], [2.0, 2.0], 0.0, 4)
    15.0
    """
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


def in_flight(schedule: str, stage: int, stages: int, micros: int) -> int:
    """Micro-batches whose activations a stage holds at the most.

    >>> in_flight("1f1b", 0, 4, 16), in_flight("gpipe", 0, 4, 16)
    (4, 16)
    """
    return micros if schedule == "gpipe" else min(micros, stages - stage)


def cut(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut a row of pieces into stages so that the slowest is as fast as possible: the first piece of each.

    >>> cut([1, 1, 1, 3], 2)
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
    while len(starts) < stages:  # every stage has a piece: the longest ones are cut again
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
