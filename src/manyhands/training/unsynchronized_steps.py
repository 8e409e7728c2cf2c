"""UnsynchronizedSteps: the local SGD steps of a replica since the replicas last synchronized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .hand import Hand

Key = str


@dataclass(frozen=True)
class _Noted:
    """A local SGD step: its loss total, count and stop vote, and the tensors to correct once replicas synchronize."""

    row: Tensor
    loss: Tensor
    good: Tensor | None


class UnsynchronizedSteps:
    """Stores the results of local SGD steps, and corrects them when the replicas synchronize."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._noted: dict[Key, list[_Noted]] = {}
        """Steps by optimizer."""
        self.due: list[Key] = []
        """The optimizers whose parameters are to be synchronized now."""
        self.has_stop_vote = False
        """Whether a replica requested a stop in a step that has been synchronized."""
        self._joined_at = -1

    @property
    def is_apart(self) -> bool:
        """Whether this replica has taken local SGD steps that are not synchronized yet."""
        return self._hand.has_replica and not self._hand.replica.agrees

    def add(self, key: Key, row: Tensor, loss: Tensor, good: Tensor | None) -> None:
        """Store a step of one optimizer."""
        if good is not None:
            # A replica that skipped the step adds no samples to the mean; its stop vote still counts.
            row[:2] = torch.where(good, row[:2], torch.zeros_like(row[:2]))
        self._noted.setdefault(key, []).append(_Noted(row, loss, good))
        if self._hand.replica.note(key, row):
            self.due.append(key)

    def meet(self) -> None:
        """Synchronize the optimizers that are due, and average their losses since the last time."""
        due, self.due = self.due, []
        for key in due:
            self._hand.replica.meet(key)
            noted = self._noted.pop(key, [])
            for step in noted:
                step.loss.copy_(step.row[0] / step.row[1])
                if step.good is not None:
                    step.good.copy_(step.row[1] > 0)
            self.has_stop_vote = self.has_stop_vote or (bool(noted) and bool(noted[-1].row[2] > 0))

    def agree(self) -> None:
        """Synchronize parameters and optimizer state over all replicas, under policies where they diverge."""
        hand = self._hand
        if not hand.replica.is_local_sgd or (hand.replica.agrees and self._joined_at == hand.num_steps):
            return
        self.due = list(hand.replica.groups)
        self.meet()
        hand.replica.join(() if hand.averages is None else hand.averages.tensors.values())
        self._joined_at = hand.num_steps

    def forget(self) -> None:
        """Discard the steps, because an earlier state is restored."""
        self._noted.clear()
