"""Initial weights from a run or a file, for a network that starts training from step 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import Task
from ..storage import Weights, check_values, match, open_weights
from .explain import without_values

if TYPE_CHECKING:
    from .hand import Hand


def check_start(task: Task, source: Weights | None) -> None:
    """Raise if the weights do not fit the network, by names and shapes, before any process is started."""
    if source is None:
        return
    found = open_weights(source.source)
    model = without_values(task)
    if model is not None:
        match(found.shapes, model, source)


def start_from(hand: Hand, source: Weights | None) -> None:
    """Load weights into a hand's network; its weight average starts from their average, where both have one."""
    if source is None:
        return
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
    hand.notice(f"the run starts from {source}")
