"""HTTP/1.1 listener: the connections of one listening address, with limits against slow and greedy clients."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .connections import ConnectionBudget, Slot
from .http import EVICTED, Handler, Request, too_slow
from .http_connection import Connection
from .http_entrance import NUM_READ, Entrance, PendingConnection, has_input
from .limits import Bodies, Limits
from .security import ServingTls

_NUM_TURNS, _TURN_SECONDS = 4, 0.001
"""Pipelined requests of all connections that are handled per turn, and the pause between turns."""
_NUM_IGNORED = 1 << 18
"""Bytes read at a time of data that is discarded."""
_HANDSHAKE_SECONDS = 5.0
_DRAIN_SECONDS = 0.005
_ARRIVAL_SECONDS = 0.1
"""Interval at which a closing listener looks for idle connections, and the age that one without data must have."""
_MAX_HANDSHAKES = 256
"""Connections in a TLS handshake; one more evicts another one of them."""
Admit = Callable[[str, Mapping[bytes, bytes]], tuple[int, str] | None]
"""Check a path and headers before the body is read; returns the status and reason of a refusal, or None."""


class HttpListener:
    """All connections of one listening address, with their limits."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        tls: ServingTls | None = None,
        admit: Admit = lambda path, headers: None,
    ) -> None:
        self.handler, self.limits, self.admit = handler, limits, admit
        self.bodies = Bodies(limits.bodies)
        self._tls = tls
        # Half of the file descriptors are for models and other listeners.
        most = min(limits.connections, max(16, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256) // 2))
        self.budget = ConnectionBudget(most, limits.connections_per_address, _MAX_HANDSHAKES)
        self._pending: dict[PendingConnection, None] = {}
        """Connections whose first head is incomplete, oldest first."""
        self._turns: deque[Connection] = deque()
        """Connections whose next pipelined request is due."""
        self._connecting: set[asyncio.Task[None]] = set()
        self.buffer = memoryview(bytearray(NUM_READ))
        """Read buffer shared by all connections; each uses it only during one read."""
        self.ignored = memoryview(bytearray(_NUM_IGNORED))
        """Buffer for data that is read and discarded."""
        self.connections: set[Connection] = set()
        self.is_closing = False
        """Whether every response closes its connection because the server is shutting down."""
        self.on_answer: Callable[[Request, int, int], None] | None = None
        """Called with a request, and the status and body size of its response."""
        self._entrance: Entrance | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> int:
        """Start listening and return the port."""
        is_secured = self._tls is not None
        self._entrance = Entrance(
            self._enter_pending, self._go_in, self._drop_pending, self.limits, is_secured=is_secured
        )
        try:
            found = await self._entrance.open(host, port)
        except OSError:
            self._entrance.close()
            raise
        self._sweeper = asyncio.ensure_future(self._sweep())
        return found

    @property
    def num_busy(self) -> int:
        """Number of connections with an unanswered or partially received request."""
        begun = sum(pending.has_begun for pending in self._pending)
        return begun + len(self._connecting) + sum(connection.is_busy for connection in self.connections)

    @property
    def num_pending(self) -> int:
        """Number of connections whose first head is incomplete."""
        return len(self._pending)

    def add(self, connection: Connection) -> bool:
        """Add an established connection; return False if it was evicted while it was being established."""
        self.budget.end_handshake(connection.slot)
        if connection.slot not in self.budget:
            return False
        connection.slot.evict = connection.evict
        self.connections.add(connection)
        return True

    def _enter_pending(self, accepted: socket.socket, address: str) -> PendingConnection | None:
        slot = Slot(address, lambda: self._end_pending(pending, 503, EVICTED))
        pending = PendingConnection(accepted, slot)
        if not self.budget.enter(slot):
            pending.has_begun = True
            pending.refuse(503, self.full)
            return None
        self._pending[pending] = None
        return pending

    def _drop_pending(self, pending: PendingConnection) -> None:
        self._pending.pop(pending, None)
        self.budget.leave(pending.slot)

    def _end_pending(self, pending: PendingConnection, status: int, reason: str) -> None:
        assert self._entrance is not None
        self._entrance.forget(pending)
        self._drop_pending(pending)
        pending.refuse(status, reason)

    def _go_in(self, pending: PendingConnection) -> None:
        """Establish a connection; its slot stays in the budget."""
        del self._pending[pending]
        slot, sock = pending.slot, pending.socket
        slot.evict = lambda: self._end_connecting(slot, sock)
        if self._tls is not None:
            self.budget.begin_handshake(slot)
        task = asyncio.ensure_future(self._connect(sock, slot))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _end_connecting(self, slot: Slot, sock: socket.socket) -> None:
        self.budget.leave(slot)
        # The handshake fails with the end of the input, and its task closes the socket.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    async def _connect(self, sock: socket.socket, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        secured: dict[str, Any] = {}
        if self._tls is not None:
            timeout = min(self.limits.receive, _HANDSHAKE_SECONDS)
            secured = {
                "ssl": self._tls.for_server,
                "ssl_handshake_timeout": timeout,
                # A client that never answers the end of TLS would keep its socket open.
                "ssl_shutdown_timeout": timeout,
            }
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(lambda: Connection(self, slot), sock, **secured)
        except OSError:
            sock.close()
            self.budget.leave(slot)

    @property
    def full(self) -> str:
        """Reason why there is no room for another connection."""
        return f"too many connections: all of {len(self.connections)} have requests that are being answered"

    def take_turn(self, connection: Connection) -> None:
        """Queue a connection's next pipelined request; a few requests over all connections are handled per turn."""
        self._turns.append(connection)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        for _ in range(min(len(self._turns), _NUM_TURNS)):
            # The connection stays in the queue while it is handled, so that no second turn is scheduled.
            self._turns[0].hand_on()
            self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_later(_TURN_SECONDS, self._hand_on)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        if connection in self.connections:
            self.connections.remove(connection)
            self.budget.leave(connection.slot)

    async def drain(self, grace: float, until: float) -> None:
        """Answer the requests in flight and close every connection.

        For `grace` seconds connections stay open, and every response announces the end of its connection. Clients that
        send requests again and again thereby learn of it without a failed request.
        """
        self.is_closing = True
        quiet = min(time.monotonic() + grace, until)
        while self._num_open and time.monotonic() < quiet:
            await asyncio.sleep(_DRAIN_SECONDS)
        if self._entrance is not None:
            self._entrance.stop()
        while self._close_idle() and time.monotonic() < until:
            await asyncio.sleep(_DRAIN_SECONDS)

    @property
    def _num_open(self) -> int:
        return len(self._pending) + len(self._connecting) + len(self.connections)

    def _close_idle(self) -> int:
        """Close the connections without a request, and return how many others there are."""
        now = time.monotonic()
        for pending in list(self._pending):
            # The first bytes of a client that has just connected may still be on their way.
            if not pending.has_begun and now - pending.since > _ARRIVAL_SECONDS and not has_input(pending.socket):
                self._end_pending(pending, 503, "the server is closing")
        for connection in list(self.connections):
            connection.close_if_idle()
        return self._num_open

    def close(self) -> None:
        """Close the listener and all connections."""
        self.is_closing = True
        if self._entrance is not None:
            self._entrance.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for pending in list(self._pending):
            self._end_pending(pending, 503, "the server is closing")
        if self._entrance is not None:
            self._entrance.close()
        for connection in list(self.connections):
            connection.close()

    async def _sweep(self) -> None:
        """Check the timeouts of all connections periodically, which is cheaper than a timer per request."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.receive / 4))
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check_times(now)
            for pending in list(self._pending):
                if now - pending.since > (self.limits.receive if pending.has_begun else self.limits.idle):
                    self._end_pending(pending, 408, too_slow(self.limits.receive))
