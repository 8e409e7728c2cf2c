"""Parameter server: holds its share of the parameters, collects gradients, and updates when a step closes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec
from .layout import Share, buffers_of, frames_of, tables_of, tensor_of
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
    ServerState,
    SetFollower,
    Slots,
    Summed,
    Unreachable,
    Values,
    WorkerGone,
)
from .replication import FollowerLink
from .shared_memory import SharedSlots
from .sockets import ConnectionLost, Frame, MessageListener, call_until_reached
from .table import ServerTable, group_of, joined, kind_of, settings_of
from .update import AppliedPushes, pack_slots, pieces_of, unpack_slots


@dataclass
class PendingGradient:
    """A gradient that waits until its step closes."""

    dense: list[Tensor]
    unused: frozenset[int]
    tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class ServerShard:
    """One server's share of the network: values, their optimizer, embedding tables, and the pushes already applied."""

    def __init__(self, number: int, share: Share, model: nn.Module, optimizer: Optimizer) -> None:
        self.number, self.share = number, share
        self.values = buffers_of(share)
        names = dict(model.named_parameters())
        self.optimizer, self.pieces = pieces_of(optimizer, names, share, self.values)
        trained = [name for name, parameter in names.items() if parameter.requires_grad]
        self._number_of = {name: index for index, name in enumerate(trained)}
        self.tables = [
            ServerTable(part, kind_of(part, optimizer), settings_of(name, part, optimizer, model), part.weight.dtype)
            for name, part in tables_of(model).items()
        ]
        self._groups = [group_of(name, optimizer, model) for name in tables_of(model)]
        self.version = 0
        self.applied_pushes = AppliedPushes()
        self.held: dict[int, PendingGradient] = {}
        self._spare: list[list[Tensor]] = []
        self._summed: tuple[list[Tensor], list[tuple[Tensor, Tensor]], frozenset[int], list[float]] | None = None

    # -- gradients ------------------------------------------------------------------------------------------------

    def keep(self, push: Push, dense: list[Tensor], tables: list[tuple[Tensor, Tensor]]) -> bool:
        """Store a gradient until its step closes; return False if it was applied already."""
        if push.ticket in self.applied_pushes:
            return False
        before = self.held.pop(push.ticket, None)
        buffers = before.dense if before is not None else self._spare.pop() if self._spare else buffers_of(self.share)
        for buffer, gradient in zip(buffers, dense, strict=True):
            buffer.copy_(gradient)
        self.held[push.ticket] = PendingGradient(buffers, frozenset(push.unused), tables)
        return True

    def forget(self, tickets: list[int]) -> None:
        """Drop gradients, for example late ones, and reuse their buffers."""
        for ticket in tickets:
            held = self.held.pop(ticket, None)
            if held is not None:
                self._spare.append(held.dense)

    def sum(self, close: Close) -> float:
        """Sum a step's gradients in the order of their tickets; return the squared norm if it was requested."""
        tickets = sorted(close.tickets, key=lambda weighed: weighed.ticket)
        parts = [self.held[weighed.ticket] for weighed in tickets]
        scales, shares = [w.scale for w in tickets], [w.share for w in tickets]
        total = []
        for index, flat_buffer in enumerate(self.share):
            dense = [part.dense[index] for part in parts]
            # Changes of buffers are averaged over samples, independent of what the loss counts.
            added = {p: _weighted([d[p.place] for d in dense], shares) for p in flat_buffer.pieces if not p.is_trained}
            if flat_buffer.dtype.is_floating_point:
                _add_up(dense, scales)
            for piece, value in added.items():
                dense[0][piece.place] = value if value.dtype == flat_buffer.dtype else value.round()
            total.append(dense[0])
        rows = [
            joined(
                [part.tables[i][0] for part in parts],
                [part.tables[i][1] * scale for part, scale in zip(parts, scales, strict=True)],
            )
            for i in range(len(self.tables))
        ]
        unused = frozenset.intersection(*(part.unused for part in parts))
        self._summed = total, rows, unused, close.rates
        return self._square(total, rows) if close.is_measured else 0.0

    def apply(self, tickets: list[int], scale: float) -> None:
        """Apply the update of the step that was summed; a scale of 0 skips it."""
        assert self._summed is not None
        total, rows, unused, rates = self._summed
        self._summed = None
        if scale:
            self._update(*self._scaled(total, rows, scale), unused, rates)
        self.version += 1
        for ticket in tickets:
            self.applied_pushes.add(ticket)
        self.forget(tickets)

    def apply_now(self, push: Push, dense: list[Tensor], tables: list[tuple[Tensor, Tensor]], slow: bool) -> int:
        """Apply a push as a separate update; return its staleness in updates."""
        # A follower that became the server may have an older version than the values pulled from the failed server.
        staleness = max(0, self.version - push.version)
        rates = [rate / (1 + staleness) for rate in push.rates] if slow else push.rates
        if push.scale:
            self._update(*self._scaled(dense, tables, push.scale), frozenset(push.unused), rates, staleness)
        self.version += 1
        self.applied_pushes.add(push.ticket)
        return staleness

    def _scaled(
        self, total: list[Tensor], rows: list[tuple[Tensor, Tensor]], scale: float
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Multiply gradients by a number in place; changes of buffers stay as they are."""
        if scale != 1.0:
            for gradient in self._trained(total):
                gradient.mul_(scale)
            rows = [(ids, gradients * scale) for ids, gradients in rows]
        return total, rows

    def _update(
        self,
        total: list[Tensor],
        rows: list[tuple[Tensor, Tensor]],
        unused: frozenset[int],
        rates: list[float],
        staleness: int = 0,
    ) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate)
            elif "lr" in group:
                group["lr"] = rate
        for flat_buffer, gradient, values in zip(self.share, total, self.values, strict=True):
            for piece in flat_buffer.pieces:
                part = gradient[piece.place]
                if not piece.is_trained:
                    # Workers whose updates came in between started from the same old statistics.
                    values[piece.place] += part / (1 + staleness) if part.is_floating_point() else part
                elif self._number_of[piece.name] in unused:
                    self.pieces[piece].grad = None
                else:
                    parameter = self.pieces[piece]
                    parameter.grad = part.view(parameter.shape)
        self.optimizer.step()
        for table, group_number, (ids, gradients) in zip(self.tables, self._groups, rows, strict=True):
            table.update(ids, gradients, rates[group_number])

    def _trained(self, total: list[Tensor]) -> list[Tensor]:
        return [
            gradient[piece.place]
            for flat_buffer, gradient in zip(self.share, total, strict=True)
            for piece in flat_buffer.pieces
            if piece.is_trained
        ]

    def _square(self, total: list[Tensor], rows: list[tuple[Tensor, Tensor]]) -> float:
        parts = [*self._trained(total), *(gradients for _, gradients in rows)]
        return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    # -- saving and loading ---------------------------------------------------------------------------------------

    def state(self, wire: int) -> tuple[ServerState, list[Frame]]:
        """Return everything that this server holds, as a message and its frames."""
        slots: list[Slots] = []
        frames = list(self.values)
        for parameter in self.pieces.values():
            plain, tensors = pack_slots(self.optimizer.state.get(parameter, {}))
            slots.append(plain)
            frames += tensors
        names = []
        for table in self.tables:
            ids, tensors = table.state()
            names.append([str(table.num_updates), *table.slot_names])
            frames += [ids, *tensors]
        return ServerState(self.version, slots, names, len(self.applied_pushes), wire), frames_of(frames)

    def load(self, load: Load, frames: list[Frame]) -> None:
        """Replace everything that this server holds, and drop pending gradients."""
        at = iter(frames)
        for values in self.values:
            values.copy_(tensor_of(next(at), values.dtype))
        for parameter, slots in zip(self.pieces.values(), load.slots, strict=True):
            self.optimizer.state[parameter] = unpack_slots(slots, at)
        for table, names in zip(self.tables, load.tables, strict=True):
            ids = tensor_of(next(at), torch.int64)
            tensors = [tensor_of(next(at), table.dtype) for _ in range(len(names))]
            table.load(ids, tensors, int(names[0]))
        self.version, self.applied_pushes = load.version, AppliedPushes(load.applied)
        self.forget(list(self.held))
        self._summed = None


class ParameterShardServer:
    """Serves workers and the coordinator, one message at a time, or follows another server (see `FollowerLink`)."""

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
        """By worker: its connection, and the memory shared with it."""
        self._waiting: list[tuple[bytes, Pull | PullRows, list[Frame]]] = []
        self._follower_link: FollowerLink | None = None
        self._has_reported_silence = False
        """Whether the coordinator was informed that the follower does not answer."""
        self._next_follower: str | None = None
        """Address of a follower to fill after the update of the step that was summed."""
        self._closing: Close | None = None
        self._square = 0.0
        self._term = -1
        self._is_over = False
        self.seconds = {"push": 0.0, "pull": 0.0}
        """Seconds spent on pushes and on pulls."""

    def run(self) -> dict[str, Any]:
        """Serve until the coordinator ends the work; return statistics."""
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
        """Replicate to the follower at this address, or continue without a follower if it is empty."""
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


def _add_up(tensors: list[Tensor], scales: list[float]) -> None:
    """Sum all tensors into the first one, each multiplied by its scale."""
    if scales[0] != 1.0:
        tensors[0].mul_(scales[0])
    for tensor, scale in zip(tensors[1:], scales[1:], strict=True):
        tensors[0].add_(tensor, alpha=scale)


def _weighted(tensors: list[Tensor], shares: list[float]) -> Tensor:
    """Return the mean of tensors weighted by their shares, in a dtype that can hold it."""
    wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in tensors]
    return torch.stack([tensor * share for tensor, share in zip(wide, shares, strict=True)]).sum(0)
