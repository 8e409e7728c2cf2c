"""A server's share of the network: values, optimizer state, and the gradients of open steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .layout import Share, buffers_of, frames_of, tables_of, tensor_of
from .messages import (
    Close,
    Load,
    Push,
    ServerState,
    Slots,
)
from .sockets import Frame
from .table import ServerTable, group_of, joined, kind_of, settings_of
from .update import AppliedPushes, pack_slots, pieces_of, unpack_slots


@dataclass
class PendingGradient:
    """The gradient of a ticket, which waits until its step closes."""

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
        """Store the gradient of a push until its step closes; return False if it was applied already."""
        if push.ticket in self.applied_pushes:
            return False
        before = self.held.pop(push.ticket, None)
        buffers = before.dense if before is not None else self._spare.pop() if self._spare else buffers_of(self.share)
        for buffer, gradient in zip(buffers, dense, strict=True):
            buffer.copy_(gradient)
        self.held[push.ticket] = PendingGradient(buffers, frozenset(push.unused), tables)
        return True

    def forget(self, tickets: list[int]) -> None:
        """Drop the stored gradients of these tickets, and keep their buffers for others."""
        for ticket in tickets:
            held = self.held.pop(ticket, None)
            if held is not None:
                self._spare.append(held.dense)

    def sum(self, close: Close) -> float:
        """Sum a step's gradients in the order of their tickets; return the sum's squared norm if it was requested."""
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
        """Apply a push as a separate update; return its staleness in updates.

        `slow` divides the learning rates by 1 + staleness.
        """
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
        """Return the gradients multiplied by `scale`, dense ones in place; changes of buffers are not multiplied."""
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
                    # The workers of the `staleness` updates in between started from the same old statistics.
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
        """Return this server's state as a message and its frames; `wire` is the number of bytes exchanged so far."""
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
        """Replace the state of this server by that of a message and its frames, and drop pending gradients."""
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


def _add_up(tensors: list[Tensor], scales: list[float]) -> None:
    """Sum all tensors into the first one, each multiplied by its scale."""
    if scales[0] != 1.0:
        tensors[0].mul_(scales[0])
    for tensor, scale in zip(tensors[1:], scales[1:], strict=True):
        tensors[0].add_(tensor, alpha=scale)


def _weighted(tensors: list[Tensor], shares: list[float]) -> Tensor:
    """Return the sum of tensors weighted by their shares; that of integers as float64."""
    wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in tensors]
    return torch.stack([tensor * share for tensor, share in zip(wide, shares, strict=True)]).sum(0)
