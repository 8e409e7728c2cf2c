"""The work schedule of an epoch: assigns samples to workers and decides when a step is complete. No I/O.

Every sample of the epoch is on exactly one ticket. A ticket returned without a gradient is handed out again; the epoch
ends when every ticket is in a closed step.
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
    """The step it belongs to; with backup workers, the step that was open when it was handed out."""
    ids: Ids = field(compare=False, repr=False)
    total: float = field(default=0.0, compare=False)
    """Sum of the losses."""
    count: float = field(default=0.0, compare=False)
    """The divisor of the sum for the mean."""
    weight: float = field(default=0.0, compare=False)
    """Factor of the gradient, before division by the count of all parts."""
    staleness: int = field(default=0, compare=False)
    """How many steps old the parameters were that it was computed with."""
    is_skipped: bool = field(default=False, compare=False)
    """Whether its gradient is not finite, so that the step is left out."""


class WorkSchedule(ABC):
    """Hands out tickets and takes them back; subclasses define when a step is complete."""

    def __init__(self, windows: Iterator[Ids], step: int, number: int, parts: int, accumulate: int = 1) -> None:
        self._windows, self._parts, self._accumulate = windows, parts, accumulate
        self.step = step
        """The open step."""
        self.number = number
        """The number of the next ticket."""
        self._next_step = step
        self._waiting: list[WorkTicket] = []
        self.out: dict[int, WorkTicket] = {}
        """Tickets that are being computed, by number."""
        self._in: dict[int, list[WorkTicket]] = {}
        """By step: tickets that were delivered with a gradient."""
        self.late = 0
        """Gradients that arrived after their step was closed."""
        self._sizes: dict[int, int] = {}
        """By step: the number of tickets of its batch."""

    def take(self, limit: int, *, again: bool = False) -> WorkTicket | None:
        """Return the next ticket of a step before `limit`; `again`: the worker has done one of the open step."""
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
        """Return whether a ticket may be handed out now; `again`: the worker has already done one of the open step."""

    @abstractmethod
    def may_cut(self, step: int) -> bool:
        """Return whether the samples of a step may be split into tickets now."""

    def give_back(self, number: int) -> None:
        """Return a ticket without a gradient; it is handed out again."""
        ticket = self.out.pop(number, None)
        if ticket is not None:
            heapq.heappush(self._waiting, ticket)

    def deliver(self, number: int) -> WorkTicket | None:
        """Record a ticket whose gradient the servers have; None if it is unknown or too late."""
        ticket = self.out.pop(number, None)
        if ticket is None:
            return None
        if ticket.step < self.step:
            self._put_back(ticket)
            return None
        self._in.setdefault(ticket.step, []).append(ticket)
        return ticket

    def _put_back(self, ticket: WorkTicket) -> None:
        """Queue a ticket again whose gradient came too late."""
        self.late += 1
        heapq.heappush(self._waiting, ticket)

    @abstractmethod
    def complete(self) -> list[WorkTicket] | None:
        """Return the tickets of the open step if it is complete, and open the next one."""

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
    """Every step is exactly its own batch; workers may be up to `ahead` steps ahead of the open one."""

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
    """A step takes the first tickets that arrive, as many as a batch has parts; late ones are handed out again."""

    def __init__(
        self, windows: Iterator[Ids], step: int, number: int, parts: int, backup: int, accumulate: int = 1
    ) -> None:
        super().__init__(windows, step, number, parts, accumulate)
        self._backup = backup
        self._begun = 0
        """Tickets that were handed out for the open step."""

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
    """Asynchronous: every ticket is a whole batch and a step by itself, in order of arrival."""

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
