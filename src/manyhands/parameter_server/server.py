"""Parameter server: holds its share of the parameters, collects gradients, and updates when a step closes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from ..core import StrategySpec
from .layout import frames_of, tensor_of
from .messages import (
    Apply,
    Attach,
    Attached,
    Close,
    EndOfWork,
    FollowerFilled,
    Heartbeat,
    JoinRequest,
    Load,
    Loaded,
    MessageReplicated,
    NewTerm,
    Pull,
    PullRows,
    Push,
    Pushed,
    ReplicateMessage,
    RowsReply,
    Save,
    SetFollower,
    Summed,
    Unreachable,
    Values,
    WorkerGone,
)
from .shard import ServerShard
from .shared_memory import SharedSlots
from .sockets import Caller, ConnectionLost, Frame, MessageListener, call_until_reached


class ParameterShardServer:
    """Answers the messages of workers and the coordinator one at a time; as a follower, those of another server."""

    def __init__(
        self,
        shard: ServerShard,
        spec: StrategySpec,
        coordinator: str,
        token: bytes,
        timeout: float,
        listens: tuple[str, int] = ("127.0.0.1", 0),
        *,
        leads: bool = True,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.shard, self.spec, self.leads, self.on_wait = shard, spec, leads, on_wait
        self._token, self._timeout, self._chief_address = token, timeout, coordinator
        self._context: zmq.Context[Any] = zmq.Context()
        self._listener = MessageListener(self._context, token, timeout, *listens)
        self._coordinator = call_until_reached(self._context, token, coordinator, timeout, self.on_wait)
        self._slots: dict[int, tuple[bytes, SharedSlots]] = {}
        """By number of a worker: its connection, and the memory that it shares with this server."""
        self._waiting: list[tuple[bytes, Pull | PullRows, list[Frame]]] = []
        self._follower_link: FollowerLink | None = None
        self._has_reported_silence = False
        """Whether the coordinator was informed that the follower does not answer."""
        self._next_follower: str | None = None
        """Address of a follower to which to replicate after the update of the step that was summed."""
        self._closing: Close | None = None
        self._square = 0.0
        self._term = -1
        self._is_over = False
        self.seconds = {"push": 0.0, "pull": 0.0}
        """Seconds spent on pushes and on pulls."""

    def run(self) -> dict[str, Any]:
        """Process messages until the coordinator ends the job; return statistics."""
        self._join()
        try:
            while not self._is_over:
                ready = self._poll()
                if self._coordinator.socket in ready or self._coordinator.monitor in ready:
                    self._on_coordinator_message()
                if self._follower_link is not None:
                    self._on_follower_message(self._follower_link)
                while self._listener.socket in ready and (got := self._listener.receive()) is not None:
                    self._on_member_message(*got)
            return {"num_bytes": self._listener.num_bytes, "applied": len(self.shard.applied_pushes), **self.seconds}
        finally:
            self._close()

    def _join(self) -> None:
        role = "server" if self.leads else "follower"
        self._coordinator.send(JoinRequest(role, self.shard.number, self._listener.address, self._term))

    def _poll(self) -> dict[Any, int]:
        poller = zmq.Poller()
        sockets = [self._listener.socket, self._coordinator.socket, self._coordinator.monitor]
        if self._follower_link is not None:
            sockets += [self._follower_link.caller.socket, self._follower_link.caller.monitor]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        return dict(poller.poll(None if self._follower_link is None else int(1000 * self._timeout / 8)))

    # -- the coordinator ------------------------------------------------------------------------------------------

    def _on_coordinator_message(self) -> None:
        try:
            got = self._coordinator.receive()
        except ConnectionLost:
            # The values stay valid: the coordinator may return, or a new one that has the last checkpoint.
            self._coordinator.close()
            self._coordinator = call_until_reached(
                self._context, self._token, self._chief_address, self._timeout, self.on_wait
            )
            self._join()
            return
        if got is None:
            return
        message, frames = got
        if isinstance(message, Close | Apply):
            if message.term == self._term:
                self._close_step(message)
        elif isinstance(message, Save):
            state, parts = self.shard.state(self._listener.num_bytes)
            self._coordinator.send(state, [bytes(part) for part in parts])
        elif isinstance(message, Load):
            self._load(message, frames)
        elif isinstance(message, WorkerGone):
            self._drop(message.worker)
        elif isinstance(message, NewTerm):
            self._begin_term(message.term)
            self.leads = True
            self._coordinator.send(Loaded(message.term))
        elif isinstance(message, SetFollower):
            self._lead(message.address)
        elif isinstance(message, Heartbeat):
            self._coordinator.send(Heartbeat())
        elif isinstance(message, EndOfWork):
            self._is_over = True

    def _load(self, load: Load, frames: list[Frame]) -> None:
        follower_link = self._follower_link
        if follower_link is not None:
            address = follower_link.caller.address
            follower_link.forward(load, frames, lambda: self._coordinator.send(FollowerFilled(address)))
        self._hold(load, frames)
        self._coordinator.send(Loaded(load.term))

    def _hold(self, load: Load, frames: list[Frame]) -> None:
        self.shard.load(load, frames)
        self._begin_term(load.term)
        self._closing = None

    def _begin_term(self, term: int) -> None:
        """Start a term: drop waiting pulls and shared memory. Workers reconnect when they learn of the new term."""
        self._term, self._waiting = term, []
        for worker in list(self._slots):
            self._drop(worker)

    def _drop(self, worker: int) -> None:
        """Release the memory shared with a worker."""
        if worker in self._slots:
            peer, slots = self._slots.pop(worker)
            slots.close()
            self._waiting = [request for request in self._waiting if request[0] != peer]

    def _shared_with(self, peer: bytes) -> SharedSlots | None:
        return next((slots for owner, slots in self._slots.values() if owner == peer), None)

    def _close_step(self, message: Close | Apply) -> None:
        """Sum a step or apply its update. Idempotent: the coordinator may repeat the message after a server failed."""
        if message.step < self.shard.version:
            return
        if self._follower_link is not None:
            self._follower_link.forward(message, [], lambda: None)
        self._take_step(message)
        if isinstance(message, Close) and message.is_measured:
            self._coordinator.send(Summed(self._term, message.step, self._square))
        self._serve_waiting()
        if self._next_follower is not None and self._closing is None:
            self._lead(self._next_follower)

    def _take_step(self, message: Close | Apply) -> None:
        if isinstance(message, Close):
            if self._closing is None:
                self._square = self.shard.sum(message)
                self._closing = message
            if message.is_measured:
                return
        assert self._closing is not None
        tickets = [weighed.ticket for weighed in self._closing.tickets]
        self.shard.apply(tickets, message.scale if isinstance(message, Apply) else 1.0)
        self._closing = None

    # -- the follower ---------------------------------------------------------------------------------------------

    def _lead(self, address: str) -> None:
        """Replicate to the follower at `address`; continue without a follower if the address is empty."""
        if self._follower_link is not None:
            self._follower_link.close()
        self._follower_link, self._next_follower, self._has_reported_silence = None, None, False
        if not address:
            return
        if self._closing is not None:
            # The gradients of this step are summed already and cannot be replicated one by one.
            self._next_follower = address
            return
        try:
            follower_link = FollowerLink(self._context, self._token, address, self._timeout)
        except ConnectionLost:
            self._coordinator.send(Unreachable(self.shard.number, address))
            return
        state, frames = self.shard.state(0)
        load = Load(self._term, state.version, state.slots, state.tables, self.shard.applied_pushes.state)
        follower_link.forward(load, frames, lambda: self._coordinator.send(FollowerFilled(address)))
        for ticket, held in self.shard.held.items():
            push = Push(self._term, ticket, 0, False, list(held.unused))
            follower_link.forward(
                push, frames_of([*held.dense, *(t for pair in held.tables for t in pair)]), lambda: None
            )
        self._follower_link = follower_link

    def _on_follower_message(self, follower_link: FollowerLink) -> None:
        """Process the follower's acknowledgements; report a silent follower to the coordinator, which decides."""
        try:
            follower_link.process_acks()
            is_silent = follower_link.is_silent
        except ConnectionLost:
            is_silent = True
        if is_silent and not self._has_reported_silence:
            self._has_reported_silence = True
            self._coordinator.send(Unreachable(self.shard.number, follower_link.caller.address))

    def _follow(self, message: Push | Close | Apply | Load, frames: list[Frame]) -> None:
        if isinstance(message, Load):
            self._hold(message, frames)
        elif isinstance(message, Push):
            self._enter(message, *self._parts(message, frames, None))
        else:
            self._take_step(message)

    # -- workers --------------------------------------------------------------------------------------------------

    def _on_member_message(self, peer: bytes, message: Any, frames: list[Frame]) -> None:
        if isinstance(message, ReplicateMessage):
            # A server leads only on the coordinator's request: one that another server fills becomes its follower.
            self.leads = self.leads and not isinstance(message.message, Load)
            if not self.leads:
                self._follow(message.message, frames)
                self._listener.send(peer, MessageReplicated())
        elif isinstance(message, Attach):
            slots = SharedSlots.attached(self.shard.share, message)
            self._drop(message.worker)
            if slots is not None:
                self._slots[message.worker] = peer, slots
            self._listener.send(peer, Attached(slots is not None))
        elif isinstance(message, Push | Pull) and message.is_shared and self._shared_with(peer) is None:
            # The worker of this connection has exited.
            return
        elif isinstance(message, Push) and message.term == self._term:
            self._take(peer, message, frames)
        elif isinstance(message, Pull | PullRows) and message.term == self._term:
            if self.shard.version >= message.version:
                self._give(peer, message, frames)
            else:
                self._waiting.append((peer, message, frames))

    def _take(self, peer: bytes, push: Push, frames: list[Frame]) -> None:
        began = time.perf_counter()
        dense, tables = self._parts(push, frames, peer)
        if push.is_shared:
            self._listener.num_bytes += sum(flat_buffer.num_bytes for flat_buffer in self.shard.share)
        answer: list[Pushed] = []

        def acknowledge() -> None:
            self._listener.send(peer, answer[0])

        if self._follower_link is not None:
            alike = msgspec.structs.replace(push, is_shared=False)
            parts = frames_of([*dense, *(part for pair in tables for part in pair)])
            self._follower_link.forward(alike, parts, acknowledge)
        answer.append(self._enter(push, dense, tables))
        if self._follower_link is None:
            acknowledge()
        self.seconds["push"] += time.perf_counter() - began
        if answer[0].is_new and push.rates:
            self._serve_waiting()

    def _parts(self, push: Push, frames: list[Frame], peer: bytes | None) -> Any:
        """Return the gradients of a push: dense ones, and ids and rows of every table."""
        shard = self.shard
        if push.is_shared:
            slots = self._shared_with(peer or b"")
            assert slots is not None
            dense = slots.pushed
        else:
            dense = [
                tensor_of(frame, flat_buffer.dtype) for frame, flat_buffer in zip(frames, shard.share, strict=False)
            ]
            frames = frames[len(shard.share) :]
        tables = [
            (tensor_of(frames[2 * i], torch.int64), tensor_of(frames[2 * i + 1], table.dtype).view(-1, table.dim))
            for i, table in enumerate(shard.tables)
        ]
        return dense, tables

    def _enter(self, push: Push, dense: list[Tensor], tables: list[tuple[Tensor, Tensor]]) -> Pushed:
        """Store a gradient for its step, or apply it as a separate update."""
        shard = self.shard
        if not push.rates:
            return Pushed(push.ticket, 0, shard.keep(push, dense, tables))
        if push.ticket in shard.applied_pushes:
            return Pushed(push.ticket, 0, False)
        return Pushed(push.ticket, shard.apply_now(push, dense, tables, self.spec.correction), True)

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for peer, message, frames in waiting:
            if self.shard.version >= message.version:
                self._give(peer, message, frames)
            else:
                self._waiting.append((peer, message, frames))

    def _give(self, peer: bytes, message: Pull | PullRows, frames: list[Frame]) -> None:
        began = time.perf_counter()
        shard = self.shard
        if isinstance(message, PullRows):
            rows = shard.tables[message.table].rows(tensor_of(frames[0], torch.int64))
            self._listener.send(peer, RowsReply(shard.version), frames_of([rows]))
        elif message.is_shared:
            slots = self._shared_with(peer)
            assert slots is not None
            for buffer, values in zip(slots.pulled, shard.values, strict=True):
                buffer.copy_(values)
            self._listener.num_bytes += sum(flat_buffer.num_bytes for flat_buffer in shard.share)
            self._listener.send(peer, Values(shard.version))
        else:
            self._listener.send(peer, Values(shard.version), frames_of(shard.values))
        self.seconds["pull"] += time.perf_counter() - began

    def _close(self) -> None:
        if self._follower_link is not None:
            self._follower_link.caller.close()
        for worker in list(self._slots):
            self._drop(worker)
        self._listener.close()
        self._coordinator.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()


Then = Callable[[], None]


class FollowerLink:
    """A server's connection to its follower, with the replicated messages that are not acknowledged yet, in order."""

    def __init__(self, context: zmq.Context[Any], token: bytes, address: str, timeout: float) -> None:
        self.caller = Caller(context, token, address, timeout)
        self._timeout = timeout
        self._unacknowledged: deque[tuple[float, Then]] = deque()

    def forward(self, message: Push | Close | Apply | Load, frames: Sequence[Frame], then: Then) -> None:
        """Send a message that the server is about to apply; `then` is called when the follower has acknowledged it.

        Frames are copied, because an update may change them in place.
        """
        self.caller.send(ReplicateMessage(message), [bytes(frame) for frame in frames])
        self._unacknowledged.append((time.monotonic(), then))

    def process_acks(self) -> None:
        """Process the follower's acknowledgements and run the callbacks that waited for them."""
        while (got := self.caller.receive()) is not None:
            if isinstance(got[0], MessageReplicated):
                self._unacknowledged.popleft()[1]()

    @property
    def is_silent(self) -> bool:
        """Whether an acknowledgement of the follower is overdue."""
        return bool(self._unacknowledged) and time.monotonic() - self._unacknowledged[0][0] > self._timeout / 2

    def close(self) -> None:
        """Close the connection, and run the callbacks that wait for the follower's acknowledgements."""
        self.caller.close()
        while self._unacknowledged:
            self._unacknowledged.popleft()[1]()
