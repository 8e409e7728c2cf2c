"""The coordinator: tracks the ranks of a job and its generation, and handles ranks and hosts that fail or join.

The coordinator reaches ranks through one `RankHost` per host. `RestartPolicy` decides whether a job continues.
"""

from __future__ import annotations

import secrets
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import Event, NoProgress, WorkerFailed, event
from ..distributed import LOOPBACK, STEP, Device, HangReport, backend_for, interface_of, listen, serve_store
from .engine import AfterLoss, OnEvent, OnOutput, RunningJob
from .processes import LocalProcesses, Process, ProcessListener, turn
from .rendezvous import RendezvousInfo
from .restart_policy import RankFailure, RestartPolicy
from .zygote import ZygoteHandle

SETTLE_SECONDS = 5.0
"""Seconds after a rank failure in which the other ranks may report that they wait, or fail from the same cause."""
STOP_RESPONSE_SECONDS = 5.0
"""Seconds that ranks asked to stop may run without checking the stop flag, or stay blocked in one collective."""


class RankHost(ABC):
    """A host with one or more ranks, as the coordinator sees it."""

    host: str
    devices: Sequence[Device]

    @property
    def running(self) -> Sequence[int]:
        """Return the slots whose ranks are already running and wait for rendezvous info."""
        return ()

    @abstractmethod
    def start(self, slot: int, info: RendezvousInfo) -> None:
        """Start the rank of a slot."""

    @abstractmethod
    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        """Send a message to the rank of a slot."""

    @abstractmethod
    def kill(self, slot: int | None = None) -> None:
        """Kill the rank of a slot, or all ranks of the host when `slot` is None."""


@dataclass(frozen=True)
class ProcessExit:
    """How a rank's process ended."""

    done: bool
    text: str
    result: Any = None


class Rendezvous:
    """The rendezvous of the ranks: a store on one address of this machine, started on first use."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.address, self.interface = address, interface_of(address)
        self._port = 0
        self._server: object = None

    @property
    def port(self) -> int:
        """Return the port that the store listens on; start the store on first use."""
        if self._server is None:
            listener = listen(self.address)
            self._port = listener.getsockname()[1]
            self._server = serve_store(listener)
        return self._port

    def close(self) -> None:
        """Release the store."""
        self._server = None


class LocalHost(RankHost, ProcessListener):
    """The coordinator's own host: forwards reports of its local processes to the coordinator."""

    def __init__(self, host: str, devices: Sequence[Device], zygote: ZygoteHandle, pickle_fd: int) -> None:
        self.host, self.devices = host, devices
        self._zygote, self._pickle_fd = zygote, pickle_fd

    def open(self, coordinator: Coordinator) -> None:
        """Create the local processes and connect them to the coordinator."""
        self._coordinator = coordinator
        self.processes = LocalProcesses(self._zygote, self._pickle_fd, self, coordinator.selector)

    def start(self, slot: int, info: RendezvousInfo) -> None:
        self.processes.start(slot, info)

    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        self.processes.send_message(slot, message)

    def kill(self, slot: int | None = None) -> None:
        self.processes.kill(slot)

    def handle_event(self, slot: int, entry: Event) -> None:
        self._coordinator.handle_event(self, slot, entry)

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        self._coordinator.handle_output(self, slot, text, stream)

    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        self._coordinator.handle_lost_world(self, slot, report)

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._coordinator.handle_failure(self, slot, failure)

    def handle_exit(self, slot: int, process: Process) -> None:
        done = process.done and process.exit_code == 0
        self._coordinator.handle_exit(self, slot, ProcessExit(done, process.end, process.result))


@dataclass(eq=False)
class RankHandle:
    """The coordinator's record of one rank, in any process; the rank number changes when others join or leave."""

    place: RankHost
    slot: int
    rank: int
    is_running: bool = False
    waits: bool = False
    """Whether the rank has noticed a failure and waits for the next rendezvous."""
    late_since: float | None = None
    """When the rank was invited to a rendezvous while it was still busy; None once it has answered."""
    done: bool = False
    result: Any = None
    failure: dict[str, Any] = field(default_factory=dict)
    loss: RankFailure | None = None
    will_stop: bool = False
    """Whether the rank is expected to end by itself: it checks the stop flag and is not blocked in a collective."""


def assign_ranks(members: list[RankHandle], unit: int) -> tuple[list[RankHandle], list[RankHandle]]:
    """Return the members in the order of their new ranks, in whole groups, and the members that are left over.

    A member keeps its position within a group where possible, because it holds that part of the network; a member that
    moves to another position receives that part.
    """
    count = len(members) // unit * unit or len(members)
    left = list(members)
    assigned: list[RankHandle | None] = []
    for position in range(count):
        same = (m for m in left if m.rank >= 0 and m.rank % unit == position % unit)
        one = next(same, None) if unit > 1 else left[0]
        assigned.append(one)
        if one is not None:
            left.remove(one)
    return [position if position is not None else left.pop(0) for position in assigned], left


class Coordinator(RunningJob):
    """Starts the ranks, monitors them, and regroups the remaining ranks after a failure."""

    def __init__(
        self,
        here: LocalHost,
        rendezvous: Rendezvous,
        *,
        after_loss: AfterLoss,
        timeout: float,
        unit: int = 1,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """Create a coordinator; `unit` is the number of ranks that together hold one network, one whole group."""
        self.selector = selector or selectors.DefaultSelector()
        self._here, self._rendezvous, self._after_loss, self._timeout = here, rendezvous, after_loss, timeout
        self._restart_policy, self._unit = RestartPolicy(), unit
        self._members: list[RankHandle] = []
        self._newcomers: list[RankHandle] = []
        """Ranks that join at the next rendezvous: newly arrived ones, and those that did not fill a whole group."""
        self._generation = -1
        self._has_begun = False
        self._reported_step = 0
        """The last step whose loss value the coordinator has received."""
        self._committed = 0
        """The last step that some rank is known to have completed."""
        self._is_stopping = False
        self._ends_at = 0.0
        """When the job is interrupted if no rank that was asked to stop is expected to end by itself."""
        self._hang: HangReport | None = None
        self._hung = -1
        """The number of the last collective that was reported as hanging."""
        self._losses: list[RankFailure] = []
        self._settles_at: float | None = None
        self._deadline: float | None = None
        self._failed: WorkerFailed | None = None
        self._cause: BaseException | None = None
        self._on_event: OnEvent = lambda rank, entry: None
        self._on_output: OnOutput = lambda rank, text, stream: None
        here.open(self)
        self.admit(here)

    # -- membership -----------------------------------------------------------------------------------------------

    def admit(self, place: RankHost) -> None:
        """Add a host's ranks to the job, at the start or at the next rendezvous."""
        slots = range(len(place.devices))
        self._newcomers += [RankHandle(place, slot, -1, is_running=slot in place.running) for slot in slots]
        if self._has_begun:
            self._interrupt(f"{place.host} has come")

    def dismiss(self, place: RankHost, reason: str) -> None:
        """Remove a failed host and its ranks; depending on `after_loss`, end the job or regroup the other ranks."""
        lost = [member for member in self._members if member.place is place]
        self._newcomers = [member for member in self._newcomers if member.place is not place]
        if not lost:
            return
        for member in lost:
            self._notify(event("lost", rank=member.rank, host=place.host, reason=reason))
        self._members = [member for member in self._members if member.place is not place]
        if self._after_loss == "end" and self._has_begun and self._failed is None:
            self._give_up(lost[0], RankFailure(lost[0].rank, place.host, reason))
        elif self._after_loss == "restart" or not any(member.done for member in self._members):
            self._interrupt(f"{place.host} {reason}")

    def call(self) -> None:
        """Start a rendezvous of all ranks under a new generation; start a process for each rank that has none."""
        self._generation += 1
        self._hang, self._hung = None, -1
        self._has_begun = True
        self._settles_at, self._losses = None, []
        self._members += self._newcomers
        # The coordinator's own host comes first: its first rank reports for all ranks, and writes.
        self._members.sort(key=lambda member: member.place is not self._here)
        self._members, self._newcomers = assign_ranks(self._members, self._unit)
        if self._newcomers:
            left = ", ".join(member.place.host for member in self._newcomers)
            self._notify(
                event(
                    "notice",
                    text=f"{self._unit} ranks form a group; the ranks on {left} wait until their group is complete",
                )
            )
        backend = backend_for([member.place.devices[member.slot] for member in self._members])
        key, salt = self._new_key()
        for rank, member in enumerate(self._members):
            if member.is_running and not member.waits and member.rank >= 0 and member.late_since is None:
                member.late_since = time.monotonic()
            member.rank, member.loss, member.waits = rank, None, False
        for member in self._members:
            info = self._rendezvous_info(member.rank, backend, key, salt)
            if member.is_running:
                member.place.send_message(member.slot, {"rendezvous": info.to_dict()})
            else:
                member.is_running, member.done, member.failure, member.late_since = True, False, {}, None
                member.place.start(member.slot, info)
            if self._is_stopping:
                member.place.send_message(member.slot, {"stop": True})

    def _new_key(self) -> tuple[str, str]:
        """Return the secret key of this generation's ranks, in hex, and a salt from which other hosts derive it."""
        return secrets.token_hex(32), ""

    def _rendezvous_info(self, rank: int, backend: str, key: str, salt: str) -> RendezvousInfo:
        return RendezvousInfo(
            generation=self._generation,
            rank=rank,
            size=len(self._members),
            address=self._rendezvous.address,
            interface=self._rendezvous.interface,
            port=self._rendezvous.port if len(self._members) > 1 else 0,
            backend=backend,
            reported_step=self._reported_step,
            key=key,
            salt=salt,
        )

    # -- reports from ranks ---------------------------------------------------------------------------------------

    def handle_event(self, place: RankHost, slot: int, entry: Event) -> None:
        """Handle an event of a rank; events of ranks that are no longer members are ignored."""
        for member in self._at(place, slot):
            if entry["kind"] in ("stalled", "stack"):
                self._handle_stall(member, entry)
                continue
            if entry["kind"] == "steps":
                self._reported_step = entry["steps"][-1]
                self._committed = max(self._committed, self._reported_step)
            elif entry["kind"] == "step":
                self._committed = max(self._committed, entry["step"])
            elif entry["kind"] == "recovered":
                self._reported_step = min(self._reported_step, entry["step"])
            self._on_event(member.rank, entry)

    def _handle_stall(self, member: RankHandle, entry: Event) -> None:
        """Request the stacks of all ranks when one reports a stall, or store the stack that a rank returned."""
        if entry["kind"] == "stack":
            is_blocked = entry["operation"] not in ("", STEP) and entry["seconds"] > STOP_RESPONSE_SECONDS
            member.will_stop = entry["listens"] and not is_blocked
            if self._hang is not None:
                self._hang.answers[member.rank] = entry
        elif self._hang is None and entry["number"] > self._hung:
            self._hung = entry["number"]
            self._hang = HangReport(entry["number"], len(self._members))
            self._broadcast({"stacks": True})

    def handle_output(self, place: RankHost, slot: int, text: str, stream: str) -> None:
        """Forward a line that a rank printed."""
        for member in self._at(place, slot):
            self._on_output(member.rank, text, stream)

    def handle_lost_world(self, place: RankHost, slot: int, report: dict[str, Any]) -> None:
        """Handle a rank that lost its peers and waits for a rendezvous; if no failure is known, regroup all ranks."""
        self._committed = max(self._committed, int(report["step"]))
        for member in self._at(place, slot):
            member.waits, member.late_since = int(report["lost_world"]) == self._generation, None
            if not member.waits or self._settles_at is not None or self._failed is not None:
                continue
            if any(other.done for other in self._members):
                self._record_failure(member, f"lost the others: {report['reason']}")
            else:
                self._losses.append(RankFailure(member.rank, place.host, f"lost the others: {report['reason']}"))
                self._interrupt(str(self._losses[-1]))

    def handle_failure(self, place: RankHost, slot: int, failure: dict[str, Any]) -> None:
        """Handle an exception of a rank; a mere echo of another rank's failure is stored and not counted."""
        for member in self._at(place, slot):
            member.failure = failure
            if not failure["echo"]:
                self._record_failure(member, f"raised {failure['reason']}")

    def handle_exit(self, place: RankHost, slot: int, end: ProcessExit) -> None:
        """Handle the end of a rank's process."""
        for member in self._at(place, slot):
            member.is_running = False
            if end.done:
                member.done, member.result = True, end.result
            else:
                self._record_failure(member, end.text)
        for member in self._newcomers:
            if member.place is place and member.slot == slot:
                member.is_running = False

    def _at(self, place: RankHost, slot: int) -> Iterator[RankHandle]:
        for member in list(self._members):
            if member.place is place and member.slot == slot:
                yield member

    # -- actions --------------------------------------------------------------------------------------------------

    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        self._on_event, self._on_output = on_event, on_output
        try:
            while not self._is_over():
                turn(self.selector, 0.5 if self._settles_at is None else 0.05)
                self.tick()
        finally:
            self.finish()
        if self._failed is not None:
            if self._cause is not None:
                raise self._cause from self._failed
            raise self._failed
        return [member.result for member in self._members if self.is_mine(member.place)]

    def is_mine(self, place: RankHost) -> bool:
        """Return whether this program returns the results of a host's ranks."""
        return place is self._here

    def tick(self) -> None:
        """Handle what depends on time: frozen processes, hang reports, deadlines and pending decisions."""
        self._here.processes.look()
        if self._hang is not None and self._hang.is_due:
            hosts = {member.rank: member.place.host for member in self._members}
            self._notify(event("hang", text=self._hang.text(hosts)))
            crossed, self._hang = self._hang.crossed, None
            if crossed and self._after_loss == "restart" and self._failed is None:
                # The ranks of a user's script do not all run the same collectives; a restart would deadlock again.
                first = self._members[0]
                reason = f"the ranks are deadlocked in collectives that do not match: {crossed}"
                self._give_up(first, RankFailure(first.rank, first.place.host, reason))
        if self._has_begun and self.is_complete:
            for member in self._newcomers:
                member.place.kill(member.slot)
        now = time.monotonic()
        if self._settles_at is not None and (now > self._settles_at or self._is_settled()):
            self._decide()
        if self._deadline is not None and now > self._deadline:
            self.kill()

        self._check_stop_status(now)

    def stop(self) -> None:
        self._is_stopping = True
        self._broadcast({"stop": True})
        self._request_stop_status()

    def _request_stop_status(self) -> None:
        """Request the stacks of all ranks, which show whether any rank will end by itself."""
        self._ends_at = time.monotonic() + STOP_RESPONSE_SECONDS
        for member in self._members:
            member.will_stop = False
        self._broadcast({"stacks": True})

    def _check_stop_status(self, now: float) -> None:
        """Raise KeyboardInterrupt if no rank will stop by itself.

        A user's script may never check the stop flag, or may be blocked where it cannot.
        """
        if not self._is_stopping or self._after_loss != "restart" or now < self._ends_at:
            return
        running = [member for member in self._members if member.is_running]
        if running and not any(member.will_stop for member in running):
            raise KeyboardInterrupt
        self._request_stop_status()

    def kill(self) -> None:
        for place in {id(member.place): member.place for member in (*self._members, *self._newcomers)}.values():
            place.kill()

    def finish(self) -> None:
        """Kill all ranks and release every resource, however `wait` ended."""
        self.kill()
        self._here.processes.finish()
        self.selector.close()
        self._rendezvous.close()

    @property
    def is_complete(self) -> bool:
        """Return whether every rank has returned."""
        return all(member.done for member in self._members)

    def _is_over(self) -> bool:
        running = any(member.is_running for member in self._members) or not self._here.processes.is_over
        return not running and (self._failed is not None or self.is_complete)

    def _record_failure(self, member: RankHandle, reason: str) -> None:
        """Record a rank failure and notify the other ranks at once, so that none waits; `_decide` acts later."""
        if self._failed is not None or member.loss is not None or member.done:
            return
        failure = member.failure
        is_echo = self._after_loss == "restart" and bool(failure.get("echo"))
        if is_echo and all(other.done for other in self._members if other is not member):
            # No rank failed: the others reached the end of the script, and would do so again after a restart.
            reason = f"waits for ranks that have ended: {failure['reason']}"
            failure = member.failure = {**failure, "reason": reason, "error": None}
            is_echo = False
        raised, is_ours = bool(failure) and not is_echo, bool(failure.get("is_ours")) and not is_echo
        member.loss = RankFailure(member.rank, member.place.host, reason, raised, is_ours, is_echo)
        self._losses.append(member.loss)
        if self._after_loss == "restart" and not raised:
            self._interrupt(str(member.loss))
        elif self._after_loss == "regroup" and self._members[0].done:
            # The run is complete and saved, so the remaining reports of this rank are not needed.
            member.done = True
            member.place.kill(member.slot)
        elif self._after_loss != "regroup" or any(other.done for other in self._members):
            self._give_up(member, member.loss)
        else:
            self._interrupt(str(member.loss))

    def _interrupt(self, why: str) -> None:
        """End this generation: notify all ranks and start the settling period."""
        if self._settles_at is None and self._failed is None:
            self._settles_at = time.monotonic() + SETTLE_SECONDS
            self._broadcast({"lost": why, "generation": self._generation})

    def _is_settled(self) -> bool:
        return all(not member.is_running or member.waits or member.loss is not None for member in self._members)

    def _decide(self) -> None:
        restarts = self._after_loss == "restart"
        self._record_late_failures()
        ending = [member for member in self._members if member.is_running and (restarts or member.loss is not None)]
        if ending:
            # These ranks have failed or will be restarted, so there is no need to wait for a clean exit.
            for member in ending:
                member.loss = member.loss or RankFailure(
                    member.rank, member.place.host, "was killed with the other ranks"
                )
                member.place.kill(member.slot)
            return
        losses = [loss for loss in self._losses if not loss.is_echo] or self._losses
        if not losses or self._restart_policy.allows_restart(losses, size=len(self._members), step=self._committed):
            for loss in losses:
                self._notify(event("lost", rank=loss.rank, host=loss.host, reason=loss.reason))
            self.call()
            if restarts:
                self._notify(event("notice", text=f"all {len(self._members)} ranks are restarted"))
        else:
            member = next((member for member in self._members if member.loss is losses[0]), self._members[0])
            self._give_up(member, losses[0])

    def _record_late_failures(self) -> None:
        """Record the failure of ranks for which the other ranks waited through a whole rendezvous."""
        for member in self._members:
            is_late = member.late_since is not None and time.monotonic() - member.late_since >= self._timeout
            if is_late and member.is_running and member.loss is None:
                reason = f"did not join the others within {self._timeout:g} s, so it is killed and replaced"
                member.loss = RankFailure(member.rank, member.place.host, reason)
                self._losses.append(member.loss)

    def _give_up(self, member: RankHandle, loss: RankFailure) -> None:
        failure = member.failure
        reason, trace = failure.get("reason") or loss.reason, failure.get("traceback", "")
        if self._restart_policy.has_given_up:
            self._failed = NoProgress(loss.rank, loss.host, reason, trace)
        else:
            self._failed, self._cause = WorkerFailed(loss.rank, loss.host, reason, trace), failure.get("error")
        self._settles_at = None
        self._broadcast({"lost": str(loss), "generation": self._generation, "final": True}, without=member)
        self._deadline = time.monotonic() + min(10.0, self._timeout / 5)

    def _notify(self, entry: Event) -> None:
        self._on_event(0, entry)

    def _broadcast(self, message: dict[str, Any], without: RankHandle | None = None) -> None:
        for member in self._members:
            if member is not without and member.is_running:
                member.place.send_message(member.slot, message)
