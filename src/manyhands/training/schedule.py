"""The learning rate schedule."""

from __future__ import annotations

from torch import Tensor

from ..core import Task, groups_of
from .hand import Hand


def follow_schedule(hand: Hand, task: Task, total: int | None, before: float | None = None) -> float | None:
    """Set the learning rates of the next step, unless its factor equals `before`; return the factor."""
    if task.schedule is None:
        return None
    assert total is not None
    factor = task.schedule(hand.num_steps, total)
    if factor == before:
        return factor
    for optimizer in hand.optimizers.values():
        for group in groups_of(optimizer):
            base = group.setdefault("initial_lr", float(group["lr"]))
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
    return factor
