"""Course: which samples every member learns from in the rounds to come, each in the order that its task alone has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Task
from ..data import Cursor, IndexedSource, Orders, Resident, as_source, check_source, in_memory
from .member import Member

MAX_ROUNDS = 64
MAX_IDS = 1 << 22
"""Samples that are named at a time."""


@dataclass(frozen=True)
class Block:
    """Some rounds in which all members have batches of one size."""

    ids: Tensor
    """By round, member and sample."""
    shared: bool
    """Whether all members have the same samples."""

    @property
    def num_rounds(self) -> int:
        return len(self.ids)


def most_rounds(num_ids: int) -> int:
    """Rounds of so many samples that are prepared at a time."""
    return max(1, min(MAX_ROUNDS, MAX_IDS // num_ids))


class Course:
    """The way through the data of tasks that have it in common."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype | None) -> None:
        source = as_source(task.data, collate=task.collate)
        assert isinstance(source, IndexedSource)
        self._shuffle = task.shuffle if source.shuffle is None else source.shuffle
        self._device, self._size, self._drops = device, source.size, source.drop_last
        self.batch_size = check_source(source, task.batch_size)
        self.data = Resident(in_memory(source), device, dtype)
        whole, rest = divmod(self._size, self.batch_size)
        self.num_steps = whole + bool(rest and not self._drops)
        """Batches of a pass."""
        self._known: tuple[tuple[tuple[int, int], ...], Orders] | None = None

    def next_size(self, cursor: Cursor) -> int:
        """Samples of the batch that comes next."""
        return min(self.batch_size, self._size - cursor.position)

    def rounds_of_one_size(self, cursor: Cursor) -> int:
        """How many batches of the next one's size follow each other in this pass."""
        return max(1, (self._size - cursor.position) // self.batch_size)

    def block(self, members: Sequence[Member], most: int) -> Block:
        """The next rounds of members whose next batches have the same size; at most so many."""
        size = self.next_size(members[0].cursor)
        most = min(most, most_rounds(size * len(members)))
        num_rounds = min(most, *(self.rounds_of_one_size(member.cursor) for member in members))
        passes = [(member.task.seed if self._shuffle else 0, member.cursor.epoch) for member in members]
        starts = [member.cursor.position for member in members]
        keys = [(*key, start) for key, start in zip(passes, starts, strict=True)]
        shared = len({key if self._shuffle else key[2] for key in keys}) == 1
        if shared:
            passes, starts = passes[:1], starts[:1]
        orders = self._orders_of(tuple(passes))
        first = torch.tensor(starts, dtype=torch.int64).to(self._device).unsqueeze(1)
        ids = orders[first + torch.arange(num_rounds * size, device=self._device)]
        ids = ids.view(len(starts), num_rounds, size).transpose(0, 1)
        return Block(ids.expand(num_rounds, len(members), size).contiguous(), shared)

    def _orders_of(self, passes: tuple[tuple[int, int], ...]) -> Orders:
        """Kept from one block to the next: their tables take longer to make than samples to be named by them."""
        if self._known is None or self._known[0] != passes:
            self._known = passes, Orders(self._size, passes, shuffle=self._shuffle, device=self._device)
        return self._known[1]

    def after(self, cursor: Cursor, num_rounds: int) -> Cursor:
        """Where a member stands after so many rounds of one block; at the end of a pass the next one begins."""
        position = min(self._size, cursor.position + num_rounds * self.batch_size)
        left = self._size - position
        is_over = left == 0 or (self._drops and left < self.batch_size)
        return Cursor(cursor.epoch + 1) if is_over else Cursor(cursor.epoch, position)
