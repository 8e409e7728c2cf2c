"""The coordinator of a job with parameter servers: starts members, hands out work, closes steps, replaces failures.

It runs in the process that called `fit`. Every server, follower and worker is a separate job of the engine, so the
failure of one does not end the others.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import zmq

from ..core import Event, NoProgress, PeerLost, RunError, WorkerFailed, event
from ..data import Ids
from ..distributed import ControlChannel, Device, resolve_host, this_host
from ..launcher import RankFailure, RestartPolicy, RunningJob
from ..strategies import MAIN
from ..training import Hand
from ..training import Job as TrainingJob
from .checkpoints import forget_tables, load_frames, take_state
from .client import ParameterClient
from .members import Membership, clip_factor, shares_of
from .messages import (
    Apply,
    Close,
    Delivered,
    EndOfWork,
    FollowerFilled,
    Heartbeat,
    JoinRequest,
    Loaded,
    NewTerm,
    Save,
    ServerList,
    ServerState,
    SetFollower,
    Summed,
    TicketWeight,
    Unauthenticated,
    Unreachable,
    WorkerGone,
    WorkPart,
    WorkRequest,
)
from .roles import ProcessRole
from .sockets import MessageListener, new_context, new_token
from .work_schedule import AsynchronousSchedule, FirstArrivalSchedule, InOrderSchedule, WorkSchedule, WorkTicket

Start = Callable[[Callable[[Any], Any], Device], RunningJob]
"""Starts a function in a separate process on a device."""
Request = Callable[[int], tuple[Any, Sequence[Any]]]
"""Maps a server's number to the request for it: a message and its frames."""
ANSWER = 2.0
"""Seconds in which a server must answer after a worker reported it unreachable."""
TICK = 0.1
"""Seconds that one poll for messages may block."""
GRACE = 1.0
"""Seconds that members have to exit by themselves before they are killed."""
LATE = 30.0
"""Seconds after the last step in which externally started workers may still join, to learn that the work has ended."""


def _raise(error: Exception) -> None:
    raise error


class ServerFailed(RunError):
    """A server failed without a filled follower: its state since the last checkpoint is lost."""


@dataclass
class _Member:
    """A server, a follower or a worker."""

    role: str
    number: int
    device: Device
    place: int
    job: RunningJob | None = None
    thread: threading.Thread | None = None
    peer: bytes | None = None
    """Its connection, once it has joined."""
    address: str = ""
    ticket: int | None = None
    is_asking: bool = False
    step: int = -1
    """The last step that it delivered a part of."""
    since: float = 0.0
    received_at: float = 0.0
    """The monotonic time of the last message from this member."""
    is_led: bool = False
    """For a follower: whether its server has its address."""
    is_filled: bool = False
    """For a follower: whether it holds all that its server acknowledges."""
    round: int = 0
    """The number of failure rounds when it was started."""


@dataclass(frozen=True)
class StepResult:
    """The loss of a closed step, and whether it was applied."""

    loss: float
    is_taken: bool = True


@dataclass
class ServerStats:
    """Counters of the traffic between workers and servers."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by the staleness of the values they were computed with."""
    late: int = 0
    """Gradients that arrived after their step was closed."""
    lost_workers: int = 0
    lost_servers: int = 0
    lost_followers: int = 0
    applied: int = 0
    """Gradients in closed steps."""
    applied_counts: list[int] = field(default_factory=list)
    """By server: gradients it has applied since it was filled, each counted once."""
    bytes: list[int] = field(default_factory=list)
    """By server: bytes exchanged with workers, through shared memory or sockets."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "staleness": {str(age): count for age, count in sorted(self.staleness.items())},
            "late": self.late,
            "lost_workers": self.lost_workers,
            "lost_servers": self.lost_servers,
            "lost_followers": self.lost_followers,
            "applied": self.applied,
            "ledger": self.applied_counts,
            "bytes": self.bytes,
        }


class ServerCoordinator:
    """Coordinates the parameter servers, their followers and the workers of one run."""

    def __init__(
        self,
        hand: Hand,
        job: TrainingJob,
        devices: Sequence[Device],
        start: Start | ProcessRole,
        channel: ControlChannel,
        timeout: float,
    ) -> None:
        self.hand, self.task, self.spec = hand, job.task, job.spec
        self._every = job.profile
        self.shares = shares_of(hand)
        self.stats = ServerStats()
        self._devices, self._start, self._channel, self._timeout = devices, start, channel, timeout
        self._is_placed = isinstance(start, ProcessRole)
        """Whether servers and workers are started and restarted externally (from a cluster description)."""
        self._token = start.token if isinstance(start, ProcessRole) else new_token()
        self._context = new_context()
        listens = (
            (resolve_host(start.chief.name), start.chief.port) if isinstance(start, ProcessRole) else ("127.0.0.1", 0)
        )
        self._listener = MessageListener(self._context, self._token, timeout, *listens)
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)
        self._queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._servers: list[_Member] = []
        self._followers: dict[int, _Member] = {}
        self._closes: deque[tuple[Close, float | None]] = deque(maxlen=2 + (self.spec.staleness or 0))
        """The last closed steps with their scale factors: a promoted follower may lack unacknowledged ones."""
        self._workers: dict[int, _Member] = {}
        self._peers: dict[bytes, _Member] = {}
        self._num_workers = 0
        self._reported: set[str] = set()
        # Random, so that the state of a server from another coordinator's run does not match this run's term.
        self._term = secrets.randbelow(1 << 30)
        self._is_open = False
        self._restart_policy, self._round = RestartPolicy(), 0
        self._schedule: WorkSchedule | None = None
        self._epoch = 0
        self._limit = 0
        self._next_ticket = 0
        self._asked: dict[type[Any], tuple[Request, dict[int, tuple[Any, list[Any]]]]] = {}
        """Pending requests to servers by type of the answer, with the answers received so far."""
        self._checked_at = 0.0
        self._skips: dict[int, bool] = {}
        self._num_entered = 0
        """Gradients in closed steps since the servers were filled; every server must have applied exactly these."""
        self._client: ParameterClient | None = None
        self._is_ending = False
        self.on_output: Callable[[int, str, str], None] = lambda rank, text, stream: None
        """Called with a worker's index (-1 for servers), a line that it printed, and the stream."""

    # -- members --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start servers and workers, and load the hand's network and optimizer state into the servers."""
        for number in range(self.spec.servers):
            self._servers.append(self._start_member("server", number, number))
            if self.spec.followers:
                self._followers[number] = self._start_member("follower", number, number)
        for place in range(0 if self._is_placed else len(self._devices)):
            self._start_worker(place)
        self._client = ParameterClient(self.hand.model, self.shares, -1, None, self._token, self._timeout)
        self._client.on_wait = self._process_messages
        self.publish(with_followers=True)

    def _start_member(self, role: str, number: int, place: int) -> _Member:
        device = self._devices[place] if role == "worker" else Device("cpu")
        member = _Member(role, number, device, place, round=self._round)
        if isinstance(self._start, ProcessRole):
            return member
        # Every member receives a copy of the task: a server needs no data, a worker no validation.
        task = self.task.replace(valid=None, metrics={})
        if role != "worker":
            task = task.replace(data=(torch.zeros(1, 1),), collate=None, batch_size=1)
        work = Membership(
            task=task,
            spec=self.spec,
            role=role,
            number=number,
            coordinator=self._listener.address,
            token=self._token,
            timeout=self._timeout,
            every=self._every,
        )
        member.job = self._start(work.run, device)
        member.thread = threading.Thread(target=self._watch, args=(member,), name=f"{role}-{number}", daemon=True)
        member.thread.start()
        return member

    def _start_worker(self, place: int) -> None:
        number, self._num_workers = self._num_workers, self._num_workers + 1
        self._workers[number] = self._start_member("worker", number, place)

    def _watch(self, member: _Member) -> None:
        """Wait for a member to exit, in a thread; queue its events, output and exit for the coordinator's thread."""
        assert member.job is not None

        def on_event(rank: int, entry: Event) -> None:
            self._queued.put(lambda: self._forward_event(entry))

        def on_output(rank: int, text: str, stream: str) -> None:
            self._queued.put(lambda: self.on_output(member.place if member.role == "worker" else -1, text, stream))

        error: BaseException | None = None
        try:
            member.job.wait(on_event, on_output)
        except BaseException as failure:
            error = failure
        self._queued.put(lambda: self._on_exit(member, error))

    def _forward_event(self, entry: Event) -> None:
        """Forward a member's profiles and notices; equal notices are reported once."""
        if entry["kind"] == "profile":
            self._channel.report(entry)
        text = str(entry.get("text", ""))
        if entry["kind"] == "notice" and text not in self._reported:
            self._reported.add(text)
            self._channel.report(entry)

    def _on_exit(self, member: _Member, error: BaseException | None) -> None:
        if self._is_ending:
            return
        died = error is None or (isinstance(error, WorkerFailed) and not error.traceback)
        if not died:
            assert error is not None
            raise error
        reason = error.reason if isinstance(error, WorkerFailed) else "ended before its work was done"
        self._check_restart_policy(member, reason)
        if member.peer is not None:
            self._peers.pop(member.peer, None)
        if member.role == "follower":
            self._on_follower_failure(member, reason)
            return
        if member.role == "server":
            self._on_server_failure(member, reason)
            return
        self.stats.lost_workers += 1
        self._notice(f"worker {member.number} {reason}: its samples are assigned again, and a new worker is started")
        del self._workers[member.number]
        if member.ticket is not None and self._schedule is not None:
            self._schedule.give_back(member.ticket)
        self._forget_worker(member)
        self._start_worker(member.place)

    def _check_restart_policy(self, member: _Member, reason: str) -> None:
        """Raise `NoProgress` where the restart policy gives up; members that fail together count as one round."""
        self._channel.report(event("member_lost", role=member.role, number=member.number, reason=reason))
        if member.round != self._round:
            return
        self._round += 1
        loss = RankFailure(member.number, this_host(), f"{member.role} {member.number} {reason}")
        if not self._restart_policy.allows_restart([loss], size=len(self._devices), step=self.hand.num_steps):
            raise NoProgress(
                member.number, loss.host, f"{loss.reason}, repeatedly, without completing a step in between"
            )

    def _forget_worker(self, worker: _Member) -> None:
        """Let servers free what they share with a worker that has exited."""
        for holder in (*self._servers, *self._followers.values()):
            if holder.peer is not None:
                self._send(holder, WorkerGone(worker.number))

    def _on_server_failure(self, member: _Member, reason: str) -> None:
        """Promote the failed server's follower; without a filled one, raise `ServerFailed` to refill all servers."""
        number, follower = member.number, self._followers.get(member.number)
        self.stats.lost_servers += 1
        if follower is not None and follower.is_filled:
            self._notice(f"server {number} {reason}: its follower replaces it, and gets a new follower")
            self._promote(follower)
            return
        if follower is not None:
            follower.is_led = False
        self._servers[number] = self._start_member("server", number, number)
        raise ServerFailed(f"server {number} {reason}, so it is restarted")

    def _on_follower_failure(self, member: _Member, reason: str) -> None:
        self.stats.lost_followers += 1
        self._notice(f"the follower of server {member.number} {reason}: a new follower is started and filled")
        if self._servers[member.number].peer is not None:
            self._send(self._servers[member.number], SetFollower(""))
        self._followers[member.number] = self._start_member("follower", member.number, member.number)

    def _promote(self, follower: _Member) -> None:
        """Make a follower the server, under a new term; work in progress is handed out again."""
        number = follower.number
        follower.role, follower.is_filled = "server", False
        self._servers[number] = follower
        self._followers[number] = self._start_member("follower", number, number)
        self._is_open = False
        self._term += 1
        for worker in self._workers.values():
            if worker.ticket is not None and self._schedule is not None:
                self._schedule.give_back(worker.ticket)
            worker.ticket, worker.is_asking = None, False
        term = self._term
        self._ask(lambda _: (NewTerm(term), ()), Loaded, "servers to continue")
        if self._term != term:
            return
        self._resend(follower)
        self._announce()

    def _resend(self, server: _Member) -> None:
        """Resend to a server what it may have missed: closed steps and unanswered requests."""
        for close, scale in list(self._closes):
            again = msgspec.structs.replace(close, term=self._term)
            self._send(server, again)
            if close.is_measured and scale is not None:
                self._send(server, Apply(self._term, close.step, scale))
        for request, answers in list(self._asked.values()):
            if server.number not in answers:
                self._send(server, *request(server.number))

    def _announce(self) -> None:
        """Send the servers' addresses to all workers and to the coordinator's own client."""
        self._is_open = True
        for worker in self._workers.values():
            if worker.peer is not None:
                self._send(worker, self._server_list())
        if self._client is not None:
            self._client.connect(self._server_list())

    def _notice(self, text: str) -> None:
        self._channel.report(event("notice", text=text))

    def _server_list(self) -> ServerList:
        return ServerList(self._term, [server.address for server in self._servers])

    # -- the whole network ----------------------------------------------------------------------------------------

    def publish(self, *, with_followers: bool = False) -> None:
        """Load the hand's network and optimizer state into the servers; all workers start from it.

        If a server fails during this, all servers are filled again.
        """
        while True:
            try:
                self._fill()
                if with_followers:
                    self._process_until(
                        lambda: all(f.is_filled for f in self._followers.values()), "followers to be filled"
                    )
                break
            except ServerFailed as lost:
                self._notice(str(lost))
        forget_tables(self.hand)

    def _fill(self) -> None:
        self._is_open = False
        self._term += 1
        self._schedule = None
        self._next_ticket = self._num_entered = 0
        self._closes.clear()
        for follower in self._followers.values():
            follower.is_filled = False
        self._process_until(lambda: all(server.peer is not None for server in self._servers), "servers to join")

        def load(number: int) -> tuple[Any, Sequence[Any]]:
            found: tuple[Any, Sequence[Any]] = load_frames(
                self.hand, self.shares[number], number, self.spec.servers, self._term
            )
            return found

        self._ask(load, Loaded, "servers to take their values")
        for worker in self._workers.values():
            worker.ticket, worker.is_asking = None, False
        self._announce()
        for follower in self._followers.values():
            self._pair(follower)

    def _pair(self, follower: _Member) -> None:
        """Let the server fill its follower, once both have joined and the server holds values."""
        server = self._servers[follower.number]
        if self._is_open and follower.peer is not None and server.peer is not None and not follower.is_led:
            follower.is_led = True
            self._send(server, SetFollower(follower.address))

    def refresh(self) -> None:
        """Copy the servers' values and optimizer state into the hand's network and optimizer."""
        save = Save()
        answers = self._ask(lambda _: (save, ()), ServerState, "servers to give their values")
        for number, (state, _) in enumerate(answers):
            if state.applied != self._num_entered:
                raise RunError(
                    f"server {number} has applied {state.applied} gradients since it was filled, but the completed "
                    f"steps have {self._num_entered}, so its values are wrong; resume from the last checkpoint"
                )
        self.stats.applied_counts = [state.applied for state, _ in answers]
        self.stats.bytes = [state.wire for state, _ in answers]
        take_state(self.hand, self.shares, answers)

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, windows: Iterator[Ids]) -> None:
        """Hand out the batches of this epoch from now on."""
        spec, first = self.spec, (windows, self.hand.num_steps, self._next_ticket)
        workers = len(self._devices)
        self._epoch = epoch
        if spec.staleness is None:
            self._schedule = AsynchronousSchedule(*first, parts=1)
        elif spec.backup:
            self._schedule = FirstArrivalSchedule(*first, workers - spec.backup, spec.backup, spec.accumulate)
        else:
            self._schedule = InOrderSchedule(*first, workers, spec.staleness, spec.accumulate)

    @property
    def is_settled(self) -> bool:
        """Whether the servers hold exactly the closed steps, with nothing in flight."""
        in_order = self.spec.staleness is not None and not self.spec.backup
        return in_order or self._schedule is None or self._schedule.is_idle

    def take_step(self, limit: int) -> StepResult:
        """Wait until a step is complete and close it; nothing is handed out for steps from `limit` on."""
        schedule = self._schedule
        assert schedule is not None
        self._limit = limit
        closed: list[list[WorkTicket]] = []

        def is_complete() -> bool:
            tickets = schedule.complete()
            closed.extend([tickets] if tickets else [])
            return bool(closed)

        self._process_until(is_complete, "")
        self._next_ticket = schedule.number
        self.stats.late, schedule.late = self.stats.late + schedule.late, 0
        tickets = closed[0]
        self.stats.applied += len(tickets)
        self._num_entered += len(tickets)
        self.stats.staleness.update(ticket.staleness for ticket in tickets)
        total, count = sum(t.total for t in tickets), sum(t.count for t in tickets)
        is_taken = not any(self._skips.pop(ticket.number, False) for ticket in tickets)
        if self.spec.staleness is not None:
            is_taken = self._close(schedule.step - 1, tickets, count)
        return StepResult(total / count, is_taken)

    def _close(self, step: int, tickets: list[WorkTicket], count: float) -> bool:
        samples = sum(len(ticket.ids) for ticket in tickets)
        weighed = [TicketWeight(t.number, t.weight / count, len(t.ids) / samples) for t in tickets]
        is_measured = self.task.clip is not None or self.hand.skips
        rates = self.rates

        def close(_: int) -> tuple[Any, Sequence[Any]]:
            return Close(self._term, step, weighed, rates, is_measured), ()

        self._closes.append((close(0)[0], None))
        if not is_measured:
            for server in self._servers:
                self._send(server, *close(0))
            return True
        squares = [message.square for message, _ in self._ask(close, Summed, "servers to sum gradients")]
        norm = sum(squares) ** 0.5
        is_taken = norm < float("inf") or not self.hand.skips
        scale = clip_factor(norm, self.task.clip) if is_taken else 0.0
        self._closes[-1] = (close(0)[0], scale)
        for server in self._servers:
            self._send(server, Apply(self._term, step, scale))
        return is_taken

    @property
    def rates(self) -> list[float]:
        """The current learning rate of each parameter group; 0 where an optimizer has none."""
        return [float(group.get("lr", 0.0)) for group in self.hand.optimizers[MAIN].param_groups]

    # -- messages -------------------------------------------------------------------------------------------------

    def _process_until(self, is_done: Callable[[], bool], waiting_for: str) -> None:
        """Process messages until `is_done`; with `waiting_for` raise `PeerLost` after the timeout."""
        deadline = time.monotonic() + self._timeout if waiting_for else float("inf")
        while True:
            self._run_queued()
            if is_done():
                return
            self._assign_work()
            self._poller.poll(int(1000 * TICK))
            self._process_messages()
            if time.monotonic() > deadline:
                raise PeerLost("fit", "the coordinator", f"waited {self._timeout:.0f} s for {waiting_for}")

    def _process_messages(self) -> None:
        """Process all received messages and check for members that stopped answering."""
        while (got := self._listener.receive()) is not None:
            self._on_message(*got)
        self._check_silence()
        self._run_queued()

    def _run_queued(self) -> None:
        while not self._queued.empty():
            self._queued.get()()

    def _on_message(self, peer: bytes, message: Any, frames: list[Any]) -> None:
        if isinstance(message, JoinRequest):
            self._admit(peer, message)
            return
        member = self._peers.get(peer)
        if member is None:
            # The coordinator had given this member up: let it know.
            self._listener.send(peer, Unauthenticated())
            return
        member.received_at = time.monotonic()
        if isinstance(message, WorkRequest) and message.term == self._term:
            member.is_asking = True
        elif isinstance(message, Delivered) and message.term == self._term:
            self._receive(member, message)
        elif isinstance(message, FollowerFilled):
            follower = self._followers.get(member.number)
            if follower is not None and follower.address == message.address and self._servers[member.number] is member:
                follower.is_filled = True
                self._channel.report(event("followed", server=member.number))
        elif isinstance(message, Unreachable):
            self._on_unreachable(member, message)
        elif type(message) in self._asked and self._is_answer(message):
            self._asked[type(message)][1][member.number] = message, frames

    def _is_answer(self, message: Any) -> bool:
        """Return whether a message answers the pending request."""
        if isinstance(message, Summed):
            # A server's sum stays valid when another server fails and the term changes.
            return message.step == self._closes[-1][0].step
        return bool(getattr(message, "term", self._term) == self._term)

    def _admit(self, peer: bytes, message: JoinRequest) -> None:
        member = self._worker_for(message) if message.role == "worker" else self._holder_for(message)
        if member is None:
            return
        if member.peer is not None:
            self._peers.pop(member.peer, None)
        member.peer, member.address, member.received_at = peer, message.address, time.monotonic()
        self._peers[peer] = member
        if member.role == "worker" and self._is_open:
            self._send(member, self._server_list())
        elif member.role == "follower":
            self._pair(member)
        elif message.term == self._term:
            self._resend(member)

    def _worker_for(self, message: JoinRequest) -> _Member | None:
        """Return the member for a joining worker; a worker that rejoins gives its work back first."""
        number, before = message.number, self._workers.get(message.number)
        if not self._is_placed:
            if before is not None and before.ticket is not None and self._schedule is not None:
                self._schedule.give_back(before.ticket)
                before.ticket, before.is_asking = None, False
            return before
        if before is not None:
            self._release(before)
        if 0 <= number < len(self._devices):
            self._workers[number] = _Member("worker", number, Device("cpu"), number, round=self._round)
        return self._workers.get(number)

    def _holder_for(self, message: JoinRequest) -> _Member | None:
        """Return the member for a joining server or follower: its previous one if still current, else a vacant one."""
        if not 0 <= message.number < len(self._servers):
            return None
        server, follower = self._servers[message.number], self._followers.get(message.number)
        for member in (server, *([follower] if follower is not None else [])):
            if member.peer is not None and message.term == self._term and message.address == member.address:
                return member
        if not self._is_placed:
            return server if message.role == "server" else follower
        if server.peer is not None and message.address == server.address:
            self._on_placed_failure(server, "was restarted")
            server, follower = self._servers[message.number], self._followers.get(message.number)
        if message.role == "server" and server.peer is None:
            return server
        if follower is not None and follower.peer is not None:
            self._peers.pop(follower.peer, None)
            self._on_follower_failure(follower, "was restarted")
        return self._followers.get(message.number)

    def _on_placed_failure(self, member: _Member, reason: str) -> None:
        """Handle the failure of an externally started server or follower, which may be restarted externally."""
        self._peers.pop(member.peer or b"", None)
        member.peer = None
        self._check_restart_policy(member, reason)
        if member.role == "follower":
            self._on_follower_failure(member, reason)
            return
        try:
            self._on_server_failure(member, reason)
        except ServerFailed as lost:
            self._queued.put(lambda lost=lost: _raise(lost))  # type: ignore[misc]

    def _on_unreachable(self, member: _Member, message: Unreachable) -> None:
        """Handle a report that a server cannot reach its follower, or a worker a server."""
        follower = self._followers.get(message.number)
        if member.role == "server":
            if follower is not None and follower.address == message.address:
                self._end(follower)
        elif self._is_placed and 0 <= message.number < len(self._servers):
            server = self._servers[message.number]
            if server.peer is not None:
                server.received_at = min(server.received_at, time.monotonic() - self._timeout / 2 + ANSWER)
                self._send(server, Heartbeat())

    def _end(self, member: _Member) -> None:
        if member.job is not None:
            member.job.kill()
        else:
            self._on_placed_failure(member, "does not answer")

    def _release(self, worker: _Member) -> None:
        """Remove a failed worker and hand its work out again."""
        self.stats.lost_workers += 1
        self._notice(f"worker {worker.number} has failed: its samples are assigned again")
        self._peers.pop(worker.peer or b"", None)
        del self._workers[worker.number]
        if worker.ticket is not None and self._schedule is not None:
            self._schedule.give_back(worker.ticket)
        self._forget_worker(worker)

    def _check_silence(self) -> None:
        """Give up members that were silent for too long: the process or its host may hang."""
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.ticket is not None and w.since < now - self._timeout]:
            if worker.job is None:
                self._release(worker)
            else:
                worker.job.kill()
                worker.since = now
        away, self._checked_at = now - self._checked_at, now
        holders = [m for m in (*self._servers, *self._followers.values()) if m.peer is not None and m.job is None]
        for member in holders if self._is_placed else ():
            if away > self._timeout / 8:
                # The coordinator itself was not receiving messages since the last check.
                member.received_at = now
            if now - max(member.received_at, member.since) > self._timeout / 8:
                member.since = now
                self._send(member, Heartbeat())
            if now - member.received_at > self._timeout / 2:
                self._on_placed_failure(member, f"was silent for {now - member.received_at:.0f} s")

    def _receive(self, worker: _Member, message: Delivered) -> None:
        worker.ticket, worker.is_asking = None, True
        assert self._schedule is not None
        ticket = self._schedule.deliver(message.ticket)
        if ticket is None:
            # The servers keep its gradient until the next one with the same ticket replaces it.
            return
        worker.step = ticket.step
        ticket.total, ticket.count, ticket.weight = message.total, message.count, message.weight
        ticket.staleness = message.staleness
        if message.skipped:
            self._skips[message.ticket] = True

    def _assign_work(self) -> None:
        schedule = self._schedule
        if schedule is None or not self._is_open:
            return
        # After a stop request, work in flight is completed and no new step is started.
        limit = self._limit if not self._channel.stopping or schedule.is_idle else min(self._limit, schedule.step)
        for worker in self._workers.values():
            if not worker.is_asking or worker.peer is None:
                continue
            ticket = schedule.take(limit, again=worker.step == schedule.step)
            if ticket is None:
                continue
            worker.ticket, worker.is_asking, worker.since = ticket.number, False, time.monotonic()
            oldest = 0 if self.spec.staleness is None else max(0, ticket.step - self.spec.staleness)
            rates = self.rates if self.spec.staleness is None else []
            part = WorkPart(self._term, ticket.number, self._epoch, ticket.step, oldest, rates)
            self._send(worker, part, [ticket.ids.tobytes()])

    def _ask(self, request: Request, kind: type[Any], waiting_for: str) -> list[tuple[Any, list[Any]]]:
        """Send a request to all servers, and to replacements of failed ones; return the answers in server order."""
        answers: dict[int, tuple[Any, list[Any]]] = {}
        before, term = self._asked.get(kind), self._term
        self._asked[kind] = request, answers
        try:
            for server in self._servers:
                if server.peer is not None:
                    self._send(server, *request(server.number))
            # If another server fails while this waits, the term changes and a request for the new term replaces it.
            self._process_until(
                lambda: len(answers) == len(self._servers) or (kind is Loaded and self._term != term),
                waiting_for,
            )
        finally:
            del self._asked[kind]
            if before is not None:
                self._asked[kind] = before
        return [answers[number] for number in sorted(answers)]

    def _send(self, member: _Member, message: Any, frames: Sequence[Any] = ()) -> None:
        assert member.peer is not None
        self._listener.send(member.peer, message, frames)

    def close(self) -> None:
        """Ask all members to exit, kill those that do not in time, and close the connections."""
        self._is_ending, self._is_open = True, False
        if self._is_placed:
            self._await_late_workers()
        members = [*self._servers, *self._followers.values(), *self._workers.values()]
        for member in members:
            if member.peer is not None:
                self._send(member, EndOfWork())
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

    def _await_late_workers(self) -> None:
        """Let late workers join, so that they learn that work has ended; they cannot learn it elsewhere."""
        deadline = time.monotonic() + min(LATE, self._timeout)
        while len(self._workers) < len(self._devices) and time.monotonic() < deadline:
            self._poller.poll(int(1000 * TICK))
            while (got := self._listener.receive()) is not None:
                self._on_message(*got)
