"""The coordinator: tracks the ranks of a job and its generation, and handles ranks and hosts that fail or join.

The coordinator reaches ranks through one `RankHost` per host. `RestartPolicy` decides whether a job continues.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import Event, NoProgress, WorkerFailed, event
from ..distributed import LOOPBACK, Device, backend_for, interface_of, listen, serve_store
from .engine import AfterLoss, OnEvent, OnOutput, RunningJob
from .processes import LocalProcesses, Process, ProcessListener, turn
from .rank_group import RankGroup, RankHandle, RankHost
from .rendezvous import RendezvousInfo
from .restart_policy import RankFailure, RestartPolicy
from .stall_watch import StallWatch
from .zygote import ZygoteHandle

SETTLE_SECONDS = 5.0
"""Seconds after a rank failure in which the other ranks may report that they wait, or fail from the same cause."""


@dataclass(frozen=True)
class ProcessExit:
    """How a rank's process ended: whether its function returned, a description, and the function's result."""

    done: bool
    text: str
    result: Any = None


class Rendezvous:
    """The store through which ranks rendezvous, on one address of this host; the first use starts it."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.address, self.interface = address, interface_of(address)
        self._port = 0
        self._server: object = None

    @property
    def port(self) -> int:
        """Return the port on which the store listens; the first use starts the store."""
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


class Coordinator(RunningJob):
    """Starts the ranks, monitors them, and regroups the remaining ranks after a failure."""

    term = 0
    """The term for which this coordinator was elected; 0 without an election."""

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
        """Create a coordinator; `unit` is the number of ranks in a group, which hold one copy of the network."""
        self.selector = selector or selectors.DefaultSelector()
        self._here, self._rendezvous, self._after_loss, self._timeout = here, rendezvous, after_loss, timeout
        self._restart_policy = RestartPolicy()
        self._ranks = RankGroup(here, unit)
        self._stalls = StallWatch(self._ranks)
        self._generation = -1
        self._has_begun = False
        self._reported_step = 0
        """The last step whose loss value the coordinator has received."""
        self._committed = 0
        """The last step that some rank is known to have completed."""
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
        self._ranks.admit(place)
        if self._has_begun:
            self._interrupt(f"{place.host} has joined")

    def dismiss(self, place: RankHost, reason: str) -> None:
        """Remove a failed host and its ranks; depending on `after_loss`, end the job or regroup the other ranks."""
        was_joining = any(member.place is place for member in self._ranks.newcomers)
        lost = self._ranks.remove(place)
        if not lost:
            if was_joining:
                self._notify(event("notice", text=f"{place.host} {reason}"))
            return
        for member in lost:
            self._notify(event("lost", rank=member.rank, host=place.host, reason=reason))
        if self._after_loss == "end" and self._has_begun and self._failed is None:
            self._give_up(lost[0], RankFailure(lost[0].rank, place.host, reason))
        elif self._after_loss == "restart" or not any(member.done for member in self._ranks.members):
            self._interrupt(f"{place.host} {reason}")

    def call(self) -> None:
        """Start a rendezvous of all ranks under a new generation; start a process for each rank that has none."""
        self._generation += 1
        self._stalls.begin_generation()
        self._has_begun = True
        self._settles_at, self._losses = None, []
        self._ranks.assemble()
        if self._ranks.newcomers:
            left = ", ".join(member.place.host for member in self._ranks.newcomers)
            what = f"{self._ranks.unit} ranks form a group; the ranks on {left} wait until their group is complete"
            self._notify(event("notice", text=what))
        members = self._ranks.members
        backend = backend_for([member.place.devices[member.slot] for member in members])
        key, salt = self._new_key()
        for member in members:
            member.join(self._rendezvous_info(member.rank, backend, key, salt))
            if self._stalls.is_stopping:
                member.send({"stop": True})

    def _new_key(self) -> tuple[str, str]:
        """Return the secret key of this generation's ranks, in hex, and a salt from which other hosts derive it."""
        return secrets.token_hex(32), ""

    def _rendezvous_info(self, rank: int, backend: str, key: str, salt: str) -> RendezvousInfo:
        return RendezvousInfo(
            generation=self._generation,
            rank=rank,
            size=len(self._ranks),
            address=self._rendezvous.address,
            interface=self._rendezvous.interface,
            port=self._rendezvous.port if len(self._ranks) > 1 else 0,
            backend=backend,
            reported_step=self._reported_step,
            key=key,
            salt=salt,
            term=self.term,
        )

    # -- reports from ranks ---------------------------------------------------------------------------------------

    def handle_event(self, place: RankHost, slot: int, entry: Event) -> None:
        """Handle an event of a rank; events of ranks that are no longer members are ignored."""
        for member in self._ranks.at(place, slot):
            if entry["kind"] == "stalled":
                self._stalls.on_stalled(entry)
                continue
            if entry["kind"] == "stack":
                self._stalls.on_stack(member, entry)
                continue
            if entry["kind"] == "steps":
                self._reported_step = entry["steps"][-1]
                self._committed = max(self._committed, self._reported_step)
            elif entry["kind"] == "step":
                self._committed = max(self._committed, entry["step"])
            elif entry["kind"] == "recovered":
                self._reported_step = min(self._reported_step, entry["step"])
            self._on_event(member.rank, entry)

    def handle_output(self, place: RankHost, slot: int, text: str, stream: str) -> None:
        """Forward a line that a rank printed."""
        for member in self._ranks.at(place, slot):
            self._on_output(member.rank, text, stream)

    def handle_lost_world(self, place: RankHost, slot: int, report: dict[str, Any]) -> None:
        """Handle a rank that lost its peers and waits for a rendezvous; if no failure is known, regroup all ranks."""
        self._committed = max(self._committed, int(report["step"]))
        for member in self._ranks.at(place, slot):
            member.waits, member.late_since = int(report["lost_world"]) == self._generation, None
            if not member.waits or self._settles_at is not None or self._failed is not None:
                continue
            if any(other.done for other in self._ranks.members):
                self._record_failure(member, f"lost its peers: {report['reason']}")
            else:
                self._losses.append(RankFailure(member.rank, place.host, f"lost its peers: {report['reason']}"))
                self._interrupt(str(self._losses[-1]))

    def handle_failure(self, place: RankHost, slot: int, failure: dict[str, Any]) -> None:
        """Handle an exception of a rank; do not count one that only follows from another rank's failure."""
        for member in self._ranks.at(place, slot):
            member.failure = failure
            if not failure["echo"]:
                self._record_failure(member, f"raised {failure['reason']}")

    def handle_exit(self, place: RankHost, slot: int, end: ProcessExit) -> None:
        """Handle the end of a rank's process."""
        self._ranks.mark_ended(place, slot)
        for member in self._ranks.at(place, slot):
            if end.done:
                member.done, member.result = True, end.result
            else:
                self._record_failure(member, end.text)

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
        return [member.result for member in self._ranks.members if self.is_mine(member.place)]

    def is_mine(self, place: RankHost) -> bool:
        """Return whether this program returns the results of a host's ranks."""
        return place is self._here

    def tick(self) -> None:
        """Handle what depends on time: frozen processes, hang reports, deadlines and pending decisions."""
        self._here.processes.look()
        hang = self._stalls.take_report()
        if hang is not None:
            hosts = {member.rank: member.place.host for member in self._ranks.members}
            self._notify(event("hang", text=hang.text(hosts)))
            if hang.crossed and self._after_loss == "restart" and self._failed is None:
                # The ranks of a user's script do not all run the same collectives; a restart would deadlock again.
                first = self._ranks.members[0]
                reason = f"the ranks are deadlocked in collectives that do not match: {hang.crossed}"
                self._give_up(first, RankFailure(first.rank, first.place.host, reason))
        if self._has_begun and self._ranks.is_complete:
            for member in self._ranks.newcomers:
                member.kill()
        now = time.monotonic()
        if self._settles_at is not None and (now > self._settles_at or self._ranks.is_settled):
            self._decide()
        if self._deadline is not None and now > self._deadline:
            self.kill()
        if self._after_loss == "restart":
            self._stalls.check_stop_status()

    def stop(self) -> None:
        self._stalls.stop()

    def kill(self) -> None:
        self._ranks.kill()

    def finish(self) -> None:
        """Kill all ranks and release every resource, however `wait` ended."""
        self.kill()
        self._here.processes.finish()
        self.selector.close()
        self._rendezvous.close()

    def _is_over(self) -> bool:
        running = self._ranks.is_running or not self._here.processes.is_over
        return not running and (self._failed is not None or self._ranks.is_complete)

    def _record_failure(self, member: RankHandle, reason: str) -> None:
        """Record a rank failure and notify the other ranks immediately, so that none waits; `_decide` acts later."""
        if self._failed is not None or member.loss is not None or member.done:
            return
        failure = member.failure
        is_echo = self._after_loss == "restart" and bool(failure.get("echo"))
        if is_echo and all(other.done for other in self._ranks.members if other is not member):
            # No rank failed: the others reached the end of the script, and would do so again after a restart.
            reason = f"waits for ranks that have ended: {failure['reason']}"
            failure = member.failure = {**failure, "reason": reason, "error": None}
            is_echo = False
        raised, is_ours = bool(failure) and not is_echo, bool(failure.get("is_ours")) and not is_echo
        loss = member.fail(reason, raised=raised, is_ours=is_ours, is_echo=is_echo)
        self._losses.append(loss)
        if self._after_loss == "restart" and not raised:
            self._interrupt(str(loss))
        elif self._after_loss == "regroup" and self._ranks.members[0].done:
            # The run is complete and saved, so the remaining reports of this rank are not needed.
            member.done = True
            member.kill()
        elif self._after_loss != "regroup" or any(other.done for other in self._ranks.members):
            self._give_up(member, loss)
        else:
            self._interrupt(str(loss))

    def _interrupt(self, why: str) -> None:
        """End this generation: notify all ranks, and wait up to SETTLE_SECONDS for their reports."""
        if self._settles_at is None and self._failed is None:
            self._settles_at = time.monotonic() + SETTLE_SECONDS
            self._ranks.broadcast({"lost": why, "generation": self._generation})

    def _decide(self) -> None:
        restarts = self._after_loss == "restart"
        for member in self._ranks.late(self._timeout):
            reason = f"did not join the others within {self._timeout:g} s, so it is killed and replaced"
            self._losses.append(member.fail(reason))
        members = self._ranks.members
        ending = [member for member in members if member.is_running and (restarts or member.loss is not None)]
        if ending:
            # These ranks have failed or will be restarted, so there is no need to wait for a clean exit.
            for member in ending:
                if member.loss is None:
                    member.fail("was killed with the other ranks")
                member.kill()
            return
        losses = [loss for loss in self._losses if not loss.is_echo] or self._losses
        if not losses or self._restart_policy.allows_restart(losses, size=len(self._ranks), step=self._committed):
            for loss in losses:
                self._notify(event("lost", rank=loss.rank, host=loss.host, reason=loss.reason))
            self.call()
            if restarts:
                self._notify(event("notice", text=f"all {len(self._ranks)} ranks are restarted"))
        else:
            self._give_up(next((member for member in members if member.loss is losses[0]), members[0]), losses[0])

    def _give_up(self, member: RankHandle, loss: RankFailure) -> None:
        failure = member.failure
        reason, trace = failure.get("reason") or loss.reason, failure.get("traceback", "")
        if self._restart_policy.has_given_up:
            self._failed = NoProgress(loss.rank, loss.host, reason, trace)
        else:
            self._failed, self._cause = WorkerFailed(loss.rank, loss.host, reason, trace), failure.get("error")
        self._settles_at = None
        self._ranks.broadcast({"lost": str(loss), "generation": self._generation, "final": True}, without=member)
        self._deadline = time.monotonic() + min(10.0, self._timeout / 5)

    def _notify(self, entry: Event) -> None:
        self._on_event(0, entry)
