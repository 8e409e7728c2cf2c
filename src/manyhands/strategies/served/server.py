"""A parameter server: holds its share of the values, gathers gradients, and updates when a step closes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import StrategySpec
from .layout import Share, buffers_of, frames_of, tables_of, tensor_of
from .ledger import Ledger
from .messages import (
    Apply,
    Attach,
    Attached,
    Close,
    End,
    Join,
    Load,
    Loaded,
    Pull,
    PullRows,
    Push,
    Pushed,
    Rows,
    Save,
    Slots,
    State,
    Summed,
    Values,
)
from .post import Caller, Frame, Listener
from .shared import SharedSlots
from .table import Table, joined, kind_of
from .update import pack_slots, pieces_of, unpack_slots


@dataclass
class Held:
    """A gradient that waits for its step to close."""

    dense: list[Tensor]
    unused: frozenset[int]
    tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Shard:
    """One server's part of the network: values, the optimizer on them, tables, and which pushes it has applied."""

    def __init__(self, number: int, share: Share, model: nn.Module, optimizer: Optimizer) -> None:
        self.number, self.share = number, share
        self.values = buffers_of(share)
        names = dict(model.named_parameters())
        self.optimizer, self.pieces = pieces_of(optimizer, names, share, self.values)
        trained = [name for name, parameter in names.items() if parameter.requires_grad]
        self._number_of = {name: index for index, name in enumerate(trained)}
        self.tables = [_table(name, part, optimizer, names) for name, part in tables_of(model).items()]
        self._groups = [_group_of(name, optimizer, names) for name in tables_of(model)]
        self.version = 0
        self.ledger = Ledger()
        self.held: dict[int, Held] = {}
        self._spare: list[list[Tensor]] = []
        self._summed: tuple[list[Tensor], list[tuple[Tensor, Tensor]], frozenset[int], list[float]] | None = None

    # -- gradients ------------------------------------------------------------------------------------------------

    def keep(self, push: Push, dense: list[Tensor], tables: list[tuple[Tensor, Tensor]]) -> bool:
        """Holds a gradient until its step closes; False where it was applied already."""
        if push.ticket in self.ledger:
            return False
        before = self.held.pop(push.ticket, None)
        room = before.dense if before is not None else self._spare.pop() if self._spare else buffers_of(self.share)
        for mine, given in zip(room, dense, strict=True):
            mine.copy_(given)
        self.held[push.ticket] = Held(room, frozenset(push.unused), tables)
        return True

    def forget(self, tickets: list[int]) -> None:
        """Lets gradients go that came too late."""
        for ticket in tickets:
            held = self.held.pop(ticket, None)
            if held is not None:
                self._spare.append(held.dense)

    def sum(self, close: Close) -> float:
        """Adds a step's gradients up, in the order of their tickets; returns the squared norm where it is wanted."""
        tickets = sorted(close.tickets, key=lambda weighed: weighed.ticket)
        parts = [self.held[weighed.ticket] for weighed in tickets]
        scales, shares = [w.scale for w in tickets], [w.share for w in tickets]
        total = []
        for index, slab in enumerate(self.share):
            dense = [part.dense[index] for part in parts]
            # What was added to buffers is averaged over samples, whatever the loss counts.
            added = {p: _weighted([d[p.place] for d in dense], shares) for p in slab.pieces if not p.is_trained}
            if slab.dtype.is_floating_point:
                _add_up(dense, scales)
            for piece, value in added.items():
                dense[0][piece.place] = value if value.dtype == slab.dtype else value.round()
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
        """Takes the update of the step that was summed; a scale of 0 leaves it out."""
        assert self._summed is not None
        total, rows, unused, rates = self._summed
        self._summed = None
        if scale:
            self._update(*self._scaled(total, rows, scale), unused, rates)
        self.version += 1
        for ticket in tickets:
            self.ledger.add(ticket)
        self.forget(tickets)

    def apply_now(self, push: Push, dense: list[Tensor], tables: list[tuple[Tensor, Tensor]], slow: bool) -> int:
        """Takes a push as an update by itself; returns how many updates it did not know of."""
        staleness = self.version - push.version
        rates = [rate / (1 + staleness) for rate in push.rates] if slow else push.rates
        if push.scale:
            self._update(*self._scaled(dense, tables, push.scale), frozenset(push.unused), rates)
        self.version += 1
        self.ledger.add(push.ticket)
        return staleness

    def _scaled(
        self, total: list[Tensor], rows: list[tuple[Tensor, Tensor]], scale: float
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Gradients times a number, in place; what was added to buffers stays as it is."""
        if scale != 1.0:
            for gradient in self._trained(total):
                gradient.mul_(scale)
            rows = [(ids, gradients * scale) for ids, gradients in rows]
        return total, rows

    def _update(
        self, total: list[Tensor], rows: list[tuple[Tensor, Tensor]], unused: frozenset[int], rates: list[float]
    ) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate)
            elif "lr" in group:
                group["lr"] = rate
        for slab, gradient, values in zip(self.share, total, self.values, strict=True):
            for piece in slab.pieces:
                part = gradient[piece.place]
                if not piece.is_trained:
                    values[piece.place] += part
                elif self._number_of[piece.name] in unused:
                    self.pieces[piece].grad = None
                else:
                    parameter = self.pieces[piece]
                    parameter.grad = part.view(parameter.shape)
        self.optimizer.step()
        for table, group_number, (ids, gradients) in zip(self.tables, self._groups, rows, strict=True):
            if len(ids):
                table.update(ids, gradients, rates[group_number])

    def _trained(self, total: list[Tensor]) -> list[Tensor]:
        return [
            gradient[piece.place]
            for slab, gradient in zip(self.share, total, strict=True)
            for piece in slab.pieces
            if piece.is_trained
        ]

    def _square(self, total: list[Tensor], rows: list[tuple[Tensor, Tensor]]) -> float:
        parts = [*self._trained(total), *(gradients for _, gradients in rows)]
        return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    # -- the whole ------------------------------------------------------------------------------------------------

    def state(self, wire: int) -> tuple[State, list[Frame]]:
        """Everything that it holds, as a message and its frames."""
        slots: list[Slots] = []
        frames = list(self.values)
        for parameter in self.pieces.values():
            mine, tensors = pack_slots(self.optimizer.state.get(parameter, {}))
            slots.append(mine)
            frames += tensors
        names = []
        for table in self.tables:
            ids, tensors = table.state()
            names.append([str(table.num_updates), *table.slot_names])
            frames += [ids, *tensors]
        return State(self.version, slots, names, len(self.ledger), wire), frames_of(frames)

    def load(self, load: Load, frames: list[Frame]) -> None:
        """Holds this from now on."""
        at = iter(frames)
        for values in self.values:
            values.copy_(tensor_of(next(at), values.dtype))
        for parameter, slots in zip(self.pieces.values(), load.slots, strict=True):
            self.optimizer.state[parameter] = unpack_slots(slots, at)
        for table, names in zip(self.tables, load.tables, strict=True):
            ids = tensor_of(next(at), torch.int64)
            tensors = [tensor_of(next(at), table.dtype) for _ in range(len(names))]
            table.load(ids, tensors, int(names[0]))
        self.version, self.ledger = load.version, Ledger()
        self.forget(list(self.held))
        self._summed = None


class Server:
    """Answers workers and follows the chief, one message after another."""

    def __init__(
        self,
        shard: Shard,
        spec: StrategySpec,
        chief: str,
        token: bytes,
        timeout: float,
        listens: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.shard, self.spec = shard, spec
        self._context: zmq.Context[Any] = zmq.Context()
        self._listener = Listener(self._context, token, *listens)
        self._chief = Caller(self._context, token, chief, timeout)
        self._slots: dict[bytes, SharedSlots] = {}
        self._waiting: list[tuple[bytes, Pull | PullRows, list[Frame]]] = []
        self._closing: list[int] = []
        self._term = -1
        self._is_over = False
        self.seconds = {"push": 0.0, "pull": 0.0}
        """Where its time went."""

    def run(self) -> dict[str, Any]:
        """Serves until the chief says that it is over; returns what passed through."""
        self._chief.send(Join("server", self.shard.number, self._listener.address))
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._chief.socket, zmq.POLLIN)
        try:
            while not self._is_over:
                ready = dict(poller.poll())
                if self._chief.socket in ready:
                    self._hear_chief()
                while self._listener.socket in ready and (got := self._listener.receive()) is not None:
                    self._hear_worker(*got)
            return {"num_bytes": self._listener.num_bytes, "applied": len(self.shard.ledger), **self.seconds}
        finally:
            self._close()

    def _hear_chief(self) -> None:
        got = self._chief.receive()
        if got is None:
            return
        message, frames = got
        shard = self.shard
        if isinstance(message, Close) and message.term == self._term:
            square = shard.sum(message)
            self._closing = [weighed.ticket for weighed in message.tickets]
            if message.is_measured:
                self._chief.send(Summed(self._term, message.step, square))
            else:
                self._apply(1.0)
        elif isinstance(message, Apply) and message.term == self._term:
            self._apply(message.scale)
        elif isinstance(message, Save):
            state, parts = shard.state(self._listener.num_bytes)
            self._chief.send(state, [bytes(part) for part in parts])
        elif isinstance(message, Load):
            shard.load(message, frames)
            self._term, self._waiting = message.term, []
            self._chief.send(Loaded(message.term))
        elif isinstance(message, End):
            self._is_over = True

    def _apply(self, scale: float) -> None:
        self.shard.apply(self._closing, scale)
        self._serve_waiting()

    def _hear_worker(self, peer: bytes, message: Any, frames: list[Frame]) -> None:
        if isinstance(message, Attach):
            slots = SharedSlots.attached(self.shard.share, message)
            if slots is not None:
                self._slots[peer] = slots
            self._listener.send(peer, Attached(slots is not None))
        elif isinstance(message, Push) and message.term == self._term:
            self._take(peer, message, frames)
        elif isinstance(message, Pull | PullRows) and message.term == self._term:
            if self.shard.version >= message.version:
                self._give(peer, message, frames)
            else:
                self._waiting.append((peer, message, frames))

    def _take(self, peer: bytes, push: Push, frames: list[Frame]) -> None:
        began = time.perf_counter()
        shard = self.shard
        if push.is_shared:
            dense = self._slots[peer].pushed
            self._listener.num_bytes += sum(slab.num_bytes for slab in shard.share)
        else:
            dense = [tensor_of(frame, slab.dtype) for frame, slab in zip(frames, shard.share, strict=False)]
            frames = frames[len(shard.share) :]
        tables = [
            (tensor_of(frames[2 * i], torch.int64), tensor_of(frames[2 * i + 1], table.dtype).view(-1, table.dim))
            for i, table in enumerate(shard.tables)
        ]
        staleness = 0
        if not push.rates:
            is_new = shard.keep(push, dense, tables)
        else:
            is_new = push.ticket not in shard.ledger
            if is_new:
                staleness = shard.apply_now(push, dense, tables, self.spec.correction)
        self._listener.send(peer, Pushed(push.ticket, staleness, is_new))
        self.seconds["push"] += time.perf_counter() - began
        if is_new and push.rates:
            self._serve_waiting()

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
            self._listener.send(peer, Rows(shard.version), frames_of([rows]))
        elif message.is_shared:
            for room, values in zip(self._slots[peer].pulled, shard.values, strict=True):
                room.copy_(values)
            self._listener.num_bytes += sum(slab.num_bytes for slab in shard.share)
            self._listener.send(peer, Values(shard.version))
        else:
            self._listener.send(peer, Values(shard.version), frames_of(shard.values))
        self.seconds["pull"] += time.perf_counter() - began

    def _close(self) -> None:
        for slots in self._slots.values():
            slots.close()
        self._listener.close()
        self._chief.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()


def _add_up(tensors: list[Tensor], scales: list[float]) -> None:
    """Makes the first tensor the sum of all, each multiplied by its scale."""
    if scales[0] != 1.0:
        tensors[0].mul_(scales[0])
    for tensor, scale in zip(tensors[1:], scales[1:], strict=True):
        tensors[0].add_(tensor, alpha=scale)


def _weighted(tensors: list[Tensor], shares: list[float]) -> Tensor:
    """The mean of tensors by their shares, in a dtype that can hold it."""
    wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in tensors]
    return torch.stack([tensor * share for tensor, share in zip(wide, shares, strict=True)]).sum(0)


def _table(name: str, part: Any, optimizer: Optimizer, names: dict[str, nn.Parameter]) -> Table:
    group = optimizer.param_groups[_group_of(name, optimizer, names)]
    kind = kind_of(part, optimizer)
    return Table(part, kind, group if part.optimizer is None else {}, part.weight.dtype)


def _group_of(name: str, optimizer: Optimizer, names: dict[str, nn.Parameter]) -> int:
    weight = names[f"{name}.weight" if name else "weight"]
    return next(i for i, group in enumerate(optimizer.param_groups) if any(weight is p for p in group["params"]))
