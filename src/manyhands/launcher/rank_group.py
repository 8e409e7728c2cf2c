"""The coordinator's view of a job's ranks: their hosts, the members of the generation, and ranks that join next."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..distributed import Device
from .rendezvous import RendezvousInfo
from .restart_policy import RankFailure


class RankHost(ABC):
    """A host with one or more ranks, by which the coordinator reaches them."""

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


@dataclass(eq=False)
class RankHandle:
    """The coordinator's record of one rank; its number changes when ranks join or leave, its host and slot do not."""

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

    def fail(self, reason: str, *, raised: bool = False, is_ours: bool = False, is_echo: bool = False) -> RankFailure:
        """Record and return the rank's failure in this generation."""
        self.loss = RankFailure(self.rank, self.place.host, reason, raised, is_ours, is_echo)
        return self.loss

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank."""
        self.place.send_message(self.slot, message)

    def kill(self) -> None:
        """Kill the rank."""
        self.place.kill(self.slot)

    def join(self, info: RendezvousInfo) -> None:
        """Send the rank its rendezvous info; start a process for it if it has none."""
        if self.is_running:
            self.send({"rendezvous": info.to_dict()})
        else:
            self.is_running, self.done, self.failure, self.late_since = True, False, {}, None
            self.place.start(self.slot, info)


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


class RankGroup:
    """The ranks of the current generation in order, and those that join at the next rendezvous."""

    def __init__(self, here: RankHost, unit: int) -> None:
        """Create an empty group; `unit` is the number of ranks that together hold one copy of the network."""
        self._here, self.unit = here, unit
        self.members: list[RankHandle] = []
        self.newcomers: list[RankHandle] = []
        """Ranks that join at the next rendezvous: newly arrived ones, and those that did not fill a whole group."""

    def __len__(self) -> int:
        return len(self.members)

    def admit(self, place: RankHost) -> None:
        """Let the ranks of a host join at the next rendezvous."""
        slots = range(len(place.devices))
        self.newcomers += [RankHandle(place, slot, -1, is_running=slot in place.running) for slot in slots]

    def remove(self, place: RankHost) -> list[RankHandle]:
        """Remove the ranks of a host; return those that were members."""
        removed = [member for member in self.members if member.place is place]
        self.newcomers = [member for member in self.newcomers if member.place is not place]
        self.members = [member for member in self.members if member.place is not place]
        return removed

    def assemble(self) -> None:
        """Make newcomers members, in whole groups of `unit` ranks, and number all ranks."""
        members = [*self.members, *self.newcomers]
        # The coordinator's own host comes first: its first rank reports for all ranks, and writes.
        members.sort(key=lambda member: member.place is not self._here)
        self.members, self.newcomers = assign_ranks(members, self.unit)
        for rank, member in enumerate(self.members):
            if member.is_running and not member.waits and member.rank >= 0 and member.late_since is None:
                member.late_since = time.monotonic()
            member.rank, member.loss, member.waits = rank, None, False

    def at(self, place: RankHost, slot: int) -> Iterator[RankHandle]:
        """Yield the member in a slot of a host, if there is one."""
        for member in list(self.members):
            if member.place is place and member.slot == slot:
                yield member

    def mark_ended(self, place: RankHost, slot: int) -> None:
        """Record that the process in a slot of a host has ended."""
        for member in (*self.members, *self.newcomers):
            if member.place is place and member.slot == slot:
                member.is_running = False

    def broadcast(self, message: dict[str, Any], without: RankHandle | None = None) -> None:
        """Send a message to every running member except `without`."""
        for member in self.members:
            if member is not without and member.is_running:
                member.send(message)

    def kill(self) -> None:
        """Kill the ranks of all hosts."""
        for place in {id(member.place): member.place for member in (*self.members, *self.newcomers)}.values():
            place.kill()

    def late(self, timeout: float) -> list[RankHandle]:
        """Return the running members that have not answered a call to a rendezvous within `timeout` seconds."""
        now = time.monotonic()
        waited = [m for m in self.members if m.late_since is not None and now - m.late_since >= timeout]
        return [member for member in waited if member.is_running and member.loss is None]

    @property
    def is_complete(self) -> bool:
        """Whether every rank has returned."""
        return all(member.done for member in self.members)

    @property
    def is_running(self) -> bool:
        """Whether the process of any member is running."""
        return any(member.is_running for member in self.members)

    @property
    def is_settled(self) -> bool:
        """Whether every rank has ended, failed, or waits for a rendezvous."""
        return all(not member.is_running or member.waits or member.loss is not None for member in self.members)
