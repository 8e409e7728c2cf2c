"""CheckpointSchedule: whether a run saves a checkpoint after a step or at the end of an epoch."""

from __future__ import annotations

import math
from pathlib import Path

from .checkpoint_pace import CheckpointPace
from .hand import Hand


class CheckpointSchedule:
    """Decides when a run is saved: as its options say, else as the costs of checkpoints allow."""

    def __init__(
        self, hand: Hand, path: Path, *, save_every: int | None, save_seconds: float, keeps_best: bool
    ) -> None:
        self._hand, self._path = hand, path
        self._save_every, self._save_seconds, self._keeps_best = save_every, save_seconds, keeps_best
        self._pace = CheckpointPace()
        self._best_score = math.inf
        """The lowest score of an epoch so far."""

    def saved(self) -> None:
        """Account for a checkpoint that is being saved now."""
        self._pace.saved()

    def is_midway_due(self) -> bool:
        """Return whether to save after this step: as `save_every` defines, else where too much work is unsaved.

        Local SGD is not saved by time, since its result depends on when the replicas are synchronized.
        """
        hand = self._hand
        if self._save_every:
            return hand.num_steps % self._save_every == 0
        if self._save_seconds or hand.replica.is_local_sgd or not self._pace.is_look(hand.num_steps):
            return False
        forecast = hand.world.gather_objects(self._pace.forecast(hand.num_steps))[0]
        return self._pace.is_overdue(hand.num_steps, *forecast)

    def is_epoch_due(self, score: float | None) -> bool:
        """Return whether the end of this epoch is saved: the best one under patience, and otherwise as costs allow."""
        is_best = score is not None and score < self._best_score
        if is_best:
            assert score is not None
            self._best_score = score
        if self._save_seconds:
            return self._pace.seconds_unsaved >= self._save_seconds
        store = self._hand.checkpoints.store(self._path)
        is_due = self._pace.is_due(self._hand.times.seconds["save"] + store.written_seconds)
        return is_due or (is_best and self._keeps_best)
