"""Starting from what was learned before: the weights of a run or of a file, in a network that begins anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..core import Task, random_state, restore_random_state
from ..store import Weights, check_values, match, open_weights

if TYPE_CHECKING:
    from .hand import Hand


def check_start(task: Task, source: Weights) -> None:
    """Refuses weights of another network before any process is started, from names and shapes alone."""
    found = open_weights(source.source)
    model = _without_values(task)
    if model is not None:
        match(found.shapes, model, source)


def start_from(hand: Hand, source: Weights) -> None:
    """Puts weights into a hand's network; the average goes on from their average, where both have one."""
    found = open_weights(source.source)
    matched = match(found.shapes, hand.model, source)
    tensors, averages = found.load()
    averaged = matched.renamed({**tensors, **averages})
    check_values(averaged, hand.model)
    hand.replica.load(averaged, strict=False)
    if hand.averages is not None:
        hand.averages.restart()
        hand.replica.load(matched.renamed(tensors), strict=False)
    for text in matched.notices:
        hand.notice(text)
    hand.notice(f"starts from {source}")


def _without_values(task: Task) -> nn.Module | None:
    """The task's network on the meta device; None where it cannot be built so, and is looked at once it is built."""
    states = random_state(torch.device("cpu"))
    try:
        with torch.device("meta"):
            return task.model()
    except Exception:
        return None
    finally:
        restore_random_state(states, torch.device("cpu"))
