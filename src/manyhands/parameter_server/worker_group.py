"""The workers of a job: assigns the samples of every step to them, and those of a failed worker again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..core import StrategySpec
from ..data import Ids
from .member_jobs import MemberConnections, MemberJobs, MemberRecord
from .messages import Delivered, WorkPart
from .work_schedule import AsynchronousSchedule, FirstArrivalSchedule, InOrderSchedule, WorkSchedule, WorkTicket


class WorkerGroup:
    """The workers, and the schedule of the current epoch, from which they get tickets (samples of one step)."""

    def __init__(self, spec: StrategySpec, jobs: MemberJobs, connections: MemberConnections) -> None:
        self._spec, self._jobs, self._connections = spec, jobs, connections
        self.workers: dict[int, MemberRecord] = {}
        self.limit = 0
        """The first step whose samples must not be handed out yet."""
        self._num_started = 0
        self._schedule: WorkSchedule | None = None
        self._epoch = 0
        self._next_ticket = 0

    def start(self, place: int) -> None:
        """Start a worker under the next number; externally started workers get their record in `admit` instead."""
        number, self._num_started = self._num_started, self._num_started + 1
        self.workers[number] = self._jobs.start("worker", number, place)

    def admit(self, number: int) -> MemberRecord | None:
        """Return the record of an externally started worker that joins; None for a number beyond the cluster's."""
        if 0 <= number < self._jobs.num_places:
            self.workers[number] = self._jobs.start("worker", number, number)
        return self.workers.get(number)

    def remove(self, worker: MemberRecord) -> None:
        """Remove a failed worker; its samples are handed out again."""
        self.take_back(worker)
        del self.workers[worker.number]

    def take_back(self, worker: MemberRecord) -> None:
        """Let the schedule hand out the samples of a worker again."""
        if worker.ticket is not None and self._schedule is not None:
            self._schedule.give_back(worker.ticket)
        worker.ticket, worker.is_asking = None, False

    def take_all_back(self) -> None:
        """Let the schedule hand out the samples of all workers again."""
        for worker in self.workers.values():
            self.take_back(worker)

    def overdue(self, before: float) -> list[MemberRecord]:
        """Return the workers that began their ticket before `before`, a monotonic time."""
        return [worker for worker in self.workers.values() if worker.ticket is not None and worker.since < before]

    # -- work -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop the schedule and number tickets from 0, because the servers are loaded again."""
        self._schedule, self._next_ticket = None, 0

    def begin_epoch(self, epoch: int, windows: Iterator[Ids], step: int) -> None:
        """Hand out the batches of this epoch from now on, starting at `step`; `windows` yields their sample ids."""
        spec, first = self._spec, (windows, step, self._next_ticket)
        workers = self._jobs.num_places
        self._epoch = epoch
        if spec.staleness is None:
            self._schedule = AsynchronousSchedule(*first, parts=1)
        elif spec.backup:
            self._schedule = FirstArrivalSchedule(*first, workers - spec.backup, spec.backup, spec.accumulate)
        else:
            self._schedule = InOrderSchedule(*first, workers, spec.staleness, spec.accumulate)

    @property
    def is_settled(self) -> bool:
        """Whether the servers' values contain exactly the updates of the closed steps, with no gradient in flight."""
        in_order = self._spec.staleness is not None and not self._spec.backup
        return in_order or self._schedule is None or self._schedule.is_idle

    def assign(self, term: int, rates: list[float], *, is_stopping: bool) -> None:
        """Give tickets to the workers that ask for work."""
        schedule = self._schedule
        if schedule is None:
            return
        # After a stop request, work in flight is completed and no new step is started.
        limit = self.limit if not is_stopping or schedule.is_idle else min(self.limit, schedule.step)
        for worker in self.workers.values():
            if not worker.is_asking or worker.peer is None:
                continue
            ticket = schedule.take(limit, again=worker.step == schedule.step)
            if ticket is None:
                continue
            worker.ticket, worker.is_asking, worker.since = ticket.number, False, time.monotonic()
            oldest = 0 if self._spec.staleness is None else max(0, ticket.step - self._spec.staleness)
            part = WorkPart(term, ticket.number, self._epoch, ticket.step, oldest, rates)
            self._connections.send(worker, part, [ticket.ids.tobytes()])

    def receive(self, worker: MemberRecord, message: Delivered) -> None:
        """Record that a worker has delivered the gradient of its ticket to the servers."""
        worker.ticket, worker.is_asking = None, True
        assert self._schedule is not None
        ticket = self._schedule.deliver(message.ticket)
        if ticket is None:
            # The servers keep a late gradient until the next gradient of the same ticket replaces it.
            return
        worker.step = ticket.step
        ticket.total, ticket.count, ticket.weight = message.total, message.count, message.weight
        ticket.staleness, ticket.is_skipped = message.staleness, message.skipped

    def complete_step(self) -> list[WorkTicket]:
        """Return the tickets of the open step if it is complete, and open the next one; else an empty list."""
        assert self._schedule is not None
        tickets = self._schedule.complete()
        self._next_ticket = self._schedule.number
        return tickets or []

    def count_late(self) -> int:
        """Return how many gradients arrived after their step was closed, and reset the counter."""
        assert self._schedule is not None
        late, self._schedule.late = self._schedule.late, 0
        return late
