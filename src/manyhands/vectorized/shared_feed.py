"""Data feed of stacked networks: sample ids of the next steps, for each network in the order of training it alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Task
from ..data import Cursor, IndexedSource, Orders, Resident, as_source, check_source, in_memory
from .member import VectorizedMember

MAX_ROUNDS = 64
"""Maximum number of rounds whose sample ids are computed at a time; a round is a step of all members."""
MAX_IDS = 1 << 22
"""Maximum number of sample ids that are computed at a time."""
Passes = tuple[tuple[int, int], ...]
"""For each member, the seed of its sample order and its epoch."""


@dataclass(frozen=True)
class Block:
    """The sample ids of consecutive rounds (steps of all members), in which all batches have the same size."""

    ids: Tensor
    """The sample ids, by round, member and position in the batch."""
    shared: bool
    """Whether all members have the same samples in each round."""

    @property
    def num_rounds(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class _Named:
    """The sample ids of rounds, and the positions from which they were computed.

    There is only one entry per round if all members have the same samples.
    """

    passes: Passes
    starts: tuple[int, ...]
    """For each member, the position of its first sample in the epoch."""
    size: int
    """Batch size."""
    ids: Tensor
    """The sample ids, by round, member and position in the batch."""

    def without(self, num_rounds: int) -> _Named | None:
        """Return the rounds after the first `num_rounds`; None if there are none."""
        if num_rounds == len(self.ids):
            return None
        starts = tuple(start + num_rounds * self.size for start in self.starts)
        return dataclasses.replace(self, starts=starts, ids=self.ids[num_rounds:])


_NOBODY = torch.empty(0, dtype=torch.int64)


def most_rounds(num_ids: int) -> int:
    """Return the maximum number of rounds, each with `num_ids` samples of all members, to prepare at a time."""
    return max(1, min(MAX_ROUNDS, MAX_IDS // num_ids))


class SharedFeed:
    """The training data that stacked networks (members) share, and the sample ids of their next steps."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype | None) -> None:
        source = as_source(task.data, collate=task.collate)
        assert isinstance(source, IndexedSource)
        self._shuffle = task.shuffle if source.shuffle is None else source.shuffle
        self._device, self._size, self._drops = device, source.size, source.drop_last
        self.batch_size = check_source(source, task.batch_size)
        self.data = Resident(in_memory(source), device, dtype)
        whole, rest = divmod(self._size, self.batch_size)
        self.num_steps = whole + bool(rest and not self._drops)
        """Number of steps in an epoch."""
        self._known: tuple[Passes, Orders] | None = None
        self._ahead: _Named | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def next_size(self, cursor: Cursor) -> int:
        """Return the number of samples in the next batch of a member with this cursor."""
        return min(self.batch_size, self._size - cursor.position)

    def rounds_of_one_size(self, cursor: Cursor) -> int:
        """Return the number of batches until the end of the cursor's epoch that have the size of the next batch."""
        return max(1, (self._size - cursor.position) // self.batch_size)

    def block(self, members: Sequence[VectorizedMember], most: int) -> Block:
        """Return the sample ids of at most `most` next rounds of members whose next batches have the same size."""
        wanted, most = self._wanted(members, most)
        named = self._ahead
        if named is None or (named.passes, named.starts, named.size) != (wanted.passes, wanted.starts, wanted.size):
            named = self._name(wanted, most)
        ids = named.ids[:most]
        if self._stream is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            ids.record_stream(here)
        self._ahead = named.without(len(ids))
        return Block(ids.expand(-1, len(members), -1).contiguous(), shared=ids.shape[1] < len(members))

    def prepare(self, members: Sequence[VectorizedMember]) -> None:
        """Start to compute the sample ids of later rounds on a side stream of the GPU, while it runs other rounds.

        On a GPU, computing sample ids takes longer than a round. On a CPU this does nothing.
        """
        if self._stream is None or len({self.next_size(member.cursor) for member in members}) > 1:
            return
        wanted, most = self._wanted(members, MAX_ROUNDS)
        if self._ahead is None or (self._ahead.passes, self._ahead.starts) != (wanted.passes, wanted.starts):
            self._ahead = self._name(wanted, most)

    def _wanted(self, members: Sequence[VectorizedMember], most: int) -> tuple[_Named, int]:
        """Return the epochs and positions of the members' next samples, whose ids are not computed yet.

        Also return the number of rounds to prepare, at most `most`.
        """
        size = self.next_size(members[0].cursor)
        most = min(most, most_rounds(size * len(members)))
        num_rounds = min(most, *(self.rounds_of_one_size(member.cursor) for member in members))
        passes = tuple((member.task.seed if self._shuffle else 0, member.cursor.epoch) for member in members)
        starts = tuple(member.cursor.position for member in members)
        keys = [(*key, start) for key, start in zip(passes, starts, strict=True)]
        if len({key if self._shuffle else key[2] for key in keys}) == 1:
            passes, starts = passes[:1], starts[:1]
        return _Named(passes, starts, size, _NOBODY), num_rounds

    def _name(self, wanted: _Named, num_rounds: int) -> _Named:
        # Sample orders depend on no other computation, so their stream need not wait for another stream.
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            orders = self._orders_of(wanted.passes)
            first = torch.tensor(wanted.starts, dtype=torch.int64).to(self._device).unsqueeze(1)
            ids = orders[first + torch.arange(num_rounds * wanted.size, device=self._device)]
        ids = ids.view(len(wanted.starts), num_rounds, wanted.size).transpose(0, 1)
        return dataclasses.replace(wanted, ids=ids)

    def _orders_of(self, passes: Passes) -> Orders:
        """Return the sample orders for these seeds and epochs, cached, because building their tables takes long."""
        if self._known is None or self._known[0] != passes:
            self._known = passes, Orders(self._size, passes, shuffle=self._shuffle, device=self._device)
        return self._known[1]

    def advance(self, members: Sequence[VectorizedMember], num_rounds: int) -> None:
        """Advance the cursors of members by `num_rounds` rounds of a block; at an epoch's end, into the next epoch."""
        for member in members:
            member.cursor = self._after(member.cursor, num_rounds)

    def _after(self, cursor: Cursor, num_rounds: int) -> Cursor:
        position = min(self._size, cursor.position + num_rounds * self.batch_size)
        left = self._size - position
        is_over = left == 0 or (self._drops and left < self.batch_size)
        return Cursor(cursor.epoch + 1) if is_over else Cursor(cursor.epoch, position)
