"""Gate in front of gRPC: counts connections by network and checks frames before gRPC reads them.

gRPC for Python accepts connections itself and cannot adopt one. It listens on a Unix socket in a private folder, and
the gate forwards to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from typing import Any

from .connections import ConnectionBudget, Slot
from .http2_frames import ClientFrames, FrameRefused, ServerFrames
from .limits import Limits
from .port_reservation import addresses_of
from .security import ServingTls

BACKLOG = 1024
NUM_ACCEPTED, ACCEPT_SECONDS = 8, 0.001
"""Connections accepted per turn of the event loop, and the pause until the next turn if there may be more."""
MAX_HANDSHAKES = 256
"""Connections in a TLS handshake; one more evicts another one of them."""
HANDSHAKE_SECONDS = 5.0
"""Maximum seconds for TLS, and for a client to acknowledge the server's settings."""
REFUSED_SECONDS, MAX_DISCARDED = 1.0, 1 << 20
"""Seconds and bytes that a refused client may still send before the connection is closed."""
NUM_BUFFERED = 1 << 16
"""Bytes that wait for one side before the other side is no longer read (back-pressure)."""
WAIT_SECONDS = 0.1
"""Seconds until frames that were held back are checked again."""
ACTIVE_SECONDS = 1.0
"""Granularity of the order in which idle connections are evicted."""


class GrpcGate:
    """Listener that forwards connections to gRPC's Unix socket.

    Args:
        path: The path of that socket.
        most: Maximum number of connections.
        most_per_network: Maximum number of connections from one network.
    """

    def __init__(self, path: str, limits: Limits, tls: ServingTls | None, most: int, most_per_network: int) -> None:
        self.path, self.limits, self._tls = path, limits, tls
        self.budget = ConnectionBudget(most, most_per_network, MAX_HANDSHAKES)
        self.handshake_seconds = min(limits.receive, HANDSHAKE_SECONDS)
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[GateConnection] = set()
        self._by_peer: dict[str, GateConnection] = {}
        """Connections by the names under which gRPC knows them."""

    async def open(self, host: str, port: int, *, is_reserved: bool = False) -> int:
        """Listen on all addresses of a host and return the port; raises OSError if it is not free.

        A port that is reserved is shared with the socket that reserves it.
        """
        last = OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine")
        for family, address in await addresses_of(host):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_reserved else socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setblocking(False)
                sock.bind((address, port))
                sock.listen(BACKLOG)
            except OSError as error:
                sock.close()
                if error.errno == errno.EADDRINUSE:
                    self.stop()
                    raise
                # An address without an interface, as ::1 where IPv6 is disabled.
                last = error
                continue
            port = int(sock.getsockname()[1])
            self._sockets.append(sock)
        if not self._sockets:
            raise last
        for sock in self._sockets:
            self._watch(sock)
        return port

    def stop(self) -> None:
        """Stop accepting connections."""
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """Stop accepting connections and close all connections."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()

    def drop(self, peer: str) -> None:
        """Close the connection that gRPC knows under a name, as its `context.peer()` has it."""
        connection = self._by_peer.get(peer)
        if connection is not None:
            connection.abort()

    def name(self, peer: str, connection: GateConnection) -> None:
        """Keep the name of a connection until it is closed."""
        self._by_peer[peer] = connection

    def forget(self, peer: str) -> None:
        """Forget the name of a connection that is closed."""
        self._by_peer.pop(peer, None)

    def _watch(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        """Accept some connections; if there may be more, continue after a pause, so that calls go first."""
        for _ in range(NUM_ACCEPTED):
            try:
                accepted, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # No file descriptor is free; pending connections stay in the backlog.
                break
            accepted.setblocking(False)
            self._enter(accepted, str(peer[0]))
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock.fileno())
        loop.call_later(ACCEPT_SECONDS, self._watch, sock)

    def _enter(self, sock: socket.socket, address: str) -> None:
        connection = GateConnection(self, sock)
        connection.slot = Slot(address, connection.abort)
        if not self.budget.enter(connection.slot):
            sock.close()
            return
        self.connections.add(connection)
        task = asyncio.ensure_future(self._connect(connection, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: GateConnection, sock: socket.socket) -> None:
        secured: dict[str, Any] = {}
        if self._tls is not None:
            seconds = self.handshake_seconds
            secured = {
                "ssl": self._tls.for_grpc_server,
                "ssl_handshake_timeout": seconds,
                "ssl_shutdown_timeout": seconds,
            }
            self.budget.begin_handshake(connection.slot)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock, **secured)
        except (OSError, asyncio.CancelledError):
            sock.close()
            connection.leave()


class GateConnection(asyncio.Protocol):
    """Connection of a client: forwards checked frames to gRPC, and gRPC's answers to the client."""

    def __init__(self, gate: GrpcGate, sock: socket.socket) -> None:
        self._gate, self._socket = gate, sock
        self.slot: Slot
        self._loop = asyncio.get_running_loop()
        self._frames, self._answers = ClientFrames(gate.limits, self._loop.time), ServerFrames()
        self._client: Any = None
        self._server: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self._pending: list[bytes] = []
        """Checked frames until gRPC has sent its settings."""
        self._is_forwarding, self._is_server_full, self._is_reading = False, False, True
        self._waiting: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._active = 0.0
        self._is_refused, self._num_discarded = False, 0
        self._peer = ""
        """The name under which gRPC knows the connection."""

    # -- the client's side --

    def connection_made(self, transport: Any) -> None:
        self._client = transport
        self._gate.budget.end_handshake(self.slot)
        if self.slot not in self._gate.budget:
            transport.abort()
            return
        transport.set_write_buffer_limits(NUM_BUFFERED)
        self._deadline = self._loop.call_later(self._gate.handshake_seconds, self._check_handshake)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_DISCARDED:
                self._client.abort()
            return
        try:
            checked = self._frames.take(data)
        except FrameRefused as refused:
            self._refuse(refused)
            return
        if checked:
            if self._is_forwarding:
                if self._server is not None:
                    self._server.write(checked)
            else:
                self._pending.append(checked)
                if self._connecting is None:
                    self._connecting = asyncio.ensure_future(self._connect())
        if self._frames.is_waiting:
            self._waiting = self._loop.call_later(WAIT_SECONDS, self._retry)
        self._read_if_possible()

    def _retry(self) -> None:
        """Check frames again that were held back."""
        if self._waiting is not None and not self._client.is_closing():
            self._waiting.cancel()
            self._waiting = None
            self.data_received(b"")

    def _read_if_possible(self) -> None:
        """Read from the client, unless gRPC has not started, is behind, or frames are held back."""
        is_reading = not (
            self._is_server_full or self._frames.is_waiting or (self._pending and not self._is_forwarding)
        )
        if is_reading is not self._is_reading and not self._client.is_closing():
            self._is_reading = is_reading
            (self._client.resume_reading if is_reading else self._client.pause_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()

    def pause_writing(self) -> None:
        """Read nothing from gRPC until the client has read enough."""
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None and not self._server.is_closing():
            self._server.resume_reading()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._client is not None:
            self._client.abort()
        else:
            # It is in the TLS handshake, which fails then.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.leave()

    def leave(self) -> None:
        """Count the connection no longer and close its connection to gRPC."""
        self._gate.budget.leave(self.slot)
        self._gate.connections.discard(self)
        self._gate.forget(self._peer)
        for timer in (self._deadline, self._waiting):
            if timer is not None:
                timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._server is not None:
            self._server.abort()

    def _check_handshake(self) -> None:
        if not self._frames.has_acknowledged:
            self._client.abort()

    def _refuse(self, refused: FrameRefused) -> None:
        """Send the reason, and close the connection a little later: unread data would reset it before it is read."""
        self._is_refused = True
        self._client.write(refused.frame())
        if self._client.can_write_eof():
            self._client.write_eof()
        if not self._is_reading:
            self._is_reading = True
            self._client.resume_reading()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(REFUSED_SECONDS, self._client.abort)
        if self._server is not None:
            self._server.abort()

    def _end_client(self) -> None:
        """Close the connection after what was written has been sent, or else after a few seconds."""
        self._client.close()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(self._gate.handshake_seconds, self._client.abort)
        if self._server is not None:
            self._server.abort()

    # -- gRPC's side --

    async def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            # The kernel chooses a name, by which gRPC's calls are assigned to connections.
            sock.bind("")
            sock.connect(self._gate.path)
            self._peer = f"unix-abstract:{sock.getsockname()[1:].decode()}"
            self._gate.name(self._peer, self)
            await self._loop.create_unix_connection(functools.partial(GateUpstream, self), sock=sock)
        except OSError:
            sock.close()
            self._client.abort()
        except asyncio.CancelledError:
            sock.close()
            raise

    def server_connected(self, transport: Any) -> None:
        """Take the connection to gRPC, which sends its settings first."""
        self._server = transport
        transport.set_write_buffer_limits(NUM_BUFFERED)

    def server_sent(self, data: bytes) -> None:
        """Forward what gRPC sends."""
        if not self._is_forwarding:
            # It starts with the settings that the checked frames acknowledge.
            self._is_forwarding = True
            self._server.write(b"".join(self._pending))
            self._pending.clear()
            self._read_if_possible()
        self._client.write(data)
        frames = self._frames
        if frames.has_answer:
            frames.take_answer(len(data))
            now = self._loop.time()
            if now - self._active > ACTIVE_SECONDS:
                self._active = now
                self._gate.budget.touch(self.slot)
        elif self._answers.has_message(data):
            frames.has_answer = True
            self._retry()

    def server_lost(self) -> None:
        """Close the connection of the client after gRPC has closed its side."""
        self._server = None
        if not self._client.is_closing() and not self._is_refused:
            self._end_client()

    def pause_client(self) -> None:
        """Read nothing from the client until gRPC has read enough."""
        self._is_server_full = True
        self._read_if_possible()

    def resume_client(self) -> None:
        """Read from the client again."""
        self._is_server_full = False
        self._read_if_possible()


class GateUpstream(asyncio.Protocol):
    """Connection to gRPC's Unix socket for one client."""

    def __init__(self, connection: GateConnection) -> None:
        self._connection = connection
        self.data_received = connection.server_sent  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = connection.pause_client, connection.resume_client  # type: ignore[method-assign]

    def connection_made(self, transport: Any) -> None:
        self._connection.server_connected(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.server_lost()
