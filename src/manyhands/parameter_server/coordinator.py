"""The coordinator of a job with parameter servers: loads the servers, closes steps, and processes all messages.

It runs in the process that called `fit`. Every server, follower and worker is a separate job of the engine, so the
failure of one does not end the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import PeerLost, RunError, event
from ..data import Ids
from ..distributed import Device
from ..strategies import MAIN
from ..training import Hand
from ..training import Job as TrainingJob
from .checkpoints import forget_tables, load_frames, take_state
from .client import ParameterClient
from .failover import Failover, ServerFailed, ServerStats
from .member_jobs import MemberConnections, MemberJobs, MemberRecord, Start
from .members import Membership, clip_factor, shares_of
from .messages import (
    Close,
    Delivered,
    EndOfWork,
    FollowerFilled,
    JoinRequest,
    Loaded,
    Save,
    ServerState,
    TicketWeight,
    Unreachable,
    WorkRequest,
)
from .roles import ProcessRole
from .server_group import ServerGroup
from .work_schedule import WorkTicket
from .worker_group import WorkerGroup

LATE = 30.0
"""Seconds after the last step in which externally started workers may still join, to learn that the job has ended."""


@dataclass(frozen=True)
class StepResult:
    """The loss of a closed step, and whether the servers applied its update."""

    loss: float
    is_taken: bool = True


class ServerCoordinator:
    """Coordinates the parameter servers, their followers and the workers of one run."""

    def __init__(
        self, hand: Hand, job: TrainingJob, devices: Sequence[Device], start: Start | ProcessRole, timeout: float
    ) -> None:
        self.hand, self.task, self.spec = hand, job.task, job.spec
        self.stats = ServerStats()
        self._shares, self._channel, self._timeout = shares_of(hand), hand.world.channel, timeout
        self._connections = connections = MemberConnections(start, timeout)
        membership = Membership(
            # Every member receives a copy of the task, and none validates.
            task=self.task.replace(valid=None, metrics={}),
            spec=self.spec,
            role="",
            number=-1,
            coordinator=connections.address,
            token=connections.token,
            timeout=timeout,
            every=job.profile,
        )
        self.jobs = jobs = MemberJobs(membership, devices, start, self._channel)
        self._servers = ServerGroup(jobs, connections, self._process_until, num_closes=2 + (self.spec.staleness or 0))
        self._workers = WorkerGroup(self.spec, jobs, connections)
        self._failover = Failover(
            hand, self.stats, jobs, connections, self._servers, self._workers, self._announce, timeout
        )
        self._num_entered = 0
        """Number of gradients in closed steps since the servers were loaded; each server must have applied as many."""
        self._client: ParameterClient | None = None

    def open(self) -> None:
        """Start servers and workers, and load the hand's network and optimizer state into the servers."""
        self._servers.start(self.spec.servers, with_followers=bool(self.spec.followers))
        for place in range(0 if self.jobs.is_placed else self.jobs.num_places):
            self._workers.start(place)
        self._client = ParameterClient(self.hand.model, self._shares, -1, None, self._connections.token, self._timeout)
        self._client.on_wait = self._process_messages
        self.publish(with_followers=True)

    def close(self) -> None:
        """Ask all members to exit, kill those that do not in time, and close the connections."""
        self.jobs.is_ending, self._servers.is_open = True, False
        if self.jobs.is_placed:
            self._await_late_workers()
        members = [*self._servers.members, *self._workers.workers.values()]
        self._connections.send_joined(members, EndOfWork())
        self.jobs.end(members)
        if self._client is not None:
            self._client.close()
        self._connections.close()

    def _await_late_workers(self) -> None:
        """Let late workers join, so that they learn that the job has ended; they cannot learn it elsewhere."""
        deadline = time.monotonic() + min(LATE, self._timeout)
        while len(self._workers.workers) < self.jobs.num_places and time.monotonic() < deadline:
            self._connections.poll()
            while (got := self._connections.receive()) is not None:
                self._on_message(*got)

    # -- the whole network ----------------------------------------------------------------------------------------

    def publish(self, *, with_followers: bool = False) -> None:
        """Load the hand's network and optimizer state into the servers, from which all workers then start.

        If a server fails during the loading, all servers are loaded again. `with_followers` also waits until every
        follower has its server's state.
        """
        while True:
            try:
                self._fill()
                if with_followers:
                    self._process_until(lambda: self._servers.are_followers_filled, "followers to be filled")
                break
            except ServerFailed as lost:
                self.hand.notice(str(lost))
        forget_tables(self.hand)

    def _fill(self) -> None:
        self._workers.clear()
        self._num_entered = 0
        self._servers.clear()

        def load(number: int) -> tuple[Any, Sequence[Any]]:
            found: tuple[Any, Sequence[Any]] = load_frames(
                self.hand, self._shares[number], number, self.spec.servers, self._servers.term
            )
            return found

        self._servers.ask(load, Loaded, "servers to take their values")
        self._workers.take_all_back()
        self._announce()
        for follower in self._servers.followers.values():
            self._servers.pair(follower)

    def _announce(self) -> None:
        """Send the servers' addresses to all workers and to the coordinator's own client."""
        self._servers.is_open = True
        self._connections.send_joined(self._workers.workers.values(), self._servers.addresses)
        if self._client is not None:
            self._client.connect(self._servers.addresses)

    def refresh(self) -> None:
        """Copy the servers' values and optimizer state into the hand's network and optimizer."""
        save = Save()
        answers = self._servers.ask(lambda _: (save, ()), ServerState, "servers to give their values")
        for number, (state, _) in enumerate(answers):
            if state.applied != self._num_entered:
                raise RunError(
                    f"server {number} has applied {state.applied} gradients since it was filled, but the completed "
                    f"steps have {self._num_entered}, so its values are wrong; resume from the last checkpoint"
                )
        self.stats.applied_counts = [state.applied for state, _ in answers]
        self.stats.bytes = [state.wire for state, _ in answers]
        take_state(self.hand, self._shares, answers)

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, windows: Iterator[Ids]) -> None:
        """Hand out the batches of this epoch from now on; `windows` yields the sample ids of each batch."""
        self._workers.begin_epoch(epoch, windows, self.hand.num_steps)

    @property
    def is_settled(self) -> bool:
        """Whether the servers' values contain exactly the updates of the closed steps, with no gradient in flight."""
        return self._workers.is_settled

    def take_step(self, limit: int) -> StepResult:
        """Wait until a step is complete and close it; workers get no samples of steps from `limit` on."""
        self._workers.limit = limit
        tickets: list[WorkTicket] = []

        def is_complete() -> bool:
            tickets.extend(self._workers.complete_step())
            return bool(tickets)

        self._process_until(is_complete, "")
        self.stats.late += self._workers.count_late()
        self.stats.applied += len(tickets)
        self._num_entered += len(tickets)
        self.stats.staleness.update(ticket.staleness for ticket in tickets)
        total, count = sum(t.total for t in tickets), sum(t.count for t in tickets)
        is_taken = not any(ticket.is_skipped for ticket in tickets)
        if self.spec.staleness is not None:
            is_taken = self._close(tickets, count)
        return StepResult(total / count, is_taken)

    def _close(self, tickets: list[WorkTicket], count: float) -> bool:
        samples = sum(len(ticket.ids) for ticket in tickets)
        weighed = [TicketWeight(t.number, t.weight / count, len(t.ids) / samples) for t in tickets]
        is_measured = self.task.clip is not None or self.hand.current.skips
        close = Close(self._servers.term, tickets[0].step, weighed, self.rates, is_measured)
        sums = self._servers.close_step(close)
        if not is_measured:
            return True
        norm = sum(message.square for message in sums) ** 0.5
        is_taken = norm < float("inf") or not self.hand.current.skips
        self._servers.apply_step(clip_factor(norm, self.task.clip) if is_taken else 0.0)
        return is_taken

    @property
    def rates(self) -> list[float]:
        """The current learning rate of each parameter group; 0 where an optimizer has none."""
        return [float(group.get("lr", 0.0)) for group in self.hand.optimizers[MAIN].param_groups]

    # -- messages -------------------------------------------------------------------------------------------------

    def _process_until(self, is_done: Callable[[], bool], waiting_for: str) -> None:
        """Process messages until `is_done` returns True.

        `waiting_for` names the condition in the `PeerLost` that is raised after the timeout; "" waits indefinitely.
        """
        deadline = time.monotonic() + self._timeout if waiting_for else float("inf")
        while True:
            self.jobs.run_queued()
            if is_done():
                return
            if self._servers.is_open:
                # Asynchronous workers apply their gradients themselves, at the rates of their ticket.
                rates = self.rates if self.spec.staleness is None else []
                self._workers.assign(self._servers.term, rates, is_stopping=self._channel.stopping)
            self._connections.poll()
            self._process_messages()
            if time.monotonic() > deadline:
                raise PeerLost("fit", "the coordinator", f"waited {self._timeout:.0f} s for {waiting_for}")

    def _process_messages(self) -> None:
        """Process all received messages and check for members that stopped answering."""
        while (got := self._connections.receive()) is not None:
            self._on_message(*got)
        self._failover.check_silence()
        self.jobs.run_queued()

    def _on_message(self, peer: bytes, message: Any, frames: list[Any]) -> None:
        if isinstance(message, JoinRequest):
            self._admit(peer, message)
            return
        member = self._connections.find(peer)
        if member is None:
            return
        member.received_at = time.monotonic()
        if isinstance(message, WorkRequest) and message.term == self._servers.term:
            member.is_asking = True
        elif isinstance(message, Delivered) and message.term == self._servers.term:
            self._workers.receive(member, message)
        elif isinstance(message, FollowerFilled):
            if self._servers.has_filled(member, message.address):
                self._channel.report(event("followed", server=member.number))
        elif isinstance(message, Unreachable):
            self._failover.on_unreachable(member, message)
        else:
            self._servers.take_answer(member, message, frames)

    def _admit(self, peer: bytes, message: JoinRequest) -> None:
        """Bind the connection of a joining process to its member record, and send it the member's first messages."""
        member = self._worker_for(message) if message.role == "worker" else self._holder_for(message)
        if member is None:
            return
        self._connections.bind(peer, member, message.address)
        if member.role == "worker" and self._servers.is_open:
            self._connections.send(member, self._servers.addresses)
        elif member.role == "follower":
            self._servers.pair(member)
        elif message.term == self._servers.term:
            self._servers.resend(member)

    def _worker_for(self, message: JoinRequest) -> MemberRecord | None:
        """Return the record of a joining worker, None to ignore it; a rejoining worker's samples are reassigned."""
        before = self._workers.workers.get(message.number)
        if self.jobs.is_placed:
            if before is not None:
                self._failover.release(before)
            return self._workers.admit(message.number)
        if before is not None:
            self._workers.take_back(before)
        return before

    def _holder_for(self, message: JoinRequest) -> MemberRecord | None:
        """Return the record of a joining server or follower: its earlier one if still current, else a vacant one."""
        server, follower = self._servers.find(message)
        for member in (server, follower) if message.term == self._servers.term else ():
            if member is not None and member.peer is not None and message.address == member.address:
                return member
        if self.jobs.is_placed:
            return self._failover.replace_restarted(message)
        return server if message.role == "server" else follower
