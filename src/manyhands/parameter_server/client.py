"""A worker's client of the parameter servers: pulls values, pushes gradients, and requests rows of tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import zmq
from torch import Tensor, nn

from ..core import TaskError
from .layout import Share, TensorPiece, buffers_of, frames_of, tables_of, tensor_of
from .messages import Attached, EndOfWork, Message, Pull, PullRows, Push, Pushed, RowsReply, ServerList, Values
from .shared_memory import SharedSlots
from .sockets import Caller, ConnectionLost, Frame
from .table import joined

REACH = 1 / 16
"""Fraction of the timeout within which a server must accept a connection; otherwise it is reported as unreachable."""


class ServersMoved(Exception):
    """Raised when a server was replaced or all were loaded again: requests in flight are lost and must be repeated."""

    def __init__(self, server_list: ServerList) -> None:
        self.server_list = server_list


class ServerUnreachable(ConnectionLost):
    """Raised when the connection to a server is lost; the coordinator may know a replacement."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


class WorkEnded(Exception):
    """Raised in a worker when the coordinator ends the job."""


class _ServerConnection:
    """The connection to one server, with buffers for its gradients and values; on the same host, in shared memory."""

    def __init__(self, share: Share, caller: Caller, worker: int | None, timeout: float) -> None:
        self.share, self.caller = share, caller
        self._slots = self._offer(worker, timeout) if worker is not None else None
        self.is_shared = self._slots is not None
        if self._slots is not None:
            self.pushed, self.pulled = self._slots.pushed, self._slots.pulled
        else:
            self.pushed, self.pulled = buffers_of(share), buffers_of(share)
        self.version = 0
        self.is_pulling = False

    def _offer(self, worker: int, timeout: float) -> SharedSlots | None:
        """Return memory that the server has mapped too; None if the server cannot map it, as on another host."""
        slots = SharedSlots(self.share)
        self.caller.send(slots.offer(worker))
        try:
            answer, _ = self.caller.expect(timeout)
        except ConnectionLost:
            slots.close()
            raise
        if isinstance(answer, Attached) and answer.is_shared:
            return slots
        slots.close()
        return None

    def close(self) -> None:
        self.caller.close()
        if self._slots is not None:
            self._slots.close()


class ParameterClient:
    """A worker's client of all parameter servers; the coordinator uses one too, for evaluation."""

    def __init__(
        self,
        model: nn.Module,
        shares: Sequence[Share],
        number: int,
        coordinator: Caller | None,
        token: bytes,
        timeout: float,
    ) -> None:
        self._shares, self._number, self.coordinator = shares, number, coordinator
        self._token, self._timeout = token, timeout
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: list[_ServerConnection] = []
        self._held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for tensor in self._held.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._number_of = {name: index for index, name in enumerate(trained)}
        self.tables = list(tables_of(model).values())
        for name, table in tables_of(model).items():
            table.source, table.name = self, name
        self._table_number = {table.name: index for index, table in enumerate(self.tables)}
        self._touched: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.tables]
        self._before: dict[str, Tensor] = {}
        self.on_wait: Callable[[], None] = lambda: None
        """Called repeatedly while the coordinator's own client waits for a server."""
        self.waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Context in which the client waits for a server, for measuring how long that takes."""
        self.may_share = True
        """Whether tensors go through shared memory if a server is on the same host."""
        self.server_list = ServerList(-1, [])
        self.version = 0
        """The oldest version among the servers' values that are in the network."""

    # -- connections ----------------------------------------------------------------------------------------------

    def connect(self, server_list: ServerList) -> None:
        """Connect to these servers and close earlier connections; raise `ServerUnreachable` if one does not answer."""
        self.disconnect()
        self.server_list = server_list
        deadline = time.monotonic() + self._timeout
        for number, (share, address) in enumerate(zip(self._shares, server_list.servers, strict=True)):
            while len(self._links) == number:
                try:
                    self._links.append(self._reach(share, address))
                except ConnectionLost as lost:
                    if self.coordinator is not None or time.monotonic() > deadline:
                        raise ServerUnreachable(str(lost), number) from None
                    self.on_wait()
                if self.server_list is not server_list:
                    # The awaited server was replaced, and `on_wait` has connected to others.
                    return
        self._touched = [[] for _ in self.tables]

    def _reach(self, share: Share, address: str) -> _ServerConnection:
        caller = Caller(self._context, self._token, address, self._timeout, REACH * self._timeout)
        try:
            return _ServerConnection(share, caller, self._number if self.may_share else None, self._timeout)
        except ConnectionLost:
            caller.close()
            raise

    def disconnect(self) -> None:
        """Close the connections to the servers."""
        for link in self._links:
            link.close()
        self._links = []

    def close(self) -> None:
        """Close all connections, and detach the network's embedding tables from this client."""
        self.disconnect()
        for table in self.tables:
            table.source = None
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()

    # -- values ---------------------------------------------------------------------------------------------------

    def begin_pull(self, version: int) -> None:
        """Request values of at least this version from every server, without waiting for the answers."""
        for link in self._links:
            link.caller.send(Pull(self.server_list.term, version, link.is_shared))
            link.is_pulling = True

    @property
    def is_pulling(self) -> bool:
        """Whether requested values have not arrived yet."""
        return any(link.is_pulling for link in self._links)

    def receive_values(self) -> int:
        """Wait until the requested values have arrived; return the oldest version among them.

        `put_values` then copies the values into the network.
        """
        for link in self._links:
            if link.is_pulling:
                self._await(link, Values)
        return min(link.version for link in self._links)

    @torch.no_grad()
    def put_values(self) -> None:
        """Copy the received values into the network."""
        for link in self._links:
            into = [self._stretch(piece) for flat_buffer in link.share for piece in flat_buffer.pieces]
            values = [
                tensor[piece.place]
                for flat_buffer, tensor in zip(link.share, link.pulled, strict=True)
                for piece in flat_buffer.pieces
            ]
            if into:
                torch._foreach_copy_(into, values)
            for piece, value in zip((p for flat_buffer in link.share for p in flat_buffer.pieces), values, strict=True):
                if not piece.is_trained:
                    self._before[f"{piece.name} {piece.start}"] = value.clone()
        self.version = min(link.version for link in self._links)

    def pull(self, version: int) -> None:
        """Request values of at least this version, wait for them, and copy them into the network."""
        self.begin_pull(version)
        self.receive_values()
        self.put_values()

    # -- gradients ------------------------------------------------------------------------------------------------

    def push(self, ticket: int, scale: float = 1.0, rates: list[float] | None = None) -> int:
        """Send the network's gradients to all servers; return the largest staleness in updates.

        Args:
            ticket: Number of the ticket (a worker's part of a step) whose gradients these are.
            scale: Factor of the gradients in a separate update.
            rates: Learning rates by parameter group if the push is a separate update; None if it is part of a step.
        """
        rows = self._rows_by_server()
        for index, link in enumerate(self._links):
            unused = self._fill(link)
            frames: list[Frame] = [] if link.is_shared else frames_of(link.pushed)
            for ids, gradients in (part[index] for part in rows):
                frames += frames_of([ids, gradients])
            push = Push(self.server_list.term, ticket, link.version, link.is_shared, unused, scale, rates or [])
            link.caller.send(push, frames)
        answers: list[Pushed] = [self._await(link, Pushed)[0] for link in self._links]
        return max(answer.staleness for answer in answers)

    @torch.no_grad()
    def _fill(self, link: _ServerConnection) -> list[int]:
        """Copy gradients and changes of buffers into the send buffers; return the indexes of unused parameters."""
        unused = []
        into, gradients = [], []
        for flat_buffer, buffer in zip(link.share, link.pushed, strict=True):
            for piece in flat_buffer.pieces:
                target, tensor = buffer[piece.place], self._held[piece.name]
                if not piece.is_trained:
                    _require_no_gradient(piece.name, tensor)
                    before = self._before[f"{piece.name} {piece.start}"].to(tensor.device)
                    target.copy_(self._stretch(piece) - before)
                elif tensor.grad is None:
                    unused.append(self._number_of[piece.name])
                    target.zero_()
                else:
                    into.append(target)
                    gradients.append(tensor.grad.reshape(-1)[piece.start : piece.stop])
        if into:
            torch._foreach_copy_(into, gradients)
        return unused

    def _stretch(self, piece: TensorPiece) -> Tensor:
        return self._held[piece.name].detach().view(-1)[piece.start : piece.stop]

    # -- tables ---------------------------------------------------------------------------------------------------

    def rows(self, name: str, ids: Tensor, device: torch.device) -> Tensor:
        """Return rows of an embedding table from the servers that have them; the next push sends their gradients."""
        while True:
            try:
                return self._rows(name, ids, device)
            except ServersMoved:
                # The coordinator only reads rows, and detects itself that another server has them.
                if self.coordinator is not None:
                    raise

    def _rows(self, name: str, ids: Tensor, device: torch.device) -> Tensor:
        number = self._table_number[name]
        table = self.tables[number]
        where = ids.cpu()
        owner = where % len(self._links)
        places = [(owner == index).nonzero().flatten() for index in range(len(self._links))]
        for link, indices in zip(self._links, places, strict=True):
            if len(indices):
                link.caller.send(PullRows(self.server_list.term, number, self.version), frames_of([where[indices]]))
        values = torch.empty(len(where), table.embedding_dim, dtype=table.weight.dtype)
        for link, indices in zip(self._links, places, strict=True):
            if len(indices):
                _, frames = self._await(link, RowsReply)
                values[indices] = tensor_of(frames[0], values.dtype).view(len(indices), -1)
        rows = values.to(device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._touched[number].append((where, rows))
        return rows

    def _rows_by_server(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return, by table and server, the unique ids of the rows that were used, and their gradients."""
        touched, self._touched = self._touched, [[] for _ in self.tables]
        spread = []
        for table, parts in zip(self.tables, touched, strict=True):
            used = [(ids, rows.grad.cpu()) for ids, rows in parts if rows.grad is not None]
            if used:
                ids, gradients = joined([ids for ids, _ in used], [gradient for _, gradient in used])
            else:
                ids, gradients = torch.zeros(0, dtype=torch.int64), torch.zeros(0, table.embedding_dim)
            owner = ids % len(self._links)
            spread.append([(ids[owner == i], gradients[owner == i]) for i in range(len(self._links))])
        return spread

    @property
    def row_gradients(self) -> list[Tensor]:
        """Gradients of the embedding rows that the last backward pass used."""
        return [rows.grad for parts in self._touched for _, rows in parts if rows.grad is not None]

    # -- waiting --------------------------------------------------------------------------------------------------

    def _await(self, link: _ServerConnection, kind: type[Message]) -> tuple[Any, list[Frame]]:
        """Return a server's next answer of this kind; messages from the coordinator are handled first."""
        with self.waiting():
            return self._answer(link, kind)

    def _answer(self, link: _ServerConnection, kind: type[Message]) -> tuple[Any, list[Frame]]:
        callers = [link.caller, *([self.coordinator] if self.coordinator is not None else [])]
        sockets = [socket for caller in callers for socket in (caller.socket, caller.monitor)]
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + self._timeout
        while True:
            ready = dict(poller.poll(100 if self.coordinator is None else None))
            if not ready:
                self.on_wait()
                if link not in self._links:
                    raise ServersMoved(self.server_list)
                if time.monotonic() > deadline:
                    raise ConnectionLost(
                        f"the server at {link.caller.address} did not answer within {self._timeout:.0f} s"
                    )
            if self.coordinator is not None and (self.coordinator.socket in ready or self.coordinator.monitor in ready):
                _on_message(self.coordinator)
            try:
                got = link.caller.receive()
            except ConnectionLost as lost:
                if self.coordinator is not None:
                    raise ServerUnreachable(str(lost), self._links.index(link)) from None
                self._await_others(link, deadline)
            if got is None:
                continue
            message, frames = got
            if isinstance(message, Values):
                link.version, link.is_pulling = message.version, False
                if not link.is_shared:
                    link.pulled = [tensor_of(f, s.dtype) for f, s in zip(frames, link.share, strict=True)]
            if isinstance(message, kind):
                return message, frames

    def _await_others(self, link: _ServerConnection, deadline: float) -> NoReturn:
        """Raise `ServersMoved` when a failed server has been replaced, or `ConnectionLost` after the deadline."""
        while link in self._links and time.monotonic() < deadline:
            time.sleep(0.05)
            self.on_wait()
        if link in self._links:
            raise ConnectionLost(
                f"the server at {link.caller.address} failed and was not replaced within {self._timeout:.0f} s"
            )
        raise ServersMoved(self.server_list)


def _on_message(coordinator: Caller) -> None:
    """Handle an unsolicited message of the coordinator, which is a new server list or the end of the work."""
    got = coordinator.receive()
    if got is None:
        return
    if isinstance(got[0], ServerList):
        raise ServersMoved(got[0])
    if isinstance(got[0], EndOfWork):
        raise WorkEnded
    raise AssertionError(f"the coordinator sent an unexpected {type(got[0]).__name__}")


def _require_no_gradient(name: str, tensor: Tensor) -> None:
    """Raise TaskError if a parameter that was frozen at the start has a gradient, which no server would apply."""
    if tensor.grad is not None:
        raise TaskError(
            "parameters on parameter servers must require a gradient from the start, or never",
            got=f"{name}, which was frozen and has a gradient now",
            remedy="freeze parameters in the model function only, or use mh.Mirrored()",
        )
