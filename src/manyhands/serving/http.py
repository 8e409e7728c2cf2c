"""HTTP/1.1 server with limits against slow, greedy and malformed clients; httptools parses the requests.

The handler is called with complete requests, without an asyncio task or coroutine per request. Measured beside granian
and uvicorn on the same work, this takes a quarter of their time per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import resource
import select
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import httptools
import numpy as np

from ..core import RequestRefused
from .connections import ConnectionBudget, Slot
from .limits import Bodies, Limits
from .security import ServingTls

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_PHRASES[499] = b"Client Closed Request"
_MAX_WAITING, _MAX_WAITING_BYTES = 16, 1 << 20
"""Number and bytes of pipelined requests buffered per connection; beyond that, reading pauses (back-pressure)."""
_MAX_NOW = 1
"""Pipelined requests read together that are handled before other connections get a turn."""
_NUM_TURNS, _TURN_SECONDS = 4, 0.001
"""Pipelined requests of all connections that are handled per turn, and the pause between turns."""
_NUM_PIPELINED = 1 << 11
"""Bytes parsed at a time when a client has sent several requests together."""
_NUM_READ, _MAX_DIRECT = 1 << 14, 1 << 22
"""Bytes read for the parser at a time, and the largest body that bypasses it and is read into its final buffer."""
_LINGER_SECONDS, _LINGER_PAUSE, _NUM_IGNORED = 5.0, 0.01, 1 << 18
"""Seconds a refused client may keep sending, the pause between reads of that data, and the bytes per read."""
_ALWAYS_INFLATED, _NUM_INFLATED, _NUM_PLAIN = 1 << 18, 1 << 14, 1 << 18
"""Decompressed size that any compressed body may have, and compressed and plain bytes processed at a time."""
_ONCE = {b"host", b"origin", b"authorization", b"content-type", b"content-encoding", b"inference-header-content-length"}
"""Headers that affect how a request is handled; a request with one of them twice is ambiguous and refused."""
_MORE = {503: b"Retry-After: 1\r\n", 401: b"WWW-Authenticate: Bearer\r\n"}
_MAX_URL = 4096
"""Maximum bytes of a URL; protocols cache URLs that repeat."""
_HANDSHAKE_SECONDS = 5.0
_BACKLOG = 1024
"""Accept backlog of the listening sockets; the event loop accepts a few connections at a time."""
_NUM_ACCEPTED, _NUM_LOOKED, _NUM_ENTERING, _ENTER_SECONDS = 8, 16, 4, 0.001
"""Connections accepted, examined and admitted per turn, and the pause between turns."""
_DRAIN_SECONDS = 0.005
_ARRIVAL_SECONDS = 0.1
"""Interval at which a closing listener looks for idle connections, and the age that one without data must have."""
_OVER = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_MAX_HANDSHAKES = 256
"""Connections in a TLS handshake; one more evicts another one of them."""
EVICTED = "the connection is closed for newer ones: this request was not complete yet"
JSON = b"application/json"
Body = bytes | bytearray | memoryview
Admit = Callable[[str, Mapping[bytes, bytes]], tuple[int, str] | None]
"""Check a path and headers before the body is read; returns the status and reason of a refusal, or None."""


def _head(status: int, kind: bytes, size: int, extra: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        status,
        _PHRASES.get(status, b""),
        kind,
        size,
        extra,
    )


def _refusal(status: int, reason: str) -> bytes:
    """Return an error response that closes its connection."""
    body = b'{"error":"%b"}' % reason.replace("\\", "/").replace('"', "'").encode()
    return _head(status, JSON, len(body), b"Connection: close\r\n" + _MORE.get(status, b"")) + body


def _too_slow(seconds: float) -> str:
    return f"a request must be complete within {seconds:g} s"


class BadRequest(Exception):
    """Raised for a request that is refused before it reaches the handler."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Request:
    """A complete request and the method to answer it."""

    __slots__ = (
        "_answered", "_connection", "arrived", "body", "cancel", "headers", "held", "keep_alive", "method", "path",
    )  # fmt: skip

    def __init__(self, connection: Connection, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self._connection, self.method, self.path, self.headers = connection, method, path, headers
        self.body: Body = b""
        self.held = 0
        """Bytes counted against the listener's memory limit until this request is answered."""
        self.arrived = time.perf_counter()
        self.keep_alive = True
        self.cancel: Callable[[], None] | None = None
        """Called when the client disconnects before it got its answer."""
        self._answered = False

    def answer(self, status: int, body: bytes, kind: bytes = JSON, extra: bytes = b"") -> None:
        """Send the response; `extra` is header lines, each with its line end."""
        if not self._answered:
            self._answered, self.cancel = True, None
            self._connection.answer(self, status, body, kind, extra)

    def content(self, limit: int) -> Body:
        """Return the body, decompressed if necessary; raises BadRequest if it exceeds the limit."""
        coding = self.coding
        if coding is not None:
            for step in Inflating(self, coding, limit).steps():
                step()
        if len(self.body) > limit:
            raise BadRequest(413, f"a body may have {limit} bytes, but got {len(self.body)}")
        return self.body

    @property
    def coding(self) -> bytes | None:
        """The body's compression, b"gzip" or b"deflate"; None for an uncompressed body."""
        coding = self.headers.get(b"content-encoding", b"identity").lower()
        if coding == b"identity":
            return None
        if coding not in (b"gzip", b"deflate"):
            raise BadRequest(415, f"content-encoding must be gzip or deflate, but got {coding[:40].decode('latin1')}")
        return coding

    def hold(self, num: int) -> None:
        """Count more bytes as held by this request; raises RequestRefused if the memory limit is reached."""
        self._connection.hold(self, num)

    @property
    def inflation(self) -> int:
        """Maximum ratio of the decompressed to the compressed size of a body."""
        return self._connection.limits.inflation


class Inflating:
    """Decompress a body in short steps, which the event loop can interleave with other requests or run on a thread.

    The size of the result is limited both absolutely and relative to the compressed size.
    """

    def __init__(self, request: Request | Compressed, coding: bytes, limit: int) -> None:
        self._request, self._coding, self._limit = request, coding.decode(), limit
        self._most = min(limit, max(_ALWAYS_INFLATED, request.inflation * len(request.body)))
        self._stream = zlib.decompressobj(31 if coding == b"gzip" else 15)
        self._plain, self._rest = bytearray(), memoryview(b"")

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yield functions to call one after the other, in any thread; after the last the request has its plain body."""
        body = memoryview(self._request.body)
        for start in range(0, len(body), _NUM_INFLATED):
            self._rest = body[start : start + _NUM_INFLATED]
            while self._rest and not self._stream.eof:
                held = len(self._plain)
                yield self._step
                self._request.hold(len(self._plain) - held)
                if len(self._plain) > self._most:
                    raise BadRequest(413, self._reason())
        if not self._stream.eof:
            raise BadRequest(400, f"the {self._coding} body ends too early")
        self._request.body = self._plain
        del self._request.headers[b"content-encoding"]

    def _step(self) -> None:
        try:
            self._plain += self._stream.decompress(self._rest, min(_NUM_PLAIN, self._most + 1))
        except zlib.error as error:
            raise BadRequest(400, f"the body must be {self._coding}: {error}") from None
        self._rest = memoryview(self._stream.unconsumed_tail)

    def _reason(self) -> str:
        num, inflation = len(self._request.body), self._request.inflation
        if self._most == self._limit:
            return f"a body may have {self._limit} bytes after decompression, but got more"
        return f"a body of {num} bytes may become {inflation} times larger by decompression, but got more"


class Compressed:
    """The part of a request that `Inflating` needs, for a helper process that has only the body."""

    def __init__(self, body: bytes, inflation: int) -> None:
        self.body: Body = body
        self.inflation = inflation
        self.headers = {b"content-encoding": b""}

    def hold(self, num: int) -> None:
        """Do nothing: in a helper process only the limit of the result applies."""


def inflated(body: bytes, coding: bytes, limit: int, inflation: int) -> bytes:
    """Return the decompressed body; raises BadRequest if it becomes too large."""
    one = Compressed(body, inflation)
    for step in Inflating(one, coding, limit).steps():
        step()
    return bytes(one.body)


Handler = Callable[[Request], None]


class PendingConnection:
    """A connection whose first request head is incomplete: only a socket, without transport or parser."""

    __slots__ = ("has_begun", "since", "slot", "socket")

    def __init__(self, sock: socket.socket, slot: Slot) -> None:
        self.socket, self.slot = sock, slot
        self.since = time.monotonic()
        self.has_begun = False
        """Whether the client has sent anything."""

    def refuse(self, status: int, reason: str) -> None:
        """Send an error response if the client has sent anything, then close the connection."""
        if self.has_begun:
            # Closing a socket with unread data would reset the connection and lose the response.
            with contextlib.suppress(OSError):
                self.socket.recv(_NUM_READ)
            with contextlib.suppress(OSError):
                self.socket.send(_refusal(status, reason))
        self.socket.close()


def _has_input(stream: Any) -> bool:
    """Return whether unread data waits at a socket or transport."""
    number = stream.fileno() if isinstance(stream, socket.socket) else stream.get_extra_info("socket").fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


_FIRST_LINE = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r?\n")


def _is_begun_head(data: bytes, headers: int) -> bool:
    """Return whether bytes may be the start of a request head with at most `headers` lines, but not a complete head.

    >>> [_is_begun_head(data, 100) for data in (b"GET /", b"GET / HTTP/1.1\\r\\n\\r\\n", b"GET\\r\\n", b"?")]
    [True, False, False, False]
    """
    num = data.count(b"\n")
    if not data[:1].isupper() or num > headers or b"\r\n\r\n" in data:
        return False
    return not num or _FIRST_LINE.match(data) is not None


class Entrance:
    """Accept connections a few at a time and keep them until their first request head is complete.

    Until then a connection has no transport, parser or buffer, and its data stays in the kernel. Clients that open many
    connections, stay silent or send half a head therefore cost the event loop little.

    Args:
        enter: Called with an accepted socket and the client's address; returns None where there is no room for it.
        go_in: Called with a connection whose head is complete, or too long.
        leave: Called with a connection that its client has closed.
        limits: Bytes and lines that an incomplete head may have.
        is_secured: Whether connections use TLS, so that heads cannot be inspected and any byte admits the connection.
    """

    def __init__(
        self,
        enter: Callable[[socket.socket, str], PendingConnection | None],
        go_in: Callable[[PendingConnection], None],
        leave: Callable[[PendingConnection], None],
        limits: Limits,
        *,
        is_secured: bool,
    ) -> None:
        self._enter, self._go_in, self._leave = enter, go_in, leave
        self._max_head, self._max_headers = min(limits.head, _NUM_READ // 2), limits.headers
        self._is_secured = is_secured
        self._most = 1 if is_secured else _NUM_ENTERING
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, PendingConnection] = {}
        self._epoll = select.epoll()
        self._sockets: list[socket.socket] = []
        self._readers: dict[int, Callable[[], bool]] = {}
        self._watch(self._epoll.fileno(), self._poll)

    async def open(self, host: str, port: int) -> int:
        """Listen on all addresses of a host; return the port of the first."""
        for family, kind, protocol, _, address in await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            self._sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setblocking(False)
            try:
                sock.bind(address)
                sock.listen(_BACKLOG)
            except OSError:
                self.close()
                raise
            self._watch(sock.fileno(), functools.partial(self._accept, sock))
        return int(self._sockets[0].getsockname()[1])

    def forget(self, pending: PendingConnection) -> None:
        """Stop watching a connection."""
        number = pending.socket.fileno()
        if self._pending.pop(number, None) is not None:
            self._epoll.unregister(number)

    def stop(self) -> None:
        """Stop accepting connections, after those that clients have already established."""
        for sock in self._sockets:
            self._unwatch(sock.fileno())
            # Closing a listening socket resets the connections in its backlog.
            for _ in range(_BACKLOG // _NUM_ACCEPTED):
                if not self._accept(sock):
                    break
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """Stop accepting connections and close the epoll object."""
        self.stop()
        if not self._epoll.closed:
            self._unwatch(self._epoll.fileno())
            self._epoll.close()

    def _watch(self, number: int, work: Callable[[], bool]) -> None:
        self._readers[number] = work
        self._loop.add_reader(number, self._work, number)

    def _unwatch(self, number: int) -> None:
        self._readers.pop(number, None)
        self._loop.remove_reader(number)

    def _work(self, number: int) -> None:
        """Run a bounded piece of work; if more is left, resume after a pause so that other requests go first."""
        if self._readers[number]():
            self._loop.remove_reader(number)
            self._loop.call_later(_ENTER_SECONDS, self._resume, number)

    def _resume(self, number: int) -> None:
        if number in self._readers:
            self._loop.add_reader(number, self._work, number)

    def _accept(self, sock: socket.socket) -> bool:
        """Accept some connections; return whether there may be more."""
        for _ in range(_NUM_ACCEPTED):
            try:
                accepted, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError:
                # No file descriptor is free; pending connections stay in the backlog.
                return True
            accepted.setblocking(False)
            pending = self._enter(accepted, str(peer[0]) if isinstance(peer, tuple) else "")
            if pending is not None:
                self._pending[accepted.fileno()] = pending
                # Edge-triggered: data that was already seen is not reported again.
                self._epoll.register(accepted.fileno(), select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        return True

    def _poll(self) -> bool:
        """Examine some connections that have new data; return whether there may be more."""
        num_in = 0
        for _ in range(_NUM_LOOKED):
            # One event at a time: an edge-triggered event that is polled but not handled would be lost.
            events = self._epoll.poll(0, 1)
            if not events:
                return False
            number, event = events[0]
            num_in += self._check_pending(self._pending[number], is_over=bool(event & _OVER))
            if num_in == self._most:
                break
        return True

    def _check_pending(self, pending: PendingConnection, *, is_over: bool) -> bool:
        """Admit a connection with a complete head or close an ended one; return whether it was admitted."""
        try:
            data = pending.socket.recv(_NUM_READ, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        is_begun = not self._is_secured and len(data) <= self._max_head and _is_begun_head(data, self._max_headers)
        if not data or (is_begun and is_over):
            self.forget(pending)
            self._leave(pending)
            pending.socket.close()
            return False
        if not pending.has_begun:
            pending.has_begun, pending.since = True, time.monotonic()
        if is_begun:
            return False
        self.forget(pending)
        self._go_in(pending)
        return True


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
        self.buffer = memoryview(bytearray(_NUM_READ))
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
            if not pending.has_begun and now - pending.since > _ARRIVAL_SECONDS and not _has_input(pending.socket):
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
                    self._end_pending(pending, 408, _too_slow(self.limits.receive))


class Connection(asyncio.BufferedProtocol):
    """Connection of one client: parses requests, handles them one after the other and writes responses in order."""

    def __init__(self, listener: HttpListener, slot: Slot) -> None:
        self._listener, self.limits, self.slot = listener, listener.limits, slot
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._reading: Request | None = None
        self.since = time.monotonic()
        self._is_blocked = self._is_paused = self._is_reading = self._is_in_head = False
        self._url, self._num_head, self._num_again = b"", 0, 0
        self._max_head = listener.limits.head
        self._num_begun = self._num_framing = 0
        self._ignores_upgrade = False
        """Number of messages so far, and bytes of the current one outside its body."""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._whole: memoryview | None = None
        """Buffer of a body that is read without the parser."""
        self._refusal: tuple[int, str] | None = None
        """Error response to send after the pending responses; data after an unreadable request is not parsed."""
        self._num_body = self._num_counted = self._num_waiting = self._num_held = 0
        self._num_unsent = 0
        """Bytes of responses that wait in the write buffer."""
        self._num_now = 0
        """Requests of the current read that were handled immediately."""
        self._pipelines, self._unparsed = False, b""
        """Whether several requests have arrived together, and their bytes that are not parsed yet."""
        self._most = listener.limits.json

    @property
    def _has_enough(self) -> bool:
        num, num_bytes = len(self._waiting), self._num_waiting
        return num >= _MAX_WAITING or num_bytes >= _MAX_WAITING_BYTES or bool(self._unparsed)

    @property
    def _has_unsent(self) -> bool:
        """Whether parts of a response wait for the client to read, also if too few to pause writing."""
        return bool(self._transport.get_write_buffer_size())

    @property
    def is_busy(self) -> bool:
        """Whether a request is partially received or unanswered, or its response not fully sent."""
        return self._is_reading or self._current is not None or self._is_blocked

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self._listener.add(self):
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.remove(self)
        self._let_go()
        self._forget_unsent()
        # Break the reference cycle with the parser: a half-sent body would stay in memory until the next collection.
        self._parser, self._whole = None, None
        self._waiting.clear()
        self._unparsed = b""
        current, self._current = self._current, None
        if current is not None and current.cancel is not None:
            current.cancel()

    def pause_writing(self) -> None:
        self._is_blocked, self.since = True, time.monotonic()
        # Unsent responses count as memory in use: new requests are refused while there is too much of it.
        self._num_unsent = self._transport.get_write_buffer_size()
        self._listener.bodies.add(self._num_unsent)

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._forget_unsent()
        self._listener.take_turn(self)

    def _forget_unsent(self) -> None:
        self._listener.bodies.give_back(self._num_unsent)
        self._num_unsent = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._refusal is not None:
            return self._listener.ignored
        return self._listener.buffer if self._whole is None else self._whole[self._num_body :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._refusal is not None:
            self._ignore()
            return
        if self._whole is not None:
            self._take_directly(nbytes)
            return
        self._num_now = 0
        if self._pipelines:
            self._unparsed += bytes(self._listener.buffer[:nbytes])
            self._feed_some()
            return
        num_begun = self._num_begun
        self._feed(self._listener.buffer[:nbytes])
        self._pipelines = self._num_begun > num_begun + 1
        if self._reading is not None and not self._transport.is_closing():
            self._go_direct()

    def _feed_some(self) -> None:
        """Parse the received data up to a request that has to wait for its turn."""
        while self._unparsed and not self._waiting and self._refusal is None and self._parser is not None:
            piece, self._unparsed = self._unparsed[:_NUM_PIPELINED], self._unparsed[_NUM_PIPELINED:]
            self._feed(memoryview(piece))
        if self._refusal is not None:
            self._unparsed = b""
        elif self._unparsed and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _go_direct(self) -> None:
        """Read the rest of a body straight into its final buffer; the parser would copy it twice."""
        size = 0 if b"transfer-encoding" in self._headers else int(self._headers.get(b"content-length", b"0"))
        if not self._num_body < size <= _MAX_DIRECT:
            return
        self._whole = np.empty(size, np.uint8).data
        self._whole[: self._num_body] = self._body

    def _take_directly(self, num: int) -> None:
        assert self._whole is not None
        try:
            self._hold(num)
        except RequestRefused as refusal:
            self._refuse(503, refusal.reason)
            return
        self._num_body += num
        if self._num_body == len(self._whole):
            # The old parser still expects this body.
            self._parser = httptools.HttpRequestParser(self)
            self._complete(self._whole)

    def _feed(self, data: memoryview) -> None:
        num_begun, num_body = self._num_begun, self._num_body
        self._parse(data)
        if self._num_begun == num_begun and self._refusal is None:
            self._count_framing(len(data) - (self._num_body - num_body))

    def _count_framing(self, num: int) -> None:
        """Limit the bytes that the parser buffers or skips: unfinished headers, chunk sizes, trailers, empty lines."""
        self._num_framing += num
        if self._is_in_head and self._num_framing > self.limits.head:
            self._refuse(431, f"a request's head may have {self.limits.head} bytes, but got more")
        elif self._num_framing > 2 * self.limits.head + self._num_body:
            self._refuse(
                400,
                "a connection must begin with a request, but got empty lines"
                if not self._is_reading
                else f"chunks must have more bytes than their sizes, extensions and trailers, but got "
                f"{self._num_framing} bytes of these for a body of {self._num_body}",
            )

    def _parse(self, data: memoryview) -> None:
        rest: memoryview | None = None
        try:
            self._parser.feed_data(data)
            if self._is_reading:
                self._hold_body()
        except RequestRefused as refusal:
            self._refuse(503, refusal.reason)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, RequestRefused):
                self._refuse(503, cause.reason)
            elif isinstance(cause, BadRequest):
                self._refuse(cause.status, cause.reason)
            else:
                raise
        except httptools.HttpParserError:
            self._refuse(400, "this is not HTTP/1.1")
        if rest is not None and self._ignores_upgrade:
            self._parse_without_upgrade(rest)

    def _parse_without_upgrade(self, rest: memoryview) -> None:
        """Parse a request again without the protocol to which its client would upgrade (RFC 9110, 7.8).

        The parser skips the body of a request with such a header.
        """
        headers, kept = self._headers, []
        for token in headers.get(b"connection", b"").split(b","):
            if token.strip().lower() not in (b"upgrade", b"http2-settings", b""):
                kept.append(token.strip())
        headers = {name: value for name, value in headers.items() if name not in (b"upgrade", b"http2-settings")}
        # Of a repeated header only one value is known here, so the next request might begin elsewhere than it seems.
        headers[b"connection"] = b", ".join(kept) if not self._num_again else b"close"
        lines = [self._parser.get_method() + b" " + self._url + b" HTTP/" + self._parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in headers.items() if value or name != b"connection"]
        self._ignores_upgrade = False
        self._parser = httptools.HttpRequestParser(self)
        self._parse(memoryview(b"\r\n".join(lines) + b"\r\n\r\n"))
        if self._refusal is None and rest:
            self._parse(rest)

    def on_message_begin(self) -> None:
        self._is_reading = self._is_in_head = True
        self.since = time.monotonic()
        self._url, self._headers, self._num_head, self._num_again = b"", {}, 0, 0
        self._num_begun, self._num_framing = self._num_begun + 1, 0
        self._body, self._num_body, self._num_counted = b"", 0, 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > min(_MAX_URL, self._max_head):
            raise BadRequest(414, f"a URL may have {_MAX_URL} bytes, but got more")

    def on_header(self, name: bytes, value: bytes) -> None:
        headers, name = self._headers, name.lower()
        if (name in headers or not self._is_in_head) and not self._is_another(name):
            return
        # A router must remove the headers that any of the lines names.
        headers[name] = value if name != b"connection" or name not in headers else headers[name] + b"," + value
        self._num_head += len(name) + len(value) + 4
        if self._num_head > self._max_head or len(headers) + self._num_again > self.limits.headers:
            raise self._head_refusal()

    def _is_another(self, name: bytes) -> bool:
        """Return whether a repeated header is used: not in a trailer, and refused if the header is in `_ONCE`."""
        self._num_again += 1
        if self._num_again > self.limits.headers:
            raise self._head_refusal()
        if self._is_in_head and name in _ONCE:
            raise BadRequest(400, f"the header {name.decode('latin1')} must not occur twice")
        return self._is_in_head

    def _head_refusal(self) -> BadRequest:
        if self._num_head > self._max_head:
            return BadRequest(431, f"a request's head may have {self._max_head} bytes, but got more")
        return BadRequest(431, f"a request may have {self.limits.headers} headers, but got more")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._ignores_upgrade = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        if self._ignores_upgrade:
            return
        path = self._url.partition(b"?")[0].decode("latin1")
        refusal = self._listener.admit(path, self._headers)
        if refusal is not None:
            raise BadRequest(*refusal)
        # Only requests with binary tensors, marked by this header, may be large.
        is_text = b"inference-header-content-length" not in self._headers
        self._most = min(self.limits.json, self.limits.body) if is_text else self.limits.body
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self._most:
            raise BadRequest(413, self._too_much(length[:20].decode("latin1")))
        method = self._parser.get_method().decode()
        self._reading = Request(self, method, path, self._headers)
        # A client of HTTP/1.0 may take the end of the connection for the end of the response.
        self._reading.keep_alive = (
            self._parser.should_keep_alive()
            and not self._parser.should_upgrade()
            and self._parser.get_http_version() != "1.0"
        )
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._num_body > self._most:
            raise BadRequest(413, self._too_much("more"))
        if not self._body:
            self._body = body
            return
        # One growing buffer: an object for each small chunk would take many times its bytes.
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += body

    def _too_much(self, got: str) -> str:
        remedy = "; send binary tensors" if self._most < self.limits.body else ""
        return f"a body may have {self._most} bytes, but got {got}{remedy}"

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        self._hold_body()
        self._complete(self._body)

    def _hold_body(self) -> None:
        """Count the received part of a body against the memory limit, once for all chunks that arrived together."""
        num, self._num_counted = self._num_body - self._num_counted, self._num_body
        self._hold(num)

    def _complete(self, body: Body) -> None:
        request, self._reading = self._reading, None
        assert request is not None
        request.body = body
        request.held = self._num_body
        request.arrived = time.perf_counter()
        self._body, self._whole, self._is_reading = b"", None, False
        if self._current is None and not self._is_blocked and not self._waiting and self._num_now < _MAX_NOW:
            self._num_now += 1
            self._current = request
            self._listener.budget.begin_request(self.slot)
            self._listener.handler(request)
        else:
            if self._current is None:
                self._listener.take_turn(self)
            self._waiting.append(request)
            self._num_waiting += len(request.body)
            if self._has_enough and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def hold(self, request: Request, num: int) -> None:
        """Count more bytes as held by a request; raises RequestRefused if the limit is reached."""
        self._hold(num)
        request.held += num

    def answer(self, request: Request, status: int, body: bytes, kind: bytes, extra: bytes) -> None:
        """Write a response and continue with the next request."""
        if request is not self._current:
            return
        keep = request.keep_alive and not self._listener.is_closing
        head = _head(status, kind, len(body), extra if keep else extra + b"Connection: close\r\n")
        self._transport.write(head if request.method == "HEAD" else head + body)
        self._current, self.since = None, time.monotonic()
        self._listener.budget.end_request(self.slot)
        self._listener.bodies.give_back(request.held)
        self._num_held -= request.held
        if self._listener.on_answer is not None:
            self._listener.on_answer(request, status, len(body))
        if not keep:
            self._waiting.clear()
            self._transport.close()
        elif self._waiting:
            self._listener.take_turn(self)
        elif self._refusal is not None:
            self._refuse(*self._refusal)

    def check_times(self, now: float) -> None:
        """Close a connection whose client is too slow to send, to read the response, or to send another request."""
        silent = now - self.since
        is_unread = self._is_blocked or (self._current is None and self._has_unsent)
        if is_unread or (self._is_reading and not self._is_paused):
            if silent > self.limits.receive:
                if is_unread:
                    self._transport.abort()
                else:
                    self._refuse(408, _too_slow(self.limits.receive))
        elif self._current is None and silent > self.limits.idle:
            self._transport.close()

    def close(self) -> None:
        """Close the connection after the written data is sent."""
        self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is in flight or has arrived; closing would reset the latter."""
        if not self.is_busy and not self._waiting and not _has_input(self._transport):
            self.close()

    def hand_on(self) -> None:
        """Handle the next waiting request, and parse the data after it."""
        if self._current is None and self._waiting and not self._is_blocked and not self._transport.is_closing():
            self._current = self._waiting.popleft()
            self._num_waiting -= len(self._current.body)
            self._feed_some()
            if self._is_paused and not self._has_enough:
                self._is_paused, self.since = False, time.monotonic()
                self._transport.resume_reading()
            self._listener.budget.begin_request(self.slot)
            self._listener.handler(self._current)

    def _hold(self, num: int) -> None:
        self._listener.bodies.take(num)
        self._num_held += num

    def _let_go(self) -> None:
        """Release the memory held by all unanswered requests."""
        self._listener.bodies.give_back(self._num_held)
        self._num_held, self._body = 0, b""

    def _refuse(self, status: int, reason: str) -> None:
        """Answer an unreadable request and close the connection, since the start of the next request is unknown."""
        if self._current is not None or self._waiting:
            self._refusal, self._whole = self._refusal or (status, reason), None
        elif not self._transport.is_closing():
            self._transport.write(_refusal(status, reason))
            self._linger()

    def _linger(self) -> None:
        """Discard further input for a while: an immediate close would lose the response of a client still sending."""
        self._refusal, self._whole, self._is_reading = self._refusal or (0, ""), None, False
        self._let_go()
        if self in self._listener.connections and self._transport.can_write_eof():
            self._transport.write_eof()
            linger = min(self.limits.receive, _LINGER_SECONDS)
            asyncio.get_running_loop().call_later(linger, self._transport.abort)
        else:
            self._transport.close()

    def _ignore(self) -> None:
        """Pause between reads of a refused client, so that discarding its data does not slow down other clients."""
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(_LINGER_PAUSE, self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing() and not self._is_paused:
            self._transport.resume_reading()

    def evict(self) -> None:
        """Close the connection to make room for another; a client in the middle of a request gets a 503."""
        if self._is_reading:
            self._refuse(503, EVICTED)
        self._listener.remove(self)
        # A closed transport stays open until its client has read everything, which it may never do.
        self._transport.abort() if self._is_blocked or self._has_unsent else self._transport.close()
