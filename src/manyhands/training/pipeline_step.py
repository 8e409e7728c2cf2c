"""Run a micro-batch through a pipeline, whose stages work on different parts of it at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..data import split
from ..strategies import PipelineReplica
from .hand import Hand
from .loss_totals import BatchShare


def compute_in_stages(hand: Hand, replica: PipelineReplica, loss: Callable[[Any, Any], Any], data: Any) -> None:
    """Compute the losses of all pipeline micro-batches, weighted by their samples, and their gradients."""
    whole = hand.part
    micros = _Micros(hand, replica, loss, data)
    replica.run(len(micros.sizes), micros)
    if whole.last:
        replica.buffers.combine()
        hand.send(micros.tally)


class _Micros:
    """The pipeline micro-batches of the data that a replica computes at a time."""

    def __init__(self, hand: Hand, replica: PipelineReplica, loss: Callable[[Any, Any], Any], data: Any) -> None:
        self._hand, self._replica, self._loss, self._total = hand, replica, loss, hand.part.total
        self.sizes = replica.sizes(hand.part.size)
        self._parts = split(data, self.sizes) if len(self.sizes) > 1 else [data]
        self._starts = [hand.start + before for before in accumulate(self.sizes, initial=0)]
        self.tally = hand.open_tally()
        if not replica.has_answer:
            self.tally.add(replica.nothing(), BatchShare(0, self._total))

    def loss(self, micro: int) -> Any:
        self._hand.select(self._starts[micro], self.sizes[micro])
        with self._hand.during("forward"), self._hand.scope():
            return self._replica.loss(self._loss, self._parts[micro])

    def weigh(self, micro: int, loss: Any) -> Tensor:
        return self.tally.add(loss, BatchShare(self.sizes[micro], self._total))

    @contextlib.contextmanager
    def scope(self, micro: int) -> Iterator[None]:
        self._hand.select(self._starts[micro], self.sizes[micro])
        # Recomputed activations must draw the same random numbers as the first forward pass.
        with self._hand.during("backward"), self._hand.drawing():
            yield
