"""Judgement: whether a job goes on after it lost ranks. It decides; the conductor acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROUNDS = 3
"""Restarts in a row without a step in between, after which another one will not help either."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank was lost."""

    rank: int
    host: str
    reason: str
    raised: bool = False
    """Whether it raised, instead of being ended from outside."""
    is_ours: bool = False
    """Whether what it raised is an error of manyhands', which would come again: nothing else does such a thing."""
    is_echo: bool = False
    """Whether it only fell with another, whose loss may be heard of later."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.reason}"


class RestartPolicy:
    """Counts rounds without progress.

    >>> judge = Judgement()
    >>> killed = [Loss(1, "host1", "was killed")]
    >>> [judge.goes_on(killed, size=2, step=step) for step in (7, 7, 7, 7)]
    [True, True, True, False]
    >>> judge.goes_on(killed, size=2, step=8)
    True

    What all of them raise, even in turns, is not tried again.

    >>> [judge.goes_on([Loss(rank, "host1", "typo", raised=True)], size=2, step=9) for rank in (0, 1)]
    [True, False]
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._step = -1
        self._raised: set[int] = set()
        """Ranks that raised since the last progress."""

    def goes_on(self, losses: Sequence[RankFailure], *, size: int, step: int) -> bool:
        """Whether lost ranks are replaced: `step` is the last one that is known to be committed."""
        if any(loss.is_ours for loss in losses):
            return False
        if step > self._step:
            self._rounds, self._step = 0, step
            self._raised.clear()
        self._raised |= {loss.rank for loss in losses if loss.raised}
        # What every rank raises at one step, if not at once then in turns, or one before any step was taken, is the
        # program's own mistake.
        if len(self._raised) >= size or (self._raised and step <= 0):
            return False
        self._rounds += 1
        return self._rounds <= MAX_ROUNDS

    @property
    def has_tired(self) -> bool:
        """Whether it was the lack of progress that ended the job."""
        return self._rounds > MAX_ROUNDS
