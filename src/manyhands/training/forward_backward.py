"""Forward and backward of a step: every micro-batch of a replica's share, at once or through pipeline stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..data import Batch, map_leaves, split
from ..strategies import PipelineReplica
from .hand import Hand
from .loss_totals import BatchShare
from .step_variants import Loss


def compute(hand: Hand, loss: Loss, batch: Batch) -> None:
    """Compute the loss and gradients of every micro-batch."""
    for index, data in enumerate(hand.accumulate(batch.data)):
        if len(batch.sizes) > 1:
            hand.counters.again() if index else hand.counters.begin(hand.model, loss)
        if isinstance(hand.replica, PipelineReplica):
            _compute_in_stages(hand, hand.replica, loss, data)
            continue
        with hand.times.during("forward"), hand.scope():
            value = hand.replica.loss(loss, data)
        hand.backward(value)


def _compute_in_stages(hand: Hand, replica: PipelineReplica, loss: Callable[[Any, Any], Any], data: Any) -> None:
    """Compute the losses of all pipeline micro-batches, weighted by their samples, and their gradients."""
    whole = hand.reader.part
    micros = _PipelineMicros(hand, replica, loss, data)
    replica.run(len(micros.sizes), micros)
    if whole.last:
        replica.buffers.combine()
        hand.current.send(micros.tally)


class _PipelineMicros:
    """The pipeline micro-batches of the data that a replica computes at a time."""

    def __init__(self, hand: Hand, replica: PipelineReplica, loss: Callable[[Any, Any], Any], data: Any) -> None:
        self._hand, self._replica, self._loss, self._total = hand, replica, loss, hand.reader.part.total
        self.sizes = replica.sizes(hand.reader.part.size)
        self._parts = split(data, self.sizes) if len(self.sizes) > 1 else [data]
        self._starts = [hand.reader.start + before for before in accumulate(self.sizes, initial=0)]
        self.tally = hand.current.open_tally()
        if not replica.has_answer:
            self.tally.add(replica.nothing(), BatchShare(0, self._total))

    def loss(self, micro: int) -> Any:
        self._hand.reader.select(self._starts[micro], self.sizes[micro])
        with self._hand.times.during("forward"), self._hand.scope():
            # The loss runs once per stage, and may take things out of the containers that it gets.
            return self._replica.loss(self._loss, map_leaves(lambda leaf: leaf, self._parts[micro]))

    def weigh(self, micro: int, loss: Any) -> Tensor:
        return self.tally.add(loss, BatchShare(self.sizes[micro], self._total))

    @contextlib.contextmanager
    def scope(self, micro: int) -> Iterator[None]:
        self._hand.reader.select(self._starts[micro], self.sizes[micro])
        # Recomputed activations must draw the same random numbers as the first forward pass.
        with self._hand.times.during("backward"), self._hand.reader.drawing():
            yield
