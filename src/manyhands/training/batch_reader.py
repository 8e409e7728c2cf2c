"""BatchReader: a replica's position in each dataset, its current batch, and the micro-batches of that batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core import TaskError, mix, seed_all
from ..data import Batch, Cursor, Feed, as_source, check_source

if TYPE_CHECKING:
    from ..data import Source
    from .hand import Hand

_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True)
class BatchShare:
    """The share of the step's global batch that a micro-batch of this replica is."""

    size: int
    """Samples of this replica; 0 for padding rows, which have no weight."""
    total: int
    """Samples of the whole step, over all replicas and micro-batches."""
    last: bool = True

    @property
    def is_padding(self) -> bool:
        """Whether the micro-batch consists of padding rows, computed only to take part in the collectives."""
        return self.size == 0


class BatchReader:
    """Reads a replica's share of every global batch, and knows which part of the batch is being computed."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.cursors: list[Cursor] = []
        """The read position of each dataset, in order of first use; the first is the training data."""
        self._datasets: dict[Any, tuple[Any, int]] = {}
        self.batch: Batch | None = None
        """The batch that was read last: its samples, their ids and their place in the global batch."""
        self.part = BatchShare(1, hand.size)
        """The share of the step's global batch that the current micro-batch is."""
        self.start = 0
        """The index of the current micro-batch's first sample among this replica's samples."""
        self.random_seed = 0
        """The seed of the run, from which those of batches and optimizers are derived."""

    @property
    def epoch(self) -> int:
        """The current epoch of the training data."""
        return self.cursors[0].epoch if self.cursors else 0

    def seed(self, seed: int) -> None:
        """Seed every generator, differently on each replica."""
        seed_all(mix(seed, self._hand.rank))
        self.random_seed = seed

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        collate: Any = None,
    ) -> Iterator[Any]:
        """Iterate over this replica's share of every global batch: one epoch, or until `epochs` epochs are complete.

        Each call continues where the last one over the same data ended, also after a checkpoint is restored.
        """
        source = as_source(data, collate=collate)
        feed = self.make_feed(source, check_source(source, batch_size), shuffle=shuffle, seed=seed)
        try:
            which = self._which(data)
            last = epochs if epochs is not None else self.cursors[which].epoch + 1
            while self.cursors[which].epoch < last:
                for batch in self.one_epoch(feed, which):
                    yield batch.data
                    if self._hand.current.is_look and self._hand.current.voted_to_stop():
                        return
        finally:
            feed.close()

    def make_feed(
        self, source: Any, batch_size: int, *, shuffle: bool, seed: int = 0, workers: int | None = None
    ) -> Feed:
        """Return a feed of this replica's share of the data."""
        return Feed(
            source,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            replica=self._hand.rank,
            num_replicas=self._hand.size,
            accumulate=self._hand.spec.accumulate,
            device=self._hand.device,
            workers=workers,
            dtype=torch.float64 if self._hand.spec.precision == "fp64" else None,
        )

    def one_epoch(self, feed: Feed, which: int = 0) -> Iterator[Batch]:
        """Yield the batches of a dataset from its cursor to the end of the epoch, and advance the cursor."""
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        epoch = self.cursors[which].epoch
        for batch in feed.epoch(self.cursors[which]):
            self.take(batch)
            self.cursors[which] = batch.cursor
            yield batch
        self.cursors[which] = Cursor(epoch=epoch + 1)

    def _which(self, data: Any) -> int:
        """Return a dataset's index in order of first use; a tuple of the same arrays counts as the same dataset."""
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
        _, which = self._datasets.setdefault(tuple(map(id, parts)), (data, len(self._datasets)))
        while len(self.cursors) <= which:
            self.cursors.append(Cursor())
        return which

    def take(self, batch: Batch) -> None:
        """Make this the current batch, by which losses are weighted."""
        self.batch = batch
        self.part = BatchShare(batch.num_samples, batch.global_samples)
        self.draw_for(batch)
        if self._hand.has_replica:
            self._begin_part()

    def _begin_part(self) -> None:
        """Prepare the replica and its buffers for the next micro-batch; must run before its forward pass."""
        self._hand.replica.set_padding(self.part.is_padding)
        if self._hand.replica.buffers.rules:
            self._hand.replica.buffers.begin()

    def accumulate(self, batch: Any = None) -> Iterator[Any]:
        """Iterate over the current batch's micro-batches; `backward` on each gives the gradient of the whole batch."""
        current = self.batch
        if current is None or (batch is not None and batch is not current.data):
            raise TaskError(
                "hand.accumulate needs the batch that hand.batches returned last",
                got=type(batch).__name__,
                remedy="pass that batch",
            )
        # `take` has already set the weight of a batch with a single micro-batch.
        is_whole = len(current.sizes) == 1 and self._hand.randomness is None
        return iter((current.data,)) if is_whole else self._micros(current)

    def _micros(self, current: Batch) -> Iterator[Any]:
        num_micros = len(current.sizes)
        self._draw_next()
        for index, (data, size, _) in enumerate(current.micros()):
            self.part = BatchShare(size, current.global_samples, last=index == num_micros - 1)
            self.start = sum(current.sizes[:index])
            self.select(self.start, size)
            self._begin_part()
            yield data
        self.part = BatchShare(current.num_samples, current.global_samples)
        self._draw_next()
        self.start = 0
        self.select(0, current.num_samples)

    def _draw_next(self) -> None:
        if self._hand.randomness is not None:
            self._hand.randomness.begin()

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which layout-free random numbers are drawn, where the strategy is deterministic."""
        return _AS_IT_IS if self._hand.randomness is None else self._hand.randomness.drawing()

    def select(self, start: int, size: int) -> None:
        """Restrict the layout-free random numbers to a range of the batch's samples."""
        if self._hand.randomness is not None:
            self._hand.randomness.select(start, size)

    def peek(self, source: Source, batch_size: int, num_samples: int) -> Any:
        """Return a few of the first samples, without shuffling."""
        with contextlib.closing(self.make_feed(source, batch_size, shuffle=False)) as feed:
            return feed.peek(num_samples)

    def draw_for(self, batch: Batch, salt: int = 0) -> None:
        """Seed the layout-free random numbers by a batch's samples and the step; `salt` selects another stream."""
        if self._hand.randomness is not None:
            self._hand.randomness.load(mix(self.random_seed, salt), self._hand.num_steps, batch.ids)
