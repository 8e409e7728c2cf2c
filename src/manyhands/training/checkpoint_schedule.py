"""CheckpointSchedule: when a run saves a checkpoint, so that checkpoints take a small share of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from .hand import Hand

SHARE = 0.02
"""The share of a run's time that checkpoints may take, in the loop and in the background."""
GRACE_SECONDS = 2.0
"""Seconds that checkpoints may take in addition to their share of the time, so that short runs save every epoch."""
MAX_UNSAVED_SECONDS = 300.0
"""Seconds of work that may be unsaved, whatever a checkpoint costs."""
MARGIN = 0.1
"""The share of these seconds by which a checkpoint comes early, because steps may become slower."""
LOOK_SECONDS = 2.0
"""Seconds after which ranks look together whether a checkpoint is due in mid-epoch."""


class CheckpointPace:
    """Counts what checkpoints cost, and returns when the next one is due.

    >>> now = 0.0
    >>> pace = CheckpointPace(lambda: now)
    >>> pace.is_due(0.0)
    True
    >>> pace.saved()
    >>> now = 10.0
    >>> pace.is_due(3.0)
    False
    >>> now = 250.0
    >>> pace.is_due(3.0)
    True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._saved_at = self._looked_at = clock()
        self._num_saved = 0
        self.look_at: int | None = None
        """The next step after which to ask `is_overdue`; None until the first step after a checkpoint."""
        self._looked_step = 0

    @property
    def seconds_unsaved(self) -> float:
        """Seconds since the last checkpoint, or since the start of the loop."""
        return self._clock() - self._saved_at

    def saved(self) -> None:
        """Account for a checkpoint that is being saved now."""
        self._num_saved += 1
        self._saved_at = self._clock()
        self.look_at = None

    def is_due(self, spent: float) -> bool:
        """Return whether to save at the end of an epoch, given that checkpoints have taken `spent` seconds so far."""
        allowed = GRACE_SECONDS + SHARE * (self._clock() - self._began)
        following = spent / max(1, self._num_saved)
        return spent + following <= allowed or self.seconds_unsaved >= MAX_UNSAVED_SECONDS

    def is_look(self, step: int) -> bool:
        """Return whether to ask `is_overdue` after this step; the same answer on all ranks that look together."""
        if self.look_at is None:
            self.look_at, self._looked_step, self._looked_at = step + 1, step, self._clock()
        return step >= self.look_at

    def forecast(self, step: int) -> tuple[float, float]:
        """Return the seconds that may pass until a checkpoint is due, and those of a step."""
        now = self._clock()
        seconds = (now - self._looked_at) / max(1, step - self._looked_step)
        self._looked_step, self._looked_at = step, now
        return MAX_UNSAVED_SECONDS - self.seconds_unsaved, seconds

    def is_overdue(self, step: int, left: float, seconds: float) -> bool:
        """Return whether too much work would be unsaved after another step; if not, set when to look again.

        The time left and the seconds of a step are those that the first rank forecasts.
        """
        if left <= max(seconds, MARGIN * MAX_UNSAVED_SECONDS):
            return True
        # Steps may become slower, so that only a little time is planned.
        self.look_at = step + max(1, int(min(left / 2, LOOK_SECONDS) / max(seconds, 1e-6)))
        return False


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
        self.look_at = 0
        """The next step after which to ask `is_midway_due`."""

    def saved(self) -> None:
        """Account for a checkpoint that is being saved now."""
        self._pace.saved()
        self.look_at = 0

    def is_midway_due(self) -> bool:
        """Return whether to save after this step: as `save_every` defines, else where too much work is unsaved.

        Local SGD is not saved by time, since its result depends on when the replicas are synchronized.
        """
        hand = self._hand
        if self._save_every:
            return hand.num_steps % self._save_every == 0
        if self._save_seconds or hand.replica.is_local_sgd:
            return False
        is_due = False
        if self._pace.is_look(hand.num_steps):
            forecast = hand.world.gather_objects(self._pace.forecast(hand.num_steps))[0]
            is_due = self._pace.is_overdue(hand.num_steps, *forecast)
        self.look_at = self._pace.look_at or 0
        return is_due

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
