"""The chief of a job with parameter servers: starts servers and workers, hands work out, closes steps, mends.

It lives in the process of whoever called `fit`. Every member is a job of the engine by itself, so one that dies takes
nobody with it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from ..cluster import Device, Job, Line, resolve_host
from ..core import Event, PeerLost, RunError, WorkerFailed, event
from ..data import Ids
from ..strategies import MAIN, served
from .agenda import Agenda, FirstCome, Free, InOrder, Ticket
from .gathered import load_frames, take_state
from .hand import Hand
from .loop import Job as TrainingJob
from .roles import Place
from .worker import Membership, clip_factor, shares_of

Start = Callable[[Callable[[Any], Any], Device], Job]
"""Starts a function in a process of its own."""
TICK = 0.1
"""Seconds between two looks at what became of the processes."""
GRACE = 1.0
"""Seconds that members have to end by themselves."""
LATE = 30.0
"""Seconds after the last step in which workers that others have started may still come, to be told so."""
MAX_RESTARTS = 3
"""Members that may die one after another without a step in between."""


def _raise(error: Exception) -> None:
    raise error


class ServerLost(RunError):
    """A server died, and what it held since the last checkpoint with it."""


@dataclass
class _Member:
    """A server or a worker."""

    role: str
    number: int
    device: Device
    place: int
    job: Job | None = None
    thread: threading.Thread | None = None
    peer: bytes | None = None
    """Its connection, once it has joined."""
    address: str = ""
    ticket: int | None = None
    is_asking: bool = False
    step: int = -1
    """The last step that it has done a part of."""
    since: float = 0.0


@dataclass(frozen=True)
class Step:
    """What became of a step."""

    loss: float
    is_taken: bool = True


@dataclass
class Tale:
    """What happened between workers and servers, in numbers."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Gradients by how old the values were that they were computed with."""
    late: int = 0
    """Gradients that came after their step was closed."""
    lost_workers: int = 0
    lost_servers: int = 0
    applied: int = 0
    """Gradients in closed steps."""
    ledger: list[int] = field(default_factory=list)
    """By server: gradients that it has applied since it was filled, each of them once."""
    bytes: list[int] = field(default_factory=list)
    """By server: what came from workers and went to them, in shared memory or not."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "staleness": {str(age): count for age, count in sorted(self.staleness.items())},
            "late": self.late,
            "lost_workers": self.lost_workers,
            "lost_servers": self.lost_servers,
            "applied": self.applied,
            "ledger": self.ledger,
            "bytes": self.bytes,
        }


class Chief:
    """Keeps servers and workers together."""

    def __init__(
        self,
        hand: Hand,
        job: TrainingJob,
        devices: Sequence[Device],
        start: Start | Place,
        line: Line,
        timeout: float,
    ) -> None:
        self.hand, self.task, self.spec = hand, job.task, job.spec
        self.shares = shares_of(hand)
        self.tale = Tale()
        self._devices, self._start, self._line, self._timeout = devices, start, line, timeout
        self._is_placed = isinstance(start, Place)
        """Whether somebody else starts servers and workers, and starts them again."""
        self._token = start.token if isinstance(start, Place) else served.new_token()
        self._context = served.new_context()
        listens = (resolve_host(start.chief.name), start.chief.port) if isinstance(start, Place) else ("127.0.0.1", 0)
        self._listener = served.Listener(self._context, self._token, *listens)
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._servers: list[_Member] = []
        self._workers: dict[int, _Member] = {}
        self._peers: dict[bytes, _Member] = {}
        self._num_workers = 0
        self._told: set[str] = set()
        self._term = 0
        self._is_open = False
        self._failures = 0
        self._agenda: Agenda | None = None
        self._epoch = 0
        self._limit = 0
        self._next_ticket = 0
        self._answers: dict[int, tuple[Any, list[Any]]] = {}
        self._skips: dict[int, bool] = {}
        self._num_entered = 0
        """Gradients in closed steps since the servers were filled; each of them must have applied just these."""
        self._client: served.Client | None = None
        self._is_ending = False
        self.on_output: Callable[[int, str, str], None] = lambda rank, text, stream: None
        """Called with a worker's number, a line that it printed, and where."""

    # -- members --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts servers and workers, and gives the servers what the hand's network holds."""
        for number in range(self.spec.servers):
            self._servers.append(self._begin("server", number, number))
        for place in range(0 if self._is_placed else len(self._devices)):
            self._begin_worker(place)
        self.publish()
        self._client = served.Client(self.hand.model, self.shares, -1, None, self._token, self._timeout)
        self._client.on_wait = self._hear_news
        self._client.connect(self._crew())

    def _begin(self, role: str, number: int, place: int) -> _Member:
        device = Device("cpu") if role == "server" else self._devices[place]
        member = _Member(role, number, device, place)
        if isinstance(self._start, Place):
            return member
        # Each member gets a copy of what it is sent: a server needs no data, a worker no validation.
        task = self.task.replace(valid=None, metrics={})
        if role == "server":
            task = task.replace(data=(torch.zeros(1, 1),), collate=None, batch_size=1)
        work = Membership(
            task=task,
            spec=self.spec,
            role=role,
            number=number,
            chief=self._listener.address,
            token=self._token,
            timeout=self._timeout,
        )
        member.job = self._start(work.run, device)
        member.thread = threading.Thread(target=self._watch, args=(member,), name=f"{role}-{number}", daemon=True)
        member.thread.start()
        return member

    def _begin_worker(self, place: int) -> None:
        number, self._num_workers = self._num_workers, self._num_workers + 1
        self._workers[number] = self._begin("worker", number, place)

    def _watch(self, member: _Member) -> None:
        """Waits for a member's end; runs beside the chief, which hears of everything in its own time."""
        assert member.job is not None

        def on_event(rank: int, entry: Event) -> None:
            self._news.put(lambda: self._hear_event(entry))

        def on_output(rank: int, text: str, stream: str) -> None:
            self._news.put(lambda: self.on_output(member.place if member.role == "worker" else -1, text, stream))

        error: BaseException | None = None
        try:
            member.job.wait(on_event, on_output)
        except BaseException as failure:
            error = failure
        self._news.put(lambda: self._hear_end(member, error))

    def _hear_event(self, entry: Event) -> None:
        """Passes on what a member has to tell, once for all of them."""
        text = str(entry.get("text", ""))
        if entry["kind"] == "notice" and text not in self._told:
            self._told.add(text)
            self._line.report(entry)

    def _hear_end(self, member: _Member, error: BaseException | None) -> None:
        if self._is_ending:
            return
        died = error is None or (isinstance(error, WorkerFailed) and not error.traceback)
        if not died:
            assert error is not None
            raise error
        self._failures += 1
        reason = error.reason if isinstance(error, WorkerFailed) else "ended before its work was done"
        self._line.report(event("member_lost", role=member.role, number=member.number, reason=reason))
        if self._failures > MAX_RESTARTS:
            raise RunError(f"{member.role} {member.number} {reason}; {MAX_RESTARTS} others did so before it")
        if member.peer is not None:
            self._peers.pop(member.peer, None)
        if member.role == "server":
            self.tale.lost_servers += 1
            self._say(f"server {member.number} {reason}: it is started anew")
            self._servers[member.place] = self._begin("server", member.number, member.place)
            raise ServerLost(f"server {member.number} {reason}")
        self.tale.lost_workers += 1
        self._say(f"worker {member.number} {reason}: its samples are handed out again, another one is started")
        del self._workers[member.number]
        if member.ticket is not None and self._agenda is not None:
            self._agenda.give_back(member.ticket)
        self._begin_worker(member.place)

    def _say(self, text: str) -> None:
        self._line.report(event("notice", text=text))

    def _crew(self) -> served.Crew:
        return served.Crew(self._term, [server.address for server in self._servers])

    # -- the whole network ----------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Makes the hand's network and optimizer those of the servers; everybody starts from them."""
        self._is_open = False
        self._term += 1
        self._agenda = None
        self._next_ticket = self._num_entered = 0
        self._turn(lambda: all(server.peer is not None for server in self._servers), "servers to join")
        for number, server in enumerate(self._servers):
            load, frames = load_frames(self.hand, self.shares[number], number, self.spec.servers, self._term)
            self._send(server, load, frames)
        self._gather(served.Loaded, "servers to take their values")
        for table in served.tables_of(self.hand.model).values():
            table.whole = None
        for worker in self._workers.values():
            worker.ticket, worker.is_asking = None, False
        self._is_open = True
        for worker in self._workers.values():
            if worker.peer is not None:
                self._send(worker, self._crew())
        if self._client is not None:
            self._client.connect(self._crew())

    def refresh(self) -> None:
        """Makes the servers' values and slots those of the hand's network and optimizer."""
        for server in self._servers:
            self._send(server, served.Save(self.hand.num_steps))
        answers = self._gather(served.State, "servers to give their values")
        for number, (state, _) in enumerate(answers):
            if state.applied != self._num_entered:
                raise RunError(
                    f"server {number} has applied {state.applied} gradients since it was filled, but closed steps have "
                    f"{self._num_entered}: its values cannot be trusted, the last checkpoint can"
                )
        self.tale.ledger = [state.applied for state, _ in answers]
        self.tale.bytes = [state.wire for state, _ in answers]
        take_state(self.hand, self.shares, answers)

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, windows: Iterator[Ids]) -> None:
        """Hands out these batches from now on."""
        spec, first = self.spec, (windows, self.hand.num_steps, self._next_ticket)
        workers = len(self._devices)
        self._epoch = epoch
        if spec.staleness is None:
            self._agenda = Free(*first, parts=1)
        elif spec.backup:
            self._agenda = FirstCome(*first, workers - spec.backup, spec.backup, spec.accumulate)
        else:
            self._agenda = InOrder(*first, workers, spec.staleness, spec.accumulate)

    @property
    def is_settled(self) -> bool:
        """Whether the servers hold exactly the steps that were taken, and nothing is on its way."""
        in_order = self.spec.staleness is not None and not self.spec.backup
        return in_order or self._agenda is None or self._agenda.is_idle

    def take_step(self, limit: int) -> Step:
        """Waits until a step is complete, and closes it; nothing is handed out for steps from `limit` on."""
        agenda = self._agenda
        assert agenda is not None
        self._limit = limit
        closed: list[list[Ticket]] = []

        def is_complete() -> bool:
            tickets = agenda.complete()
            closed.extend([tickets] if tickets else [])
            return bool(closed)

        self._turn(is_complete, "")
        self._next_ticket = agenda.number
        self.tale.late, agenda.late = self.tale.late + agenda.late, 0
        self._failures = 0
        tickets = closed[0]
        self.tale.applied += len(tickets)
        self._num_entered += len(tickets)
        self.tale.staleness.update(ticket.staleness for ticket in tickets)
        total, count = sum(t.total for t in tickets), sum(t.count for t in tickets)
        is_taken = not any(self._skips.pop(ticket.number, False) for ticket in tickets)
        if self.spec.staleness is not None:
            is_taken = self._close(agenda.step - 1, tickets, count)
        return Step(total / count, is_taken)

    def _close(self, step: int, tickets: list[Ticket], count: float) -> bool:
        samples = sum(len(ticket.ids) for ticket in tickets)
        weighed = [served.Weighed(t.number, t.weight / count, len(t.ids) / samples) for t in tickets]
        is_measured = self.task.clip is not None or self.hand.skips
        for server in self._servers:
            self._send(server, served.Close(self._term, step, weighed, self.rates, is_measured))
        if not is_measured:
            return True
        squares = [message.square for message, _ in self._gather(served.Summed, "servers to sum gradients")]
        norm = sum(squares) ** 0.5
        is_taken = norm < float("inf") or not self.hand.skips
        scale = clip_factor(norm, self.task.clip) if is_taken else 0.0
        for server in self._servers:
            self._send(server, served.Apply(self._term, step, scale))
        return is_taken

    @property
    def rates(self) -> list[float]:
        """The learning rates as they are now, by group; 0 where an optimizer finds its own."""
        return [float(group.get("lr", 0.0)) for group in self.hand.optimizers[MAIN].param_groups]

    # -- messages -------------------------------------------------------------------------------------------------

    def _turn(self, is_done: Callable[[], bool], waiting_for: str) -> None:
        """Hears everybody until something is the case; what should come soon is waited for only so long."""
        deadline = time.monotonic() + self._timeout if waiting_for else float("inf")
        while True:
            self._hear_news()
            if is_done():
                return
            self._look_for_silence()
            self._hand_out()
            self._poller.poll(int(1000 * TICK))
            while (got := self._listener.receive()) is not None:
                self._hear(*got)
            if time.monotonic() > deadline:
                raise PeerLost("fit", "the chief", f"waited {self._timeout:.0f} s for {waiting_for}")

    def _hear_news(self) -> None:
        while not self._news.empty():
            self._news.get()()

    def _hear(self, peer: bytes, message: Any, frames: list[Any]) -> None:
        if isinstance(message, served.Join):
            self._welcome(peer, message)
            return
        member = self._peers.get(peer)
        if member is None:
            return
        if isinstance(message, served.Ask) and message.term == self._term:
            member.is_asking = True
        elif isinstance(message, served.Delivered) and message.term == self._term:
            self._receive(member, message)
        elif isinstance(message, served.Loaded | served.State | served.Summed):
            self._answers[member.number] = message, frames

    def _welcome(self, peer: bytes, message: served.Join) -> None:
        members = {m.number: m for m in self._servers} if message.role == "server" else self._workers
        member = members.get(message.number)
        if self._is_placed:
            member = self._expect(message, member)
        if member is None:
            return
        member.peer, member.address = peer, message.address
        self._peers[peer] = member
        if message.role == "worker" and self._is_open:
            self._send(member, self._crew())

    def _expect(self, message: served.Join, before: _Member | None) -> _Member | None:
        """A member that somebody else has started, maybe in place of one that is gone."""
        if message.role == "server":
            if before is not None and before.peer is not None:
                self._peers.pop(before.peer)
                before.peer = None
                self.tale.lost_servers += 1
                self._news.put(lambda: _raise(ServerLost(f"server {message.number} was started anew")))
            return before
        if before is not None:
            self._release(before)
        if 0 <= message.number < len(self._devices):
            self._workers[message.number] = _Member("worker", message.number, Device("cpu"), message.number)
        return self._workers.get(message.number)

    def _release(self, worker: _Member) -> None:
        """Takes back what a worker has that is gone."""
        self.tale.lost_workers += 1
        self._say(f"worker {worker.number} is gone: its samples are handed out again")
        self._peers.pop(worker.peer or b"", None)
        del self._workers[worker.number]
        if worker.ticket is not None and self._agenda is not None:
            self._agenda.give_back(worker.ticket)

    def _look_for_silence(self) -> None:
        """A worker that takes too long is taken for gone: it may be frozen, or its host may be."""
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.ticket is not None and w.since < now - self._timeout]:
            if worker.job is None:
                self._release(worker)
            else:
                worker.job.kill()
                worker.since = now

    def _receive(self, worker: _Member, message: served.Delivered) -> None:
        worker.ticket, worker.is_asking = None, True
        assert self._agenda is not None
        ticket = self._agenda.deliver(message.ticket)
        if ticket is None:
            # The servers keep its gradient until the next one with the same ticket takes its place.
            return
        worker.step = ticket.step
        ticket.total, ticket.count, ticket.weight = message.total, message.count, message.weight
        ticket.staleness = message.staleness
        if message.skipped:
            self._skips[message.ticket] = True

    def _hand_out(self) -> None:
        agenda = self._agenda
        if agenda is None or not self._is_open:
            return
        # A person who asked to stop wants what is under way to end, and nothing new.
        limit = self._limit if not self._line.stopping or agenda.is_idle else min(self._limit, agenda.step)
        for worker in self._workers.values():
            if not worker.is_asking or worker.peer is None:
                continue
            ticket = agenda.take(limit, again=worker.step == agenda.step)
            if ticket is None:
                continue
            worker.ticket, worker.is_asking, worker.since = ticket.number, False, time.monotonic()
            oldest = 0 if self.spec.staleness is None else max(0, ticket.step - self.spec.staleness)
            rates = self.rates if self.spec.staleness is None else []
            part = served.Part(self._term, ticket.number, self._epoch, ticket.step, oldest, rates)
            self._send(worker, part, [ticket.ids.tobytes()])

    def _gather(self, kind: type[Any], waiting_for: str) -> list[tuple[Any, list[Any]]]:
        """The answers of all servers, in order."""
        self._answers = {}
        self._turn(lambda: len(self._answers) == len(self._servers), waiting_for)
        answers = [self._answers[number] for number in range(len(self._servers))]
        assert all(isinstance(message, kind) for message, _ in answers)
        return answers

    def _send(self, member: _Member, message: Any, frames: Sequence[Any] = ()) -> None:
        assert member.peer is not None
        self._listener.send(member.peer, message, frames)

    def close(self) -> None:
        """Ends all members, by themselves where they can, and lets their connections go."""
        self._is_ending, self._is_open = True, False
        if self._is_placed:
            self._await_late()
        members = [*self._servers, *self._workers.values()]
        for member in members:
            if member.peer is not None:
                self._send(member, served.End())
        deadline = time.monotonic() + GRACE
        for member in members:
            if member.thread is None or member.job is None:
                continue
            member.thread.join(max(0.0, deadline - time.monotonic()))
            if member.thread.is_alive():
                member.job.kill()
                member.thread.join()
        if self._client is not None:
            self._client.close()
        self._listener.close()
        self._context.term()

    def _await_late(self) -> None:
        """Lets workers join that others were too fast for: they must hear that it is over, and from nobody else can."""
        deadline = time.monotonic() + min(LATE, self._timeout)
        while len(self._workers) < len(self._devices) and time.monotonic() < deadline:
            self._poller.poll(int(1000 * TICK))
            while (got := self._listener.receive()) is not None:
                self._hear(*got)
