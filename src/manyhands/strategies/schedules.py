"""Schedules: the order in which the stages of a pipeline process micro-batches, for all ranks at once.

The interleaved and zero-bubble orders are torch's. All ranks follow one merged list, so that a receiver knows of a
tensor as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""A stage's forward; its backward; the half of backward that other stages wait for; and the other half."""
_TORCH = {"interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}


@dataclass(frozen=True)
class Action:
    """An operation of a stage's rank on a micro-batch."""

    kind: str
    stage: int
    micro: int


def stages_per_rank(schedule: str) -> int:
    """Return how many stages each rank has."""
    return 2 if schedule == "interleaved" else 1


def usable(schedule: str, num_ranks: int, num_micros: int) -> int:
    """Return the largest number of micro-batches, up to the requested one, that a schedule supports.

    >>> usable("1f1b", 4, 7), usable("interleaved", 2, 7)
    (7, 6)
    """
    if schedule not in _TORCH:
        return num_micros
    return next(n for n in range(num_micros, 0, -1) if n % max(1, n // num_ranks) == 0)


def merged(schedule: str, num_ranks: int, num_micros: int) -> list[Action]:
    """Return all actions of a step in one order in which each comes after those it depends on.

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
    """Return the actions of each rank, in order."""
    if schedule in _TORCH:
        return _torchs(_TORCH[schedule], num_ranks, stages_per_rank(schedule), num_micros)
    return [_simple(schedule, rank, num_ranks, num_micros) for rank in range(num_ranks)]


def _simple(schedule: str, rank: int, num_ranks: int, num_micros: int) -> list[Action]:
    """Return GPipe's order, all forwards and then all backwards, or 1F1B's, alternating once the pipeline is full."""
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
    """Return the theoretical idle fraction of a step, for stages of equal duration.

    >>> bubble("1f1b", 4, 12), bubble("interleaved", 4, 12)
    (0.2, 0.1111111111111111)
    """
    idle = (num_ranks - 1) / (num_micros * stages_per_rank(schedule))
    if schedule == "zero-bubble":
        idle /= 3
    return idle / (1 + idle)


def even(rows: int, parts: int) -> list[int]:
    """Split rows into parts whose sizes differ by at most one, none of them empty.

    >>> even(7, 3)
    [3, 2, 2]
    """
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def live(order: Sequence[Action], stage: int) -> int:
    """Return the maximum number of micro-batches that a stage keeps activations of at a time."""
    most = held = 0
    for action in order:
        if action.stage == stage and action.kind in (FORWARD, BACKWARD, INPUTS):
            held += 1 if action.kind == FORWARD else -1
            most = max(most, held)
    return most
