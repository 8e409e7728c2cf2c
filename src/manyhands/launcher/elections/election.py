"""Elections: at most one host coordinates a job at any time, by the judgement of a service outside the job."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from ...core import RunError


class ElectionUnreachable(RunError):
    """Raised when the service that holds the election does not answer."""


class Voter(Protocol):
    """What an election needs from the job's token."""

    def prove(self, *parts: str) -> str:
        """Return an HMAC of these parts."""

    def accepts(self, proof: str, *parts: str) -> bool:
        """Return whether an HMAC is correct."""


@dataclass(frozen=True)
class Leader:
    """The elected coordinator of a job."""

    host: str
    address: str
    port: int
    """The address at which the other hosts join."""
    term: int = 0
    """The number of the election: larger than those of all earlier ones."""

    @property
    def where(self) -> tuple[str, str, int]:
        """The host, its address and its port."""
        return self.host, self.address, self.port


def clock() -> float:
    """Return seconds by a clock that also counts while the machine is suspended, as a lease does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election(ABC):
    """Elects the coordinator of one job.

    A host that is elected holds a lease, which it renews. It must stop coordinating when `holds` is False: this becomes
    False before another host can be elected.
    """

    @abstractmethod
    def leader(self) -> Leader | None:
        """Return the elected coordinator; None if there is none. Raise ElectionUnreachable without an answer."""

    @abstractmethod
    def campaign(self, candidate: Leader) -> Leader | None:
        """Return the candidate with its term if it was elected, and renew its lease from now on; None if it was not.

        Raises ElectionUnreachable without an answer; the candidate must then assume that it was not elected.
        """

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Whether this host is certainly still elected, by its own clock."""

    @abstractmethod
    def renew(self) -> bool:
        """Renew the lease now; return whether the service has confirmed it."""

    @abstractmethod
    def is_over(self, term: int) -> bool:
        """Return whether the job has ended in this term or a later one, so that no host may continue it."""

    @abstractmethod
    def resign(self, *, is_over: bool) -> None:
        """Give up the lease, so that another host can be elected at once; do nothing without a lease.

        `is_over` reports that the job has ended, to hosts that are disconnected now.
        """
