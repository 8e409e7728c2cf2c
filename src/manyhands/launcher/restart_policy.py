"""Restart policy: decides whether a job continues after rank failures. The coordinator acts on the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROUNDS = 3
"""Maximum number of consecutive restarts without a completed step in between."""


@dataclass(frozen=True)
class RankFailure:
    """The failure of a rank: the rank, its host and the reason, with what the restart policy must know about it."""

    rank: int
    host: str
    reason: str
    raised: bool = False
    """Whether the rank raised an exception, rather than being killed."""
    is_ours: bool = False
    """Whether the exception is a ManyhandsError, which a restart would raise again."""
    is_echo: bool = False
    """Whether the failure only follows from another rank's failure, which may be reported later."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.reason}"


class RestartPolicy:
    """Decides whether failed ranks are replaced: at most MAX_ROUNDS times without a completed step in between.

    >>> policy = RestartPolicy()
    >>> killed = [RankFailure(1, "host1", "was killed")]
    >>> [policy.allows_restart(killed, size=2, step=step) for step in (7, 7, 7, 7)]
    [True, True, True, False]
    >>> policy.allows_restart(killed, size=2, step=8)
    True

    The job also ends if every rank has raised an exception since the last completed step, even one after the other.

    >>> [policy.allows_restart([RankFailure(rank, "host1", "typo", raised=True)], size=2, step=9) for rank in (0, 1)]
    [True, False]
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._step = -1
        self._raised: set[int] = set()
        """Ranks that have raised an exception since the last completed step."""

    def allows_restart(self, losses: Sequence[RankFailure], *, size: int, step: int) -> bool:
        """Return whether the job continues after these failures.

        `size` is the number of ranks, `step` the last step that some rank is known to have completed.
        """
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
        """Return whether the policy has ended the job because of too many restarts without progress."""
        return self._rounds > MAX_ROUNDS
