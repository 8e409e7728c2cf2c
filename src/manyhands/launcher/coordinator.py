"""The conductor: who is in the world, under which generation; what is done when a rank or a host is lost or comes back.

It hears of ranks through places, one per host, and acts through them. Whether a job goes on is the judgement's to say.
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
from .processes import Hearer, LocalProcesses, Process, turn
from .rendezvous import RendezvousInfo
from .restart_policy import RankFailure, RestartPolicy
from .zygote_handle import ZygoteHandle

SETTLE_SECONDS = 5.0
"""After a loss, how long the others may take to say that they wait, or to be lost of the same cause."""
HEED_SECONDS = 5.0
"""How long a script that was asked to stop may go on without looking whether it was, or stand in one collective."""


class RankHost(ABC):
    """A host with some ranks on it, as the conductor sees it."""

    host: str
    devices: Sequence[Device]

    @property
    def running(self) -> Sequence[int]:
        """Slots whose ranks are alive already, and wait."""
        return ()

    @abstractmethod
    def start(self, slot: int, summons: RendezvousInfo) -> None:
        """Starts the rank of a slot."""

    @abstractmethod
    def tell(self, slot: int, message: dict[str, Any]) -> None:
        """Sends a message to a rank."""

    @abstractmethod
    def kill(self, slot: int | None = None) -> None:
        """Ends a rank at once, or all of the host."""


@dataclass(frozen=True)
class ProcessExit:
    """How a rank's process ended."""

    done: bool
    text: str
    result: Any = None


class Rendezvous:
    """Where the ranks meet: a store on one address of this machine, opened when it is first needed."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.address, self.interface = address, interface_of(address)
        self._port = 0
        self._server: object = None

    @property
    def port(self) -> int:
        """Where the store listens."""
        if self._server is None:
            listener = listen(self.address)
            self._port = listener.getsockname()[1]
            self._server = serve_store(listener)
        return self._port

    def close(self) -> None:
        """Nobody meets there any more."""
        self._server = None


class LocalHost(RankHost, Hearer):
    """This very host: hears its crew for the conductor."""

    def __init__(self, host: str, devices: Sequence[Device], zygote: ZygoteHandle, parcel: int) -> None:
        self.host, self.devices = host, devices
        self._zygote, self._parcel = zygote, parcel

    def open(self, conductor: Coordinator) -> None:
        """Begins to listen."""
        self._conductor = conductor
        self.crew = LocalProcesses(self._zygote, self._parcel, self, conductor.selector)

    def start(self, slot: int, summons: RendezvousInfo) -> None:
        self.crew.start(slot, summons)

    def tell(self, slot: int, message: dict[str, Any]) -> None:
        self.crew.tell(slot, message)

    def kill(self, slot: int | None = None) -> None:
        self.crew.kill(slot)

    def heard_event(self, slot: int, entry: Event) -> None:
        self._conductor.heard_event(self, slot, entry)

    def heard_output(self, slot: int, text: str, stream: str) -> None:
        self._conductor.heard_output(self, slot, text, stream)

    def heard_lost_world(self, slot: int, told: dict[str, Any]) -> None:
        self._conductor.heard_lost_world(self, slot, told)

    def heard_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._conductor.heard_failure(self, slot, failure)

    def heard_end(self, slot: int, process: Process) -> None:
        done = process.done and process.exit_code == 0
        self._conductor.heard_end(self, slot, ProcessExit(done, process.end, process.result))


@dataclass(eq=False)
class RankHandle:
    """A rank, whatever process it lives in; its number changes when others come and go."""

    place: RankHost
    slot: int
    rank: int
    is_running: bool = False
    waits: bool = False
    """Whether it has noticed the loss and waits to be called."""
    done: bool = False
    result: Any = None
    failure: dict[str, Any] = field(default_factory=dict)
    loss: RankFailure | None = None
    heeds: bool = False
    """Whether it will end by itself, as far as is known: it looks whether it should, and stands nowhere."""


def seated(members: list[RankHandle], unit: int) -> tuple[list[RankHandle], list[RankHandle]]:
    """Members in the order of their new ranks, in whole groups; and who is left over.

    A rank keeps its place within a group, because it has that part of the network; where others lack it they get it.
    """
    count = len(members) // unit * unit or len(members)
    left = list(members)
    seats: list[RankHandle | None] = []
    for seat in range(count):
        same = (m for m in left if m.rank >= 0 and m.rank % unit == seat % unit)
        one = next(same, None) if unit > 1 else left[0]
        seats.append(one)
        if one is not None:
            left.remove(one)
    return [seat if seat is not None else left.pop(0) for seat in seats], left


class Coordinator(RunningJob):
    """Calls ranks together, watches them, and calls those together that are left."""

    def __init__(
        self,
        here: LocalHost,
        meeting: Rendezvous,
        *,
        after_loss: AfterLoss,
        timeout: float,
        unit: int = 1,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """`unit` is how many ranks hold one network together: they are called together in whole groups only."""
        self.selector = selector or selectors.DefaultSelector()
        self._here, self._meeting, self._after_loss, self._timeout = here, meeting, after_loss, timeout
        self._judgement, self._unit = RestartPolicy(), unit
        self._members: list[RankHandle] = []
        self._newcomers: list[RankHandle] = []
        """Who is taken in at the next call: those that have come, and those that were left over."""
        self._generation = -1
        self._has_begun = False
        self._heard = 0
        """The last step whose loss is known here."""
        self._committed = 0
        """The last step that some rank is known to have taken."""
        self._is_stopping = False
        self._ends_at = 0.0
        """When ranks that were asked to stop, and of which none heeds it, are ended."""
        self._hang: HangReport | None = None
        self._hung = -1
        """The number of the last collective that was reported to stand still."""
        self._losses: list[RankFailure] = []
        self._settles_at: float | None = None
        self._deadline: float | None = None
        self._failed: WorkerFailed | None = None
        self._cause: BaseException | None = None
        self._on_event: OnEvent = lambda rank, entry: None
        self._on_output: OnOutput = lambda rank, text, stream: None
        here.open(self)
        self.admit(here)

    # -- who is in it ---------------------------------------------------------------------------------------------

    def admit(self, place: RankHost) -> None:
        """Takes in a host's ranks: at the start, or when the ranks are called together the next time."""
        slots = range(len(place.devices))
        self._newcomers += [RankHandle(place, slot, -1, is_running=slot in place.running) for slot in slots]
        if self._has_begun:
            self._interrupt(f"{place.host} has come")

    def dismiss(self, place: RankHost, reason: str) -> None:
        """A host is gone, with all its ranks; the others go on without it."""
        gone = [member for member in self._members if member.place is place]
        self._newcomers = [member for member in self._newcomers if member.place is not place]
        if not gone:
            return
        for member in gone:
            self._say(event("lost", rank=member.rank, host=place.host, reason=reason))
        self._members = [member for member in self._members if member.place is not place]
        if self._after_loss == "end" and self._has_begun and self._failed is None:
            self._give_up(gone[0], RankFailure(gone[0].rank, place.host, reason))
        elif self._after_loss == "restart" or not any(member.done for member in self._members):
            self._interrupt(f"{place.host} {reason}")

    def call(self) -> None:
        """Calls all ranks together under a new generation; those without a process get one."""
        self._generation += 1
        self._hang, self._hung = None, -1
        self._has_begun = True
        self._settles_at, self._losses = None, []
        self._members += self._newcomers
        # The conductor's own host first: its first rank speaks for all, and writes.
        self._members.sort(key=lambda member: member.place is not self._here)
        self._members, self._newcomers = seated(self._members, self._unit)
        if self._newcomers:
            left = ", ".join(member.place.host for member in self._newcomers)
            self._say(event("notice", text=f"{self._unit} ranks make a group: ranks on {left} wait until one is whole"))
        backend = backend_for([member.place.devices[member.slot] for member in self._members])
        key, salt = self._new_key()
        for rank, member in enumerate(self._members):
            member.rank, member.loss, member.waits = rank, None, False
        for member in self._members:
            summons = self._summons(member.rank, backend, key, salt)
            if member.is_running:
                member.place.tell(member.slot, {"summons": summons.to_dict()})
            else:
                member.is_running, member.done, member.failure = True, False, {}
                member.place.start(member.slot, summons)
            if self._is_stopping:
                member.place.tell(member.slot, {"stop": True})

    def _new_key(self) -> tuple[str, str]:
        """Return the secret of this generation's ranks, in hex, and what other hosts need to make it themselves."""
        return secrets.token_hex(32), ""

    def _summons(self, rank: int, backend: str, key: str, salt: str) -> RendezvousInfo:
        return RendezvousInfo(
            generation=self._generation,
            rank=rank,
            size=len(self._members),
            address=self._meeting.address,
            interface=self._meeting.interface,
            port=self._meeting.port if len(self._members) > 1 else 0,
            backend=backend,
            heard=self._heard,
            key=key,
            salt=salt,
        )

    # -- what is heard --------------------------------------------------------------------------------------------

    def heard_event(self, place: RankHost, slot: int, entry: Event) -> None:
        """A rank reported something; one that is no member any more is not heard."""
        for member in self._at(place, slot):
            if entry["kind"] in ("stalled", "stack"):
                self._hear_hang(member, entry)
                continue
            if entry["kind"] == "steps":
                self._heard = entry["steps"][-1]
                self._committed = max(self._committed, self._heard)
            elif entry["kind"] == "step":
                self._committed = max(self._committed, entry["step"])
            elif entry["kind"] == "recovered":
                self._heard = min(self._heard, entry["step"])
            self._on_event(member.rank, entry)

    def _hear_hang(self, member: RankHandle, entry: Event) -> None:
        """A rank stands still, and all are asked where they are; or one has answered."""
        if entry["kind"] == "stack":
            stands = entry["operation"] not in ("", STEP) and entry["seconds"] > HEED_SECONDS
            member.heeds = entry["listens"] and not stands
            if self._hang is not None:
                self._hang.answers[member.rank] = entry
        elif self._hang is None and entry["number"] > self._hung:
            self._hung = entry["number"]
            self._hang = HangReport(entry["number"], len(self._members))
            self._tell({"stacks": True})

    def heard_output(self, place: RankHost, slot: int, text: str, stream: str) -> None:
        """A rank printed a line."""
        for member in self._at(place, slot):
            self._on_output(member.rank, text, stream)

    def heard_lost_world(self, place: RankHost, slot: int, told: dict[str, Any]) -> None:
        """A rank waits to be called together again; where nobody is known to be lost, all are."""
        self._committed = max(self._committed, int(told["step"]))
        for member in self._at(place, slot):
            member.waits = int(told["lost_world"]) == self._generation
            if not member.waits or self._settles_at is not None or self._failed is not None:
                continue
            if any(other.done for other in self._members):
                self._lose(member, f"lost the others: {told['reason']}")
            else:
                self._losses.append(RankFailure(member.rank, place.host, f"lost the others: {told['reason']}"))
                self._interrupt(str(self._losses[-1]))

    def heard_failure(self, place: RankHost, slot: int, failure: dict[str, Any]) -> None:
        """A rank raised; that others lost it is only an echo."""
        for member in self._at(place, slot):
            member.failure = failure
            if not failure["echo"]:
                self._lose(member, f"raised {failure['reason']}")

    def heard_end(self, place: RankHost, slot: int, end: ProcessExit) -> None:
        """A rank's process has ended."""
        for member in self._at(place, slot):
            member.is_running = False
            if end.done:
                member.done, member.result = True, end.result
            else:
                self._lose(member, end.text)
        for member in self._newcomers:
            if member.place is place and member.slot == slot:
                member.is_running = False

    def _at(self, place: RankHost, slot: int) -> Iterator[RankHandle]:
        for member in list(self._members):
            if member.place is place and member.slot == slot:
                yield member

    # -- what is done ---------------------------------------------------------------------------------------------

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
        """Whether results of a host's ranks are for this program."""
        return place is self._here

    def tick(self) -> None:
        """What time alone brings about."""
        self._here.crew.look()
        if self._hang is not None and self._hang.is_due:
            hosts = {member.rank: member.place.host for member in self._members}
            self._say(event("hang", text=self._hang.text(hosts)))
            crossed, self._hang = self._hang.crossed, None
            if crossed and self._after_loss == "restart" and self._failed is None:
                # A script of a person's own, in which not all ranks do the same; begun anew it would come here again.
                first = self._members[0]
                reason = f"ranks wait for each other for ever, in collectives that do not fit: {crossed}"
                self._give_up(first, RankFailure(first.rank, first.place.host, reason))
        if self._has_begun and self.is_complete:
            for member in self._newcomers:
                member.place.kill(member.slot)
        now = time.monotonic()
        if self._settles_at is not None and (now > self._settles_at or self._is_settled()):
            self._decide()
        if self._deadline is not None and now > self._deadline:
            self.kill()

        self._require_heed(now)

    def stop(self) -> None:
        self._is_stopping = True
        self._tell({"stop": True})
        self._await_heed()

    def _await_heed(self) -> None:
        """Asks where all are, to know after a while whether any will end by itself."""
        self._ends_at = time.monotonic() + HEED_SECONDS
        for member in self._members:
            member.heeds = False
        self._tell({"stacks": True})

    def _require_heed(self, now: float) -> None:
        """A script of a person's own may never look whether it should stop, or stand where it cannot."""
        if not self._is_stopping or self._after_loss != "restart" or now < self._ends_at:
            return
        running = [member for member in self._members if member.is_running]
        if running and not any(member.heeds for member in running):
            raise KeyboardInterrupt
        self._await_heed()

    def kill(self) -> None:
        for place in {id(member.place): member.place for member in (*self._members, *self._newcomers)}.values():
            place.kill()

    def finish(self) -> None:
        """Leaves nothing behind, however the wait ended."""
        self.kill()
        self._here.crew.finish()
        self.selector.close()
        self._meeting.close()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has returned."""
        return all(member.done for member in self._members)

    def _is_over(self) -> bool:
        running = any(member.is_running for member in self._members) or not self._here.crew.is_over
        return not running and (self._failed is not None or self.is_complete)

    def _lose(self, member: RankHandle, reason: str) -> None:
        """The others are told at once, so that nobody waits; what becomes of the job is decided a moment later."""
        if self._failed is not None or member.loss is not None or member.done:
            return
        failure = member.failure
        is_echo = self._after_loss == "restart" and bool(failure.get("echo"))
        if is_echo and all(other.done for other in self._members if other is not member):
            # Nobody was lost: the others have come to the end of the script, and would do so again.
            reason = f"waits for ranks that have ended: {failure['reason']}"
            failure = member.failure = {**failure, "reason": reason, "error": None}
            is_echo = False
        raised, is_ours = bool(failure) and not is_echo, bool(failure.get("is_ours")) and not is_echo
        member.loss = RankFailure(member.rank, member.place.host, reason, raised, is_ours, is_echo)
        self._losses.append(member.loss)
        if self._after_loss == "restart" and not raised:
            self._interrupt(str(member.loss))
        elif self._after_loss == "regroup" and self._members[0].done:
            # The run is complete and saved; what one rank still had to say is not missed.
            member.done = True
            member.place.kill(member.slot)
        elif self._after_loss != "regroup" or any(other.done for other in self._members):
            self._give_up(member, member.loss)
        else:
            self._interrupt(str(member.loss))

    def _interrupt(self, why: str) -> None:
        """Ends this generation."""
        if self._settles_at is None and self._failed is None:
            self._settles_at = time.monotonic() + SETTLE_SECONDS
            self._tell({"lost": why, "generation": self._generation})

    def _is_settled(self) -> bool:
        return all(not member.is_running or member.waits or member.loss is not None for member in self._members)

    def _decide(self) -> None:
        restarts = self._after_loss == "restart"
        ending = [member for member in self._members if member.is_running and (restarts or member.loss is not None)]
        if ending:
            # They have said that they failed, or begin anew, and need not take their time to end.
            for member in ending:
                member.loss = member.loss or RankFailure(member.rank, member.place.host, "was ended with the others")
                member.place.kill(member.slot)
            return
        losses = [loss for loss in self._losses if not loss.is_echo] or self._losses
        if not losses or self._judgement.goes_on(losses, size=len(self._members), step=self._committed):
            for loss in losses:
                self._say(event("lost", rank=loss.rank, host=loss.host, reason=loss.reason))
            self.call()
            if restarts:
                self._say(event("notice", text=f"all {len(self._members)} ranks begin anew"))
        else:
            member = next((member for member in self._members if member.loss is losses[0]), self._members[0])
            self._give_up(member, losses[0])

    def _give_up(self, member: RankHandle, loss: RankFailure) -> None:
        failure = member.failure
        reason, trace = failure.get("reason") or loss.reason, failure.get("traceback", "")
        if self._judgement.has_tired:
            self._failed = NoProgress(loss.rank, loss.host, reason, trace)
        else:
            self._failed, self._cause = WorkerFailed(loss.rank, loss.host, reason, trace), failure.get("error")
        self._settles_at = None
        self._tell({"lost": str(loss), "generation": self._generation, "final": True}, without=member)
        self._deadline = time.monotonic() + min(10.0, self._timeout / 5)

    def _say(self, entry: Event) -> None:
        self._on_event(0, entry)

    def _tell(self, message: dict[str, Any], without: RankHandle | None = None) -> None:
        for member in self._members:
            if member is not without and member.is_running:
                member.place.tell(member.slot, message)
