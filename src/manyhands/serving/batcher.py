"""Batcher: computes the rows of many requests together and returns each request's answer.

It adds no delay. An idle replica immediately gets the waiting requests; while replicas compute, requests accumulate, so
that batches grow with the load only.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..core import RequestRefused
from .batch_time import BatchTimeModel
from .dtypes import Array
from .options import Batching
from .slots import View, row_shape
from .texts import TextRegion, text_bytes

Arrays = Mapping[str, Array]
Done = Callable[["Ticket"], None]
Shapes = tuple[tuple[int, ...], ...]
REQUEST_QUEUES = 4
"""Maximum size of one request as a multiple of the queue's rows, if nothing else waits."""
ATTEMPTS = 3
"""Number of times a request is computed if replicas die on it; the last time alone."""
BULK_SECONDS = 0.05
"""Maximum expected seconds of a batch of more than `max_rows` rows, for which a new request has to wait."""
BULK_GROWTH = 4
"""Maximum ratio of such a batch to the largest one that was measured."""
HUNG_SECONDS = 5.0
"""Minimum seconds after which a batch may count as hung."""
HUNG_RATIO = 20.0
"""Minimum ratio of a hung batch's duration to the expected one."""
NUM_RESTARTS, HUNG_SHARE = 2, 0.5
"""Restarts of a replica for which there must be time before others' deadlines, and the maximum share of their time."""


class Ticket:
    """One request in flight, and finally its answer or the reason for a refusal."""

    __slots__ = (
        "deadline", "done", "inputs", "outputs", "over", "parts", "priority", "queued", "refusal", "rows", "shapes"
    )  # fmt: skip

    def __init__(self, inputs: Arrays, rows: int, deadline: float, priority: int, done: Done) -> None:
        self.inputs, self.rows, self.deadline, self.priority, self.done = inputs, rows, deadline, priority, done
        self.outputs: dict[str, Array] = {}
        self.refusal: RequestRefused | None = None
        self.over = False
        self.queued = 0
        """Rows that are still queued."""
        self.parts: list[tuple[int, dict[str, Array]]] = []
        """Partial answers, each with its first row."""
        self.shapes: Shapes = ()
        """Shape of one row of each input."""


@dataclass
class TicketPart:
    """Consecutive rows of a ticket, computed in one batch."""

    ticket: Ticket
    start: int
    rows: int
    attempts: int = 0
    alone: bool = False
    """Whether it must be computed alone, because it was in a batch that failed."""


@dataclass
class RequestBatch:
    """Rows that a replica computes at once."""

    parts: list[TicketPart]
    rows: int
    size: int
    """Number of rows including padding."""
    shapes: Shapes
    """Shape of one row of each input, in the signature's order."""

    @property
    def is_over(self) -> bool:
        """Whether all of its requests have ended."""
        return all(part.ticket.over for part in self.parts)

    @property
    def tickets(self) -> set[Ticket]:
        """Its requests that have not ended."""
        return {part.ticket for part in self.parts if not part.ticket.over}

    def writing(self, views: Mapping[str, View]) -> Callable[[], None]:
        """Return a function that copies the rows into a replica's memory, the only copy of a request's data.

        It may run on another thread while requests end, so it keeps its own references to the data.
        """
        rows = {
            name: [part.ticket.inputs[name][part.start : part.start + part.rows] for part in self.parts]
            for name in views
        }

        def write() -> None:
            for name, view in views.items():
                if isinstance(view, TextRegion):
                    view.write(self._texts(rows[name]))
                    continue
                np.concatenate(rows[name], out=view[: self.rows])
                if self.size > self.rows:
                    # Repeating an existing row is harmless for any model; zeros may not be.
                    view[self.rows :] = view[self.rows - 1]

        return write

    def _texts(self, rows: Sequence[Array]) -> list[bytes]:
        """Return the strings of all rows, the last row again for padding."""
        items = [item for part in rows for item in part.flat]
        return items + items[-(len(items) // self.rows) :] * (self.size - self.rows)


class Worker(Protocol):
    """Protocol of objects that compute batches and report to `answered`, `failed`, `lost`, `hung` or `unsent`."""

    @property
    def num_free(self) -> int:
        """Number of batches that it can take now."""

    @property
    def num_rows(self) -> int:
        """Number of rows in flight."""

    def send(self, batch: RequestBatch) -> None:
        """Start to compute a batch."""


class TicketQueue:
    """Rows that wait to be computed, by priority and by the shapes of a row."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._queues: dict[tuple[int, Shapes], deque[TicketPart]] = {}

    @property
    def num_parts(self) -> int:
        """Number of parts of requests, also of requests that have ended."""
        return sum(map(len, self._queues.values()))

    @property
    def tickets(self) -> set[Ticket]:
        """The requests that wait."""
        return {part.ticket for queue in self._queues.values() for part in queue if not part.ticket.over}

    @property
    def first(self) -> TicketPart | None:
        """The part that is computed next; None if nothing waits."""
        firsts = (queue[0] for queue in self._queues.values())
        return min(firsts, key=lambda part: (part.ticket.priority, part.ticket.deadline), default=None)

    def add(self, part: TicketPart, *, first: bool = False) -> None:
        """Add a part at the end of its queue, or at the beginning."""
        part.ticket.queued += part.rows
        self.num_rows += part.rows
        queue = self._queues.setdefault((part.ticket.priority, part.ticket.shapes), deque())
        (queue.appendleft if first else queue.append)(part)

    def forget(self, ticket: Ticket) -> None:
        """Count the rows of a request that has ended no more."""
        self.num_rows -= ticket.queued
        ticket.queued = 0

    def drop_ended(self) -> None:
        """Drop the parts of requests that have ended."""
        for key, queue in list(self._queues.items()):
            if any(part.ticket.over for part in queue):
                self._queues[key] = deque(part for part in queue if not part.ticket.over)
                if not self._queues[key]:
                    del self._queues[key]

    def take(
        self, first: TicketPart, most: int, now: float, refuse: Callable[[Ticket, RequestRefused], None]
    ) -> tuple[list[TicketPart], int]:
        """Remove `first` and what fits into a batch of `most` rows with it; return the parts and their rows."""
        key = first.ticket.priority, first.ticket.shapes
        queue = self._queues[key]
        parts: list[TicketPart] = []
        rows = 0
        while queue and rows < most:
            part = queue[0]
            ticket = part.ticket
            if ticket.over or ticket.deadline <= now:
                queue.popleft()
                refuse(ticket, RequestRefused("DEADLINE_EXCEEDED", "the deadline has passed"))
                continue
            if parts and (part.alone or rows + part.rows > most):
                break
            if part.rows > most:
                queue[0] = TicketPart(ticket, part.start + most, part.rows - most, part.attempts, part.alone)
                part = TicketPart(ticket, part.start, most, part.attempts, part.alone)
            else:
                queue.popleft()
            ticket.queued -= part.rows
            self.num_rows -= part.rows
            parts.append(part)
            rows += part.rows
            if part.alone:
                break
        if not queue:
            del self._queues[key]
        return parts, rows


class BatchSizes:
    """How many rows a batch may have."""

    def __init__(self, settings: Batching, pace: BatchTimeModel) -> None:
        self._settings, self._pace = settings, pace
        self.rows_fitting: Callable[[Shapes], int] = lambda shapes: settings.max_rows
        """Returns how many rows of given shapes fit into a replica's memory."""
        self.bulk_fitting: Callable[[Shapes], int] = self.rows_fitting
        """Returns how many rows of given shapes fit for a batch of one request."""
        self.may_bulk = not settings.sizes
        """Whether a large request may have a batch of more than `max_rows` rows."""

    def most(self, shapes: Shapes) -> int:
        """Return the maximum rows of a batch, which must also fit with padding."""
        fitting = min(self._settings.max_rows, self.rows_fitting(shapes))
        sizes = self._settings.sizes
        return max((size for size in sizes if size <= fitting), default=0 if sizes else fitting)

    def bulk(self, part: TicketPart, num_workers: int) -> int:
        """Return the rows of a larger batch for a large request while no other one waits; 0 for none.

        The size grows with what was measured, up to batches that take `BULK_SECONDS`, for which a new request may wait.
        """
        usual = self._settings.max_rows
        if part.rows <= usual or not self.may_bulk or part.alone or part.attempts:
            return 0
        share = math.ceil(part.rows / max(1, num_workers))
        measured = min(BULK_GROWTH * self._pace.most_rows, self._pace.rows_within(BULK_SECONDS))
        size = min(share, self.bulk_fitting(part.ticket.shapes), measured)
        return size if size > usual else 0

    def is_bulk(self, batch: RequestBatch) -> bool:
        """Return whether a batch has more rows than those that join requests."""
        return batch.rows > self._settings.max_rows


class Batcher:
    """Queue of one version of a model, in front of its replicas. All methods run on one thread."""

    def __init__(
        self,
        settings: Batching,
        inputs: Sequence[str],
        call_soon: Callable[[Callable[[], None]], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.workers: list[Worker] = []
        self.pace = BatchTimeModel()
        self.sizes = BatchSizes(settings, self.pace)
        self.on_batch: Callable[[RequestBatch, float], None] = lambda batch, seconds: None
        self._inputs, self._call_soon, self._now = list(inputs), call_soon, now
        self._queue = TicketQueue()
        self._live: set[Ticket] = set()
        self._scheduled = False

    @property
    def num_queued(self) -> int:
        """Number of rows in the queue."""
        return self._queue.num_rows

    @property
    def num_live(self) -> int:
        """Number of unanswered requests."""
        return len(self._live)

    @property
    def is_full(self) -> bool:
        """Whether another request would be refused."""
        return self.num_queued >= self.settings.queue_rows

    def submit(self, inputs: Arrays, rows: int, *, deadline: float, priority: int = 0, done: Done) -> Ticket:
        """Queue a request whose inputs fit the signature; `done` is called once with its ticket, never from here.

        Lower priorities go first. Raises RequestRefused if too much is queued.
        """
        self.require_capacity(deadline)
        self._require_rows(inputs, rows)
        shapes = tuple(row_shape(inputs[name]) for name in self._inputs)
        if not self.sizes.most(shapes):
            size = sum(inputs[name][:1].nbytes + text_bytes(inputs[name][:1]) for name in self._inputs)
            raise RequestRefused(
                "INVALID_ARGUMENT", f"a row must fit into a batch, but got a row of {size} bytes; send smaller rows"
            )
        ticket = Ticket(inputs, rows, deadline, priority, done)
        ticket.shapes = shapes
        self._live.add(ticket)
        self._queue.add(TicketPart(ticket, 0, rows))
        self.wake()
        return ticket

    def require_capacity(self, deadline: float) -> None:
        """Raise RequestRefused if a request could not be answered before its deadline (load shedding)."""
        now, wait = self._now(), self._wait() if self.num_queued else 0.0
        if deadline <= now:
            raise RequestRefused("DEADLINE_EXCEEDED", "the deadline has passed")
        if self.is_full or now + wait > deadline:
            retry = max(1.0, math.ceil(wait))
            raise RequestRefused("UNAVAILABLE", f"overloaded: {self.num_queued} rows are waiting", retry)

    def _require_rows(self, inputs: Arrays, rows: int) -> None:
        """Refuse empty rows, of which a small request can have any number, and requests with too many rows."""
        empty = [name for name in self._inputs if 0 in inputs[name].shape]
        if empty or not rows:
            shape = list(inputs[empty[0] if empty else self._inputs[0]].shape)
            which = f" of input '{empty[0]}'" if empty else ""
            raise RequestRefused("INVALID_ARGUMENT", f"rows{which} must not be empty, but got the shape {shape}")
        most = REQUEST_QUEUES * self.settings.queue_rows
        if rows > most:
            raise RequestRefused(
                "INVALID_ARGUMENT", f"a request may have {most} rows, but got {rows}; send several requests"
            )
        if self.num_queued and self.num_queued + rows > self.settings.queue_rows:
            reason = f"overloaded: {self.num_queued} rows are waiting, and {rows} more would be too many"
            raise RequestRefused("UNAVAILABLE", reason, max(1.0, math.ceil(self._wait())))

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose client has disconnected; rows that were not started are never computed."""
        if not ticket.over:
            self._end(ticket)

    def wake(self) -> None:
        """Schedule a dispatch for the next loop iteration, so that requests arriving together share a batch."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._dispatch)

    def expire(self) -> None:
        """Refuse requests whose deadline has passed, queued or in flight."""
        now = self._now()
        for ticket in [ticket for ticket in self._live if ticket.deadline <= now]:
            self._refuse(ticket, RequestRefused("DEADLINE_EXCEEDED", "the deadline has passed"))
        self._queue.drop_ended()

    def refuse_all(self, refusal: RequestRefused) -> None:
        """Refuse every request."""
        for ticket in list(self._live):
            self._refuse(ticket, refusal)

    def answered(self, batch: RequestBatch, outputs: Arrays, seconds: float) -> None:
        """Take the outputs of a batch and its duration; the arrays are shared memory that will be reused."""
        self.pace.learn(batch.rows, seconds)
        self.on_batch(batch, seconds)
        row = 0
        for part in batch.parts:
            if not part.ticket.over:
                self._give(part, {name: array[row : row + part.rows].copy() for name, array in outputs.items()})
            row += part.rows
        self.wake()

    def failed(self, batch: RequestBatch, reason: str, *, is_invalid: bool = False) -> None:
        """Handle an exception of the model: retry each part alone, so that only the request that caused it fails.

        With `is_invalid` the model has refused the request, for a reason that the client may see.
        """
        # The model may not have the memory for a large batch.
        if len(batch.parts) == 1 and (is_invalid or not self.sizes.is_bulk(batch)):
            refusal = (
                RequestRefused("INVALID_ARGUMENT", reason)
                if is_invalid
                else RequestRefused("INTERNAL", f"the model failed: {reason}")
            )
            self._refuse(batch.parts[0].ticket, refusal)
        else:
            self._again(batch.parts, alone=True)
        self.wake()

    def lost(self, batch: RequestBatch) -> None:
        """Handle the death of a replica: retry its batch on others, and refuse a request after `ATTEMPTS` deaths."""
        if self.sizes.is_bulk(batch):
            # The process may have been killed because of its memory.
            self.sizes.may_bulk = False
        for part in batch.parts:
            part.attempts += 1
            if part.attempts >= ATTEMPTS:
                self._refuse(part.ticket, RequestRefused("INTERNAL", "replicas died while computing this request"))
        self._again(batch.parts, alone=any(part.attempts == ATTEMPTS - 1 for part in batch.parts))
        self.wake()

    def unsent(self, batch: RequestBatch) -> None:
        """Queue a batch again that a replica had not begun to compute when it died."""
        self._again(batch.parts, alone=False)
        self.wake()

    def hung(self, batch: RequestBatch) -> None:
        """Handle a batch that blocked its replica, which was killed: its requests are retried alone, after all
        other requests.

        A request that was already computed alone is the cause, and is refused.
        """
        for part in batch.parts:
            if part.alone:
                reason = "the request was computed for too long, alone and while other requests waited"
                self._refuse(part.ticket, RequestRefused("DEADLINE_EXCEEDED", reason))
        self._again(batch.parts, alone=True, first=False)
        self.wake()

    def is_hung(self, batch: RequestBatch, others: Sequence[RequestBatch], seconds: float, restart: float) -> bool:
        """Return whether a batch must be aborted, because other requests would otherwise miss their deadlines.

        A slow request is not aborted as long as the others have time left for restarts of the replica: one now, and
        one if the cause is computed again before them.

        Args:
            batch: The batch that a replica computes.
            others: The batches that wait in the same replica.
            seconds: For how long the batch has been computed.
            restart: How long a replica takes to start.
        """
        if seconds < max(HUNG_SECONDS, HUNG_RATIO * self.pace.seconds(batch.rows)):
            return False
        tickets = batch.tickets
        waiting = self._queue.tickets.union(*(other.tickets for other in others)) - tickets
        if not tickets or not (waiting or len(tickets) > 1):
            return bool(waiting)
        left = min(ticket.deadline for ticket in waiting | (tickets if len(tickets) > 1 else set())) - self._now()
        reserve = min(NUM_RESTARTS * restart + HUNG_SECONDS + 1.0, HUNG_SHARE * (left + seconds))
        return restart < left <= reserve

    def _wait(self) -> float:
        """Return the estimated seconds until the queue is computed."""
        rows, most = self.num_queued, self.settings.max_rows
        return math.ceil(rows / most) * self.pace.seconds(min(rows, most)) / max(1, len(self.workers))

    def _again(self, parts: Sequence[TicketPart], *, alone: bool, first: bool = True) -> None:
        for part in reversed(parts) if first else parts:
            if not part.ticket.over:
                part.alone = alone or part.alone
                self._queue.add(part, first=first)

    def _dispatch(self) -> None:
        self._scheduled = False
        while self.num_queued and (worker := self._free_worker()) is not None:
            batch = self._take()
            if batch is None:
                return
            worker.send(batch)

    def _free_worker(self) -> Worker | None:
        """Return the less loaded of two free workers, but queue behind a running batch only if enough rows wait."""
        free = [worker for worker in self.workers if worker.num_free]
        if len(free) > 2:
            free = random.sample(free, 2)
        worker = min(free, key=lambda worker: worker.num_rows, default=None)
        if worker is None or 2 * self.num_queued < min(worker.num_rows, self.settings.max_rows):
            return None
        return worker

    def _take(self) -> RequestBatch | None:
        while (first := self._queue.first) is not None:
            shapes = first.ticket.shapes
            bulk = self.sizes.bulk(first, len(self.workers)) if self._queue.num_parts == 1 else 0
            parts, rows = self._queue.take(first, bulk or self.sizes.most(shapes), self._now(), self._refuse)
            if parts:
                return RequestBatch(parts, rows, self.settings.padded(rows), shapes)
        return None

    def _give(self, part: TicketPart, outputs: dict[str, Array]) -> None:
        ticket = part.ticket
        if part.rows == ticket.rows:
            ticket.outputs = outputs
        else:
            ticket.parts.append((part.start, outputs))
            if sum(len(next(iter(each.values()))) for _, each in ticket.parts) < ticket.rows:
                return
            ordered = [each for _, each in sorted(ticket.parts, key=lambda pair: pair[0])]
            ticket.outputs = {name: np.concatenate([each[name] for each in ordered]) for name in outputs}
        self._end(ticket)
        ticket.done(ticket)

    def _refuse(self, ticket: Ticket, refusal: RequestRefused) -> None:
        if not ticket.over:
            ticket.refusal = refusal
            self._end(ticket)
            ticket.done(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.over, ticket.inputs = True, {}
        self._queue.forget(ticket)
        self._live.discard(ticket)
