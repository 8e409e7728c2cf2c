"""The coordinator's view of the servers, followers and workers of a job: their state, processes and connections."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from ..core import Event
from ..distributed import ControlChannel, Device, resolve_host
from ..launcher import RunningJob
from .members import Membership
from .messages import Unauthenticated
from .roles import ProcessRole
from .sockets import MessageListener, new_context, new_token

Start = Callable[[Callable[[Any], Any], Device], RunningJob]
"""Function that starts another function in a separate process on a device."""
TICK = 0.1
"""Seconds that one poll for messages may block."""
GRACE = 1.0
"""Seconds that members have to exit by themselves before they are killed."""


@dataclass(eq=False)
class MemberRecord:
    """The coordinator's record of a server, a follower or a worker."""

    role: str
    number: int
    place: int
    job: RunningJob | None = None
    thread: threading.Thread | None = None
    peer: bytes | None = None
    """ZeroMQ identity of the member's connection; None until the member has joined."""
    address: str = ""
    ticket: int | None = None
    is_asking: bool = False
    step: int = -1
    """The last step for which this worker has delivered a gradient."""
    since: float = 0.0
    received_at: float = 0.0
    """The monotonic time of the last message from this member."""
    is_led: bool = False
    """For a follower: whether the coordinator has sent the follower's address to its server."""
    is_filled: bool = False
    """For a follower: whether it has everything that its server acknowledges to workers."""
    round: int = 0
    """The value of `MemberJobs.num_rounds` when this member was started."""


class MemberConnections:
    """The coordinator's connections to the members that have joined."""

    def __init__(self, start: Start | ProcessRole, timeout: float) -> None:
        listens = ("127.0.0.1", 0)
        if isinstance(start, ProcessRole):
            listens = resolve_host(start.chief.name), start.chief.port
        self.token = start.token if isinstance(start, ProcessRole) else new_token()
        self.context = new_context()
        self._listener = MessageListener(self.context, self.token, timeout, *listens)
        self.address = self._listener.address
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)
        self._members: dict[bytes, MemberRecord] = {}

    def poll(self) -> None:
        """Wait up to TICK seconds for a message."""
        self._poller.poll(int(1000 * TICK))

    def receive(self) -> tuple[bytes, Any, list[Any]] | None:
        """Return the connection of the next received message, the message and its frames; None if there is none."""
        return self._listener.receive()

    def find(self, peer: bytes) -> MemberRecord | None:
        """Return the member of a connection; if it has none any more, notify its process and return None."""
        member = self._members.get(peer)
        if member is None:
            self._listener.send(peer, Unauthenticated())
        return member

    def bind(self, peer: bytes, member: MemberRecord, address: str) -> None:
        """Assign a connection to a member that has joined."""
        self.forget(member)
        member.peer, member.address, member.received_at = peer, address, time.monotonic()
        self._members[peer] = member

    def forget(self, member: MemberRecord) -> None:
        """Ignore further messages of the member's connection, because the member has failed or joined again."""
        self._members.pop(member.peer or b"", None)
        member.peer = None

    def send(self, member: MemberRecord, message: Any, frames: Sequence[Any] = ()) -> None:
        """Send a message to a member that has joined."""
        assert member.peer is not None
        self._listener.send(member.peer, message, frames)

    def send_joined(self, members: Iterable[MemberRecord], message: Any) -> None:
        """Send a message to those of the members that have joined."""
        for member in members:
            if member.peer is not None:
                self.send(member, message)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        self.context.term()


class MemberJobs:
    """Starts members as separate jobs of the engine, and watches each in a thread.

    The processes of a cluster description are started and restarted externally; their members have no job.
    """

    def __init__(
        self, membership: Membership, devices: Sequence[Device], start: Start | ProcessRole, channel: ControlChannel
    ) -> None:
        self._membership, self._devices, self._start, self._channel = membership, devices, start, channel
        self.is_placed = isinstance(start, ProcessRole)
        """Whether members are started and restarted externally."""
        self.num_places = len(devices)
        """Number of workers, one per device."""
        self.num_rounds = 0
        """Number of failure rounds so far: members that fail together count as one."""
        self.is_ending = False
        """Whether members are expected to exit."""
        self.on_output: Callable[[int, str, str], None] = lambda rank, text, stream: None
        """Called with a worker's index (-1 for servers), a line that it printed, and the stream."""
        self.on_exit: Callable[[MemberRecord, BaseException | None], None] = lambda member, error: None
        """Called with a member that exited, and the error of its job."""
        self._queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reported: set[str] = set()

    def start(self, role: str, number: int, place: int) -> MemberRecord:
        """Start a server, follower or worker and return its record; if it is started externally, only create that.

        `place` is the index of a worker's device.
        """
        member = MemberRecord(role, number, place, round=self.num_rounds)
        if isinstance(self._start, ProcessRole):
            return member
        task = self._membership.task
        if role != "worker":
            task = task.replace(data=(torch.zeros(1, 1),), collate=None, batch_size=1)
        work = dataclasses.replace(self._membership, task=task, role=role, number=number)
        member.job = self._start(work.run, self._devices[place] if role == "worker" else Device("cpu"))
        member.thread = threading.Thread(target=self._watch, args=(member,), name=f"{role}-{number}", daemon=True)
        member.thread.start()
        return member

    def _watch(self, member: MemberRecord) -> None:
        """Wait for a member to exit, in a thread; queue its events, output and exit for the coordinator's thread."""
        assert member.job is not None

        def on_event(rank: int, entry: Event) -> None:
            self.run_later(lambda: self._forward(entry))

        def on_output(rank: int, text: str, stream: str) -> None:
            self.run_later(lambda: self.on_output(member.place if member.role == "worker" else -1, text, stream))

        error: BaseException | None = None
        try:
            member.job.wait(on_event, on_output)
        except BaseException as failure:
            error = failure
        self.run_later(lambda: None if self.is_ending else self.on_exit(member, error))

    def _forward(self, entry: Event) -> None:
        """Forward a member's profiles and notices; equal notices are reported once."""
        text = str(entry.get("text", ""))
        is_new = entry["kind"] == "notice" and text not in self._reported
        if is_new:
            self._reported.add(text)
        if is_new or entry["kind"] == "profile":
            self._channel.report(entry)

    def run_later(self, act: Callable[[], None]) -> None:
        """Queue a function that the coordinator's thread calls between two messages."""
        self._queued.put(act)

    def run_queued(self) -> None:
        """Call the queued functions, in the coordinator's thread."""
        while not self._queued.empty():
            self._queued.get()()

    def end(self, members: Iterable[MemberRecord]) -> None:
        """Wait for members to exit, and kill those that do not exit within GRACE seconds."""
        deadline = time.monotonic() + GRACE
        for member in members:
            if member.thread is None or member.job is None:
                continue
            member.thread.join(max(0.0, deadline - time.monotonic()))
            if member.thread.is_alive():
                member.job.kill()
                member.thread.join()
