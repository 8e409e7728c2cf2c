"""Restart policy: decides whether a job continues after rank failures. The coordinator acts on the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROUNDS = 3
"""Maximum number of consecutive restarts without a committed step in between."""


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank."""

    rank: int
    host: str
    reason: str
    raised: bool = False
    """Whether the rank raised an exception, instead of being ended from outside."""
    is_ours: bool = False
    """Whether the exception is one of manyhands' own, which a restart would raise again."""
    is_echo: bool = False
    """Whether the failure only follows from another rank's failure, which may be reported later."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.reason}"


class RestartPolicy:
    """Counts restarts without progress.

    >>> policy = RestartPolicy()
    >>> killed = [RankFailure(1, "host1", "was killed")]
    >>> [policy.allows_restart(killed, size=2, step=step) for step in (7, 7, 7, 7)]
    [True, True, True, False]
    >>> policy.allows_restart(killed, size=2, step=8)
    True

    Exceptions that all ranks have raised since the last progress, also one after the other, end the job.

    >>> [policy.allows_restart([RankFailure(rank, "host1", "typo", raised=True)], size=2, step=9) for rank in (0, 1)]
    [True, False]
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._step = -1
        self._raised: set[int] = set()
        """Ranks that raised since the last progress."""

    def allows_restart(self, losses: Sequence[RankFailure], *, size: int, step: int) -> bool:
        """Return whether failed ranks are replaced; `step` is the last step that is known to be committed."""
        if any(loss.is_ours for loss in losses):
            return False
        if step > self._step:
            self._rounds, self._step = 0, step
            self._raised.clear()
        self._raised |= {loss.rank for loss in losses if loss.raised}
        # An exception that every rank raises at one step, at once or over several restarts, or that any rank raises
        # before the first step, is an error of the program itself.
        if len(self._raised) >= size or (self._raised and step <= 0):
            return False
        self._rounds += 1
        return self._rounds <= MAX_ROUNDS

    @property
    def has_given_up(self) -> bool:
        """Return whether the lack of progress ended the job."""
        return self._rounds > MAX_ROUNDS
