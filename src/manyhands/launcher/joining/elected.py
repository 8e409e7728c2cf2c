"""Jobs whose coordinator is elected: a host coordinates or follows, and changes its role when the coordinator fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import Event, RunError, SettingsError, event
from ...distributed import Device, PortTaken, World, listen
from ..coordinator import Coordinator, LocalHost
from ..elections import Election, Leader
from ..engine import AfterLoss, OnEvent, OnOutput, RunningJob
from ..local import LocalEngine
from ..pickles import pack
from ..processes import turn
from ..rank import Assignment
from .agent import RETRY_SECONDS, Agent
from .channel import Channel, JoinTimeouts, Message
from .handshake import JoinRefused
from .host_ranks import HostRanks, Unheard
from .hosts import FactsOf, First, FirstHostAddress, Other, join_at
from .listener import HostsCoordinator, JoinListener
from .token import JoinToken
from .waiting import Wait

GATHER_SECONDS = 3.0
"""Seconds that a new coordinator waits for the other hosts before it continues without those that are missing."""


class RoleEnded(Exception):
    """Raised where a host loses its role: the coordinator it follows has failed, or its own lease has ended."""


class JobOver(RunError):
    """Raised on a host that was disconnected while the job ended."""


@dataclass(kw_only=True)
class JobPart:
    """This host's part in a job: what it needs to coordinate the job, and to follow another coordinator."""

    election: Election
    join: FirstHostAddress
    """How this host joins the coordinator; the address changes with the coordinator."""
    facts: FactsOf
    num_hosts: int
    address: str
    """This host's address, at which the others join it while it coordinates."""
    timeout: float
    notify: Callable[[str], None]
    here: Sequence[Device] = ()
    unit: int = 1
    welcome_messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    term: int = 0
    """The term of the last coordinator that this host has followed or been."""
    known: JoinToken | None = None

    def campaign(self) -> tuple[Leader, socket.socket] | None:
        """Try to become the coordinator; return the election's result and the socket at which hosts join."""
        try:
            listener = listen(self.address, self.join.port)
        except PortTaken:
            listener = listen(self.address)
        try:
            candidate = Leader(self.facts.host, self.address, listener.getsockname()[1])
            elected = self.election.campaign(candidate)
        except BaseException:
            listener.close()
            raise
        if elected is None:
            listener.close()
            return None
        self.term = elected.term
        return elected, listener

    def connect(self, leader: Leader, running: Sequence[int] = (), generation: int = -1) -> Channel:
        """Join the elected coordinator."""
        self.join = replace(self.join, address=leader.address, port=leader.port, taken=None)
        facts = self.facts(running, generation)
        channel, self.known = join_at(self.join, facts, JoinTimeouts(self.timeout), self.known)
        self.term = leader.term
        return channel

    def listener(self, sock: socket.socket, selector: selectors.BaseSelector | None = None) -> JoinListener:
        """Return the listener at which the other hosts join this one."""
        return JoinListener(
            sock, self.join.token, self.facts, self.num_hosts, self.notify, self.timeout, self.join.tls, selector
        )

    def ranks(
        self, engine: LocalEngine, fn: Callable[[World], Any], after_loss: AfterLoss, listener: JoinListener | None
    ) -> HostRanks:
        """Return the ranks of this host, which are started by the coordinator."""
        if after_loss != "regroup":
            raise SettingsError(
                "coordination is available for mh.fit only",
                got="mh.launch, or another function whose ranks restart when one of them fails",
                remedy="omit it here: when the first host fails, restart its command",
            )
        pickle_fd = pack(Assignment.here(fn, self.here, self.timeout, recovers=True))
        try:
            return HostRanks(engine.warm_up(), pickle_fd, None if listener is None else listener.selector)
        finally:
            os.close(pickle_fd)


class HeldRanks(LocalHost):
    """The coordinator's own host, with ranks that may have run for another coordinator before."""

    def __init__(self, host: str, devices: Sequence[Device], ranks: HostRanks) -> None:
        self.host, self.devices, self._ranks = host, devices, ranks

    def open(self, coordinator: Coordinator) -> None:
        self._coordinator, self.processes = coordinator, self._ranks
        self._ranks.role = self

    @property
    def running(self) -> Sequence[int]:
        return sorted(self._ranks.running)


class ElectedCoordinator(HostsCoordinator):
    """A coordinator that holds a lease: without it, it decides nothing and steps down."""

    def __init__(
        self, part: JobPart, ranks: HostRanks, join_listener: JoinListener, address: str, num_awaited: int
    ) -> None:
        here = HeldRanks(part.facts.host, part.here, ranks)
        super().__init__(here, join_listener, address, after_loss="regroup", timeout=part.timeout, unit=part.unit)
        self._own_ranks = ranks
        self._part, self._num_awaited, self.term = part, num_awaited, part.term
        self._generation = max(self._generation, ranks.generation)
        self._begins_at = time.monotonic() + GATHER_SECONDS
        self._is_deposed = False

    def run(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        """Coordinate the job to its end, and return the results of this host's ranks.

        Raises:
            RoleEnded: The lease could not be renewed; the ranks keep their state.
        """

        def record(rank: int, entry: Event) -> None:
            on_event(rank, entry)
            # The copies of the log lack an event that is too large for a message.
            with contextlib.suppress(RunError):
                self._join_listener.send_now("log", entry=entry)

        host, listener = self._here.host, self._join_listener
        elected = event(
            "coordinator", term=self.term, host=host, text=f"{host} coordinates the job, in term {self.term}"
        )
        try:
            # This claims the folder of the run for the term, before any rank is called.
            record(0, elected)
            listener.welcome_messages = [*listener.welcome_messages, ("log", {"entry": elected})]
        except BaseException:
            self.finish()
            raise
        return self.wait(record, on_output)

    def tick(self) -> None:
        is_complete = self._has_begun and self._ranks.is_complete
        if not self._part.election.holds and not is_complete:
            self._is_deposed = True
            raise RoleEnded(f"{self._here.host} could not renew its lease as the coordinator")
        is_late = time.monotonic() > self._begins_at
        is_ready = is_late or len(self._join_listener.present) >= self._num_awaited
        if not self._has_begun and is_ready and self._part.election.renew():
            self.call()
        super().tick()

    def finish(self) -> None:
        if not self._is_deposed:
            super().finish()
            self._part.election.resign(is_over=True)
            return
        self._own_ranks.interrupt("the coordinator has lost its lease")
        self._join_listener.abandon()
        self._rendezvous.close()
        self._part.election.resign(is_over=False)

    def release(self) -> None:
        """Do nothing: `finish` has released everything but the ranks."""

    def leave(self, error: BaseException) -> None:
        """Do nothing: `finish` has reported the end of the job to the other hosts."""

    def _is_over(self) -> bool:
        return self._has_begun and super()._is_over()

    def _decide(self) -> None:
        # A coordinator that is separated from the other hosts must not continue with its own ranks alone, unless it is
        # still the elected one after they were lost.
        if self._part.election.renew():
            super()._decide()


class ElectedAgent(Agent):
    """An agent that leaves the search for the next coordinator to the job."""

    term = 0

    def run(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        """Run this host's ranks to the end of the job, and return their results.

        Raises:
            RoleEnded: The coordinator has failed; the ranks keep their state.
        """
        self._on_event = on_event
        return self.follow()

    def _handle(self, message: Message) -> None:
        if message["kind"] == "log":
            self._on_event(0, event("copied", entry=message["entry"], term=self.term))
        else:
            super()._handle(message)

    def _on_coordinator_lost(self, why: str) -> None:
        self._ranks.interrupt(f"the coordinator {why}")
        raise RoleEnded(f"the coordinator {why}")


class ElectedJob(RunningJob):
    """This host's part in a running job, in one role after another."""

    def __init__(self, part: JobPart, ranks: HostRanks, role: ElectedCoordinator | ElectedAgent) -> None:
        self._part, self._ranks, self._role = part, ranks, role

    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        try:
            while True:
                try:
                    return self._role.run(on_event, on_output)
                except RoleEnded as end:
                    self._role.release()
                    self._ranks.role = Unheard()
                    on_event(0, event("follows"))
                    self._role = self._next_role(str(end))
        except BaseException as error:
            self._role.leave(error)
            raise
        finally:
            self._role.release()
            self._ranks.close()

    def stop(self) -> None:
        self._role.stop()

    def kill(self) -> None:
        self._ranks.kill()

    def _next_role(self, why: str) -> ElectedCoordinator | ElectedAgent:
        """Join the next coordinator, or become it; the ranks keep their state meanwhile."""
        part, state = self._part, "no other host has been elected yet"
        wait = Wait(
            lambda: f"{why}; {state}; the ranks of this host keep their state and wait", part.timeout, part.notify
        )
        while True:
            wait.report()
            turn(self._ranks.selector, RETRY_SECONDS)
            self._ranks.look()
            try:
                leader = part.election.leader()
                if leader is None:
                    role = self._coordinate()
                    if role is not None:
                        return role
                elif leader.host != part.facts.host:
                    state = f"{leader.host} is elected, at {leader.address}:{leader.port}"
                    return self._follow(leader)
                # Otherwise it is an earlier lease of this host, which ends by itself.
            except JobOver:
                raise
            except JoinRefused as error:
                # The coordinator may still list an earlier connection; that ends within seconds.
                if error.code != "present" or wait.is_over:
                    raise
            except (OSError, RunError) as error:
                state = str(error)
            if wait.is_over:
                raise RunError(f"{why}, and no host continued the job within {part.timeout:.0f} s: {state}")

    def _coordinate(self) -> ElectedCoordinator | None:
        part = self._part
        if part.election.is_over(part.term):
            raise JobOver("the job has ended while this host was disconnected")
        elected = part.campaign()
        if elected is None:
            return None
        join_listener = part.listener(elected[1], self._ranks.selector)
        join_listener.welcome_messages = part.welcome_messages
        # One host is missing: the coordinator that has failed.
        return ElectedCoordinator(part, self._ranks, join_listener, part.address, part.num_hosts - 2)

    def _follow(self, leader: Leader) -> ElectedAgent:
        channel = self._part.connect(leader, sorted(self._ranks.running), self._ranks.generation)
        self._part.notify(f"{leader.host} coordinates the job now; it resumes")
        return agent(self._part, self._ranks, channel)


def agent(part: JobPart, ranks: HostRanks, channel: Channel) -> ElectedAgent:
    """Return the role of a host that follows the coordinator at the end of a channel."""
    role = ElectedAgent(
        channel,
        lambda running, generation: channel,
        ranks,
        token=part.join.token,
        timeout=part.timeout,
        host=part.facts.host,
        notify=part.notify,
    )
    role.term = part.term
    return role


class ElectedFirst(First):
    """The view of the joined hosts on the host that was elected before the job started."""

    is_elected = True

    def __init__(self, join_listener: JoinListener, devices: Sequence[Device], part: JobPart) -> None:
        self._part, self.term = part, part.term
        try:
            super().__init__(join_listener, devices, part.address)
        except BaseException:
            part.election.resign(is_over=True)
            raise
        part.here, part.welcome_messages = self.here, join_listener.welcome_messages

    def start(
        self, engine: LocalEngine, fn: Callable[[World], Any], *, timeout: float, after_loss: AfterLoss, unit: int = 1
    ) -> RunningJob:
        part, self._part.unit = self._part, unit
        ranks = part.ranks(engine, fn, after_loss, self._join_listener)
        return ElectedJob(part, ranks, ElectedCoordinator(part, ranks, self._join_listener, self._address, 0))

    def close(self, reason: str) -> None:
        super().close(reason)
        self._part.election.resign(is_over=True)


class ElectedOther(Other):
    """The view of the joined hosts on a host that has joined the elected coordinator."""

    is_elected = True

    def __init__(self, part: JobPart) -> None:
        self._part = part
        super().__init__(part.join, part.facts, part.timeout, part.notify)
        part.here, part.welcome_messages = self.here, self.welcome_messages

    def _join(self, running: list[int], generation: int) -> Channel:
        leader = self._part.election.leader()
        if leader is None or leader.host == self._facts.host:
            raise RunError("no host is elected as the coordinator yet")
        return self._part.connect(leader)

    def start(
        self, engine: LocalEngine, fn: Callable[[World], Any], *, timeout: float, after_loss: AfterLoss, unit: int = 1
    ) -> RunningJob:
        part, self._part.unit = self._part, unit
        ranks = part.ranks(engine, fn, after_loss, None)
        return ElectedJob(part, ranks, agent(part, ranks, self._channel))


def gather_elected(part: JobPart, devices: Sequence[Device], *, is_candidate: bool) -> ElectedFirst | ElectedOther:
    """Join the elected coordinator; the host named in the command becomes it if there is none.

    `is_candidate` is whether this is that host. If it was the coordinator until now, the other hosts of its job come
    first, because they have the state of the ranks.
    """
    reason = "no coordinator is elected yet"
    wait = Wait(lambda: f"waiting for the election of a coordinator: {reason}", part.timeout, part.notify, 1.0)
    campaigns_at = 0.0
    while is_candidate:
        try:
            leader = part.election.leader()
            if leader is not None and leader.host != part.facts.host:
                break
            if leader is not None:
                reason = "this host was the coordinator until now, and another host may continue its job"
                campaigns_at = time.monotonic() + GATHER_SECONDS
            elif time.monotonic() > campaigns_at and (elected := part.campaign()) is not None:
                return ElectedFirst(part.listener(elected[1]), devices, part)
        except RunError as error:
            reason = str(error)
            if wait.is_over:
                raise
        wait.report()
        time.sleep(RETRY_SECONDS)
    return ElectedOther(part)
