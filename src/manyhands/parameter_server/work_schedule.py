"""The work schedule of an epoch: assigns samples to workers and decides when a step is complete. No I/O.

Every sample of the epoch is on exactly one ticket. A ticket without a gradient, such as that of a failed worker, is
handed out again; the epoch ends when every ticket is in a closed step.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..data import Ids, part_of


@dataclass(order=True)
class WorkTicket:
    """Samples of one step, to be computed by one worker."""

    number: int
    step: int = field(compare=False)
    """The step to which the ticket belongs; with backup workers, the step that was open when it was handed out."""
    ids: Ids = field(compare=False, repr=False)
    total: float = field(default=0.0, compare=False)
    """Sum of the losses that the worker computed."""
    count: float = field(default=0.0, compare=False)
    """Divisor that makes the sum of the losses a mean, such as a number of samples."""
    weight: float = field(default=0.0, compare=False)
    """Factor of the gradient, before the sum over the step's tickets is divided by their counts."""
    staleness: int = field(default=0, compare=False)
    """Age in steps of the parameters with which the gradient was computed."""
    is_skipped: bool = field(default=False, compare=False)
    """Whether the gradient is not finite, so that the step is skipped."""


class WorkSchedule(ABC):
    """Base class of schedules: hands out tickets and collects them; subclasses define when a step is complete."""

    def __init__(self, windows: Iterator[Ids], step: int, number: int, parts: int, accumulate: int = 1) -> None:
        self._windows, self._parts, self._accumulate = windows, parts, accumulate
        self.step = step
        """The open step, whose gradients are being collected."""
        self.number = number
        """The number of the next ticket."""
        self._next_step = step
        self._waiting: list[WorkTicket] = []
        self.out: dict[int, WorkTicket] = {}
        """Tickets that are being computed, by number."""
        self._in: dict[int, list[WorkTicket]] = {}
        """By step: tickets that were delivered with a gradient."""
        self.late = 0
        """Number of gradients that arrived after their step was closed."""
        self._sizes: dict[int, int] = {}
        """By step: the number of tickets into which its batch was split."""

    def take(self, limit: int, *, again: bool = False) -> WorkTicket | None:
        """Return the next ticket of a step before `limit`; None if the worker must wait.

        `again` is whether the worker has already computed a ticket of the open step.
        """
        if not self._waiting or not self.may_take(self._waiting[0], again):
            self._cut(limit)
        if not self._waiting or not self.may_take(self._waiting[0], again):
            return None
        ticket = heapq.heappop(self._waiting)
        self.out[ticket.number] = ticket
        return self.taken(ticket)

    def taken(self, ticket: WorkTicket) -> WorkTicket:
        """Return the ticket as it is handed out; subclasses may change its step."""
        return ticket

    @abstractmethod
    def may_take(self, ticket: WorkTicket, again: bool) -> bool:
        """Return whether a ticket may be handed out now; `again` if the worker has computed one of the open step."""

    @abstractmethod
    def may_cut(self, step: int) -> bool:
        """Return whether the samples of a step may be split into tickets now."""

    def give_back(self, number: int) -> None:
        """Queue a ticket again, because its worker will deliver no gradient."""
        ticket = self.out.pop(number, None)
        if ticket is not None:
            heapq.heappush(self._waiting, ticket)

    def deliver(self, number: int) -> WorkTicket | None:
        """Record and return a ticket whose gradient the servers have; return None if it is unknown or too late."""
        ticket = self.out.pop(number, None)
        if ticket is None:
            return None
        if ticket.step < self.step:
            self._put_back(ticket)
            return None
        self._in.setdefault(ticket.step, []).append(ticket)
        return ticket

    def _put_back(self, ticket: WorkTicket) -> None:
        """Queue a ticket again, because its gradient came too late."""
        self.late += 1
        heapq.heappush(self._waiting, ticket)

    @abstractmethod
    def complete(self) -> list[WorkTicket] | None:
        """Return the tickets of the open step and open the next one; return None if the step is not complete."""

    @property
    def is_idle(self) -> bool:
        """Whether no ticket is in flight and none waits for its step to be complete."""
        return not self.out and not any(self._in.values())

    def _cut(self, limit: int) -> None:
        if self._next_step >= limit or not self.may_cut(self._next_step):
            return
        ids = next(self._windows, None)
        if ids is None:
            return
        for part in range(self._parts):
            part_ids = part_of(ids, part, self._parts, self._accumulate)
            if len(part_ids):
                heapq.heappush(self._waiting, WorkTicket(self.number, self._next_step, part_ids))
                self.number += 1
                self._sizes[self._next_step] = self._sizes.get(self._next_step, 0) + 1
        self._next_step += 1

    def _close(self) -> list[WorkTicket] | None:
        arrived, needed = self._in.get(self.step, []), self._sizes.get(self.step, 0)
        if not needed or len(arrived) < needed:
            return None
        del self._in[self.step], self._sizes[self.step]
        self.step += 1
        return arrived


class InOrderSchedule(WorkSchedule):
    """Schedule in which every step is exactly one batch; workers may be up to `ahead` steps ahead of the open step."""

    def __init__(
        self, windows: Iterator[Ids], step: int, number: int, parts: int, ahead: int, accumulate: int = 1
    ) -> None:
        super().__init__(windows, step, number, parts, accumulate)
        self._ahead = ahead

    def may_take(self, ticket: WorkTicket, again: bool) -> bool:
        return ticket.step <= self.step + self._ahead

    def may_cut(self, step: int) -> bool:
        return step <= self.step + self._ahead

    def complete(self) -> list[WorkTicket] | None:
        return self._close()


class FirstArrivalSchedule(WorkSchedule):
    """Schedule with backup workers: a step takes the first tickets that arrive, and late ones are handed out again.

    A step has as many tickets as a batch has parts.
    """

    def __init__(
        self, windows: Iterator[Ids], step: int, number: int, parts: int, backup: int, accumulate: int = 1
    ) -> None:
        super().__init__(windows, step, number, parts, accumulate)
        self._backup = backup
        self._begun = 0
        """Number of tickets that were handed out for the open step."""

    def may_take(self, ticket: WorkTicket, again: bool) -> bool:
        # A fast worker must be free when the next step opens, not busy with a gradient that will come too late.
        return self._begun < self._needed + (0 if again else self._backup)

    def may_cut(self, step: int) -> bool:
        # One batch ahead, so that backup workers have work.
        return step <= self.step + 1

    def taken(self, ticket: WorkTicket) -> WorkTicket:
        ticket.step = self.step
        self._begun += 1
        return ticket

    def give_back(self, number: int) -> None:
        if number in self.out and self.out[number].step == self.step:
            self._begun -= 1
        super().give_back(number)

    @property
    def _needed(self) -> int:
        return self._sizes.get(self.step, 0) or self._parts

    def complete(self) -> list[WorkTicket] | None:
        arrived, needed = self._in.get(self.step, []), self._sizes.get(self.step, 0)
        for ticket in arrived[needed:] if needed else ():
            self._put_back(ticket)
        del arrived[needed:]
        closed = self._close()
        if closed is not None:
            self._begun = 0
        return closed


class AsynchronousSchedule(WorkSchedule):
    """Schedule in which every ticket is a whole batch and a step of its own, in the order in which gradients arrive."""

    def may_take(self, ticket: WorkTicket, again: bool) -> bool:
        return True

    def may_cut(self, step: int) -> bool:
        return True

    def deliver(self, number: int) -> WorkTicket | None:
        ticket = self.out.pop(number, None)
        if ticket is not None:
            self._in.setdefault(0, []).append(ticket)
        return ticket

    def complete(self) -> list[WorkTicket] | None:
        arrived = self._in.get(0, [])
        if not arrived:
            return None
        self.step += 1
        return [arrived.pop(0)]
