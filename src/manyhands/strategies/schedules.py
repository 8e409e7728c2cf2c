"""Schedules: the order in which the stages of a pipeline take microbatches, for all ranks at once.

The interleaved and zero-bubble orders are torch's own. All ranks walk through one merged list, so that whoever is to
receive something knows it as soon as it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""A stage's forward; its backward; the half of it that others wait for; and the other half."""
_TORCH = {"interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}


@dataclass(frozen=True)
class Action:
    """Something that the rank of a stage does with a microbatch."""

    kind: str
    stage: int
    micro: int


def stages_per_rank(schedule: str) -> int:
    """How many stages each rank has."""
    return 2 if schedule == "interleaved" else 1


def usable(schedule: str, num_ranks: int, num_micros: int) -> int:
    """The largest number of microbatches, up to the one asked for, that a schedule can be made for.

    >>> usable("1f1b", 4, 7), usable("interleaved", 2, 7)
    (7, 6)
    """
    if schedule not in _TORCH:
        return num_micros
    return next(n for n in range(num_micros, 0, -1) if n % max(1, n // num_ranks) == 0)


def merged(schedule: str, num_ranks: int, num_micros: int) -> list[Action]:
    """All actions of a step in one order in which each comes after what it needs.

    >>> [f"{a.kind}{a.stage}{a.micro}" for a in merged("1f1b", 2, 2)]
    ['F00', 'F01', 'F10', 'B10', 'B00', 'F11', 'B11', 'B01']
    """
    orders = per_rank(schedule, num_ranks, num_micros)
    num_stages = num_ranks * stages_per_rank(schedule)
    done: set[tuple[str, int, int]] = set()
    sequence: list[Action] = []
    places = [0] * num_ranks
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        fresh = []
        for rank, order in enumerate(orders):
            if places[rank] < len(order) and _is_ready(order[places[rank]], done, num_stages):
                fresh.append(order[places[rank]])
                places[rank] += 1
        assert fresh, "a schedule whose actions wait for each other"
        sequence += fresh
        done |= {("B" if a.kind == INPUTS else a.kind, a.stage, a.micro) for a in fresh}
    return sequence


def _is_ready(action: Action, done: set[tuple[str, int, int]], num_stages: int) -> bool:
    stage, micro = action.stage, action.micro
    if action.kind == FORWARD:
        return stage == 0 or (FORWARD, stage - 1, micro) in done
    if action.kind == WEIGHTS:
        return (BACKWARD, stage, micro) in done
    return (FORWARD, stage, micro) in done and (stage == num_stages - 1 or (BACKWARD, stage + 1, micro) in done)


def per_rank(schedule: str, num_ranks: int, num_micros: int) -> list[list[Action]]:
    """What each rank does, in order."""
    if schedule in _TORCH:
        return _torchs(_TORCH[schedule], num_ranks, stages_per_rank(schedule), num_micros)
    return [_simple(schedule, rank, num_ranks, num_micros) for rank in range(num_ranks)]


def _simple(schedule: str, rank: int, num_ranks: int, num_micros: int) -> list[Action]:
    """GPipe: all forwards, then all backwards; 1F1B: one of each in turns, once the pipeline is full."""
    ahead = num_micros if schedule == "gpipe" else min(num_micros, num_ranks - rank)
    actions = [Action(FORWARD, rank, micro) for micro in range(ahead)]
    for micro in range(num_micros):
        actions.append(Action(BACKWARD, rank, micro))
        if ahead + micro < num_micros:
            actions.append(Action(FORWARD, rank, ahead + micro))
    return actions


def _torchs(name: str, num_ranks: int, each: int, num_micros: int) -> list[list[Action]]:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_ranks * each,
            group_size=num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_ranks * each - 1,
            submod=None,
        )
        for index in range(0, num_ranks * each, num_ranks)
    ]
    order = get_schedule_class(name)(stages, num_micros).pipeline_order
    return [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order[rank] if a is not None]
        for rank in range(num_ranks)
    ]


def bubble(schedule: str, num_ranks: int, num_micros: int) -> float:
    """The share of a step that a rank is idle by the formula, where all stages take equally long.

    >>> bubble("1f1b", 4, 12), bubble("interleaved", 4, 12)
    (0.2, 0.1111111111111111)
    """
    idle = (num_ranks - 1) / (num_micros * stages_per_rank(schedule))
    if schedule == "zero-bubble":
        idle /= 3
    return idle / (1 + idle)


def even(rows: int, parts: int) -> list[int]:
    """So many rows in parts that differ by one at most, none of them empty.

    >>> even(7, 3)
    [3, 2, 2]
    """
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def live(order: Sequence[Action], stage: int) -> int:
    """The most microbatches of which a stage keeps something at a time."""
    most = held = 0
    for action in order:
        if action.stage == stage and action.kind in (FORWARD, BACKWARD, INPUTS):
            held += 1 if action.kind == FORWARD else -1
            most = max(most, held)
    return most
