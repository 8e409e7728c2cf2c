"""Reader of one replica's part of every global batch, in the training process or in a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from .batch import Batch, Cursor
from .batch_split import ReplicaShare, share_of
from .order import Ids
from .source import Source, Window


@dataclass(frozen=True)
class ReplicaReader:
    """One replica's view of a source: the global batches in order, and the rows of them that the replica reads."""

    source: Source
    batch_size: int
    seed: int
    shuffle: bool
    replica: int
    num_replicas: int
    accumulate: int
    weights: tuple[int, ...] | None = None
    """The replicas' shares of a batch, in proportion; None for equal shares."""

    def windows(self, cursor: Cursor) -> Iterator[Window]:
        """Yield the global batches from the cursor to the end of its epoch, without reading them."""
        windows = self.source.windows(
            seed=self.seed,
            epoch=cursor.epoch,
            shuffle=self.shuffle,
            start=cursor.position,
            batch_size=self.batch_size,
        )
        for window in windows:
            if self.source.drop_last and len(window.ids) < self.batch_size:
                return
            yield window

    def share(self, window: Window) -> ReplicaShare:
        """Return this replica's part of a global batch."""
        return share_of(len(window.ids), self.accumulate, self.replica, self.num_replicas, self.weights)

    def wanted(self, window: Window) -> Ids:
        """Return the ids of this replica's samples, or of one padding row if the replica has none."""
        ids = window.ids[self.share(window).rows]
        return ids if len(ids) else window.ids[:1]

    def batch(self, window: Window, cursor: Cursor) -> Batch:
        """Read this replica's part of a global batch, on the host."""
        share = self.share(window)
        return Batch(window.fetch(self.wanted(window)), share.sizes, share.global_sizes, window.ids[share.rows], cursor)

    def read(self, cursor: Cursor, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """Read and yield this replica's batches number first, first + step, ..., counted from the cursor."""
        position = cursor.position
        for number, window in zip(count(), self.windows(cursor)):
            position += len(window.ids)
            if number % step == first:
                yield self.batch(window, Cursor(cursor.epoch, position))
