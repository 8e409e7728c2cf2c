"""HTTP/1.1 with limits: httptools reads requests, this file keeps slow, greedy and broken clients in their place.

A request is handed on whole, without a task or a coroutine of its own. Measured beside granian and uvicorn on the same
work, this takes a quarter of their time per request.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import numpy as np

from ..core import RequestRefused
from .limits import Bodies, Limits
from .security import Tls

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_PHRASES[499] = b"Client Closed Request"
_MAX_WAITING, _MAX_WAITING_BYTES = 16, 1 << 20
"""Pipelined requests of one connection, and their bytes; what comes beyond waits in the network."""
_NUM_READ, _MAX_DIRECT = 1 << 14, 1 << 22
"""Bytes that are read for the parser at a time, and of bodies that are read past it, straight to where they stay."""
JSON = b"application/json"
Body = bytes | memoryview


def _head(status: int, kind: bytes, size: int, extra: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        status,
        _PHRASES.get(status, b""),
        kind,
        size,
        extra,
    )


class BadRequest(Exception):
    """A request that is answered before anybody looks at it."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Request:
    """A whole request, and the way to answer it."""

    __slots__ = (
        "_answered", "_connection", "arrived", "body", "cancel", "headers", "held", "keep_alive", "method", "path",
    )  # fmt: skip

    def __init__(self, connection: Connection, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self._connection, self.method, self.path, self.headers = connection, method, path, headers
        self.body: Body = b""
        self.held = 0
        """Bytes that count as this request's until it is answered."""
        self.arrived = time.perf_counter()
        self.keep_alive = True
        self.cancel: Callable[[], None] | None = None
        """Called when the client is gone before it got its answer."""
        self._answered = False

    def answer(self, status: int, body: bytes, kind: bytes = JSON, extra: bytes = b"") -> None:
        """Sends the answer; `extra` is header lines, each with its end."""
        if not self._answered:
            self._answered, self.cancel = True, None
            self._connection.answer(self, status, body, kind, extra)

    def content(self, limit: int) -> Body:
        """The body, decompressed where that is needed and never beyond the limit."""
        coding = self.headers.get(b"content-encoding", b"identity").lower()
        if coding == b"identity":
            body: Body = self.body
        elif coding in (b"gzip", b"deflate"):
            body = decompressed(self.body, coding, limit)
            self._connection.hold(self, len(body))
        else:
            raise BadRequest(415, f"content-encoding must be gzip or deflate, but got {coding[:40].decode('latin1')}")
        if len(body) > limit:
            raise BadRequest(413, f"a body may have {limit} bytes, but got {len(body)}")
        return body


def decompressed(data: Body, coding: bytes, limit: int) -> bytes:
    """The plain bytes of a gzip or zlib stream, at most one more than the limit.

    >>> decompressed(zlib.compress(b"1234"), b"deflate", 2)
    b'123'
    """
    stream = zlib.decompressobj(31 if coding == b"gzip" else 15)
    try:
        plain = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise BadRequest(400, f"the body must be {coding.decode()}: {error}") from None
    if not stream.eof and len(plain) <= limit:
        raise BadRequest(400, f"the {coding.decode()} body ends too early")
    return plain


Handler = Callable[[Request], None]


class Listener:
    """The connections of one address, and what they may do."""

    def __init__(self, handler: Handler, limits: Limits, tls: Tls | None = None) -> None:
        self.handler, self.limits = handler, limits
        self.bodies = Bodies(limits.bodies)
        self._tls = tls
        self.buffer = memoryview(bytearray(_NUM_READ))
        """What a connection reads before it knows what it is; each has it for a moment."""
        self.connections: set[Connection] = set()
        self.is_closing = False
        """Whether every answer ends its connection, so that clients go elsewhere."""
        self.on_answer: Callable[[Request, int, int], None] | None = None
        """Called with a request, the status and the bytes of its answer."""
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> int:
        """Listens; the port that it got."""
        loop = asyncio.get_running_loop()
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.for_server, "ssl_handshake_timeout": self.limits.receive}
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=1024, **secured)
        self._sweeper = asyncio.ensure_future(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def num_busy(self) -> int:
        """Connections with a request that is not answered, or not even whole."""
        return sum(connection.is_busy for connection in self.connections)

    def stop_listening(self) -> None:
        """Takes no new connections; those that are there get their answers and end."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if not connection.is_busy:
                connection.close()

    def close(self) -> None:
        """Ends everything."""
        self.stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.close()

    async def _sweep(self) -> None:
        """One look at all connections now and then is cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.receive / 4))
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check_times(now)


class Connection(asyncio.BufferedProtocol):
    """One client: reads requests, hands them on one after the other, writes answers in their order."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._limits = listener, listener.limits
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._reading: Request | None = None
        self._since = time.monotonic()
        self._is_blocked = self._is_paused = self._is_reading = False
        self._url, self._num_head = b"", 0
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._whole: memoryview | None = None
        """A body that is read past the parser."""
        self._refusal: tuple[int, str] | None = None
        """What is said after the answers that are still to come; what follows them cannot be read, and is not."""
        self._num_body = self._num_waiting = self._num_held = 0

    @property
    def _has_enough(self) -> bool:
        return len(self._waiting) >= _MAX_WAITING or self._num_waiting >= _MAX_WAITING_BYTES

    @property
    def is_busy(self) -> bool:
        """Whether a request has begun to come, is not answered yet, or its answer not taken."""
        return self._is_reading or self._current is not None or self._is_blocked

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if len(self._listener.connections) >= self._limits.connections:
            self._refuse(503, "too many connections")
        else:
            self._listener.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._let_go()
        # The parser and this know each other: what a client left half sent would stay until somebody looks for garbage.
        self._parser, self._whole = None, None
        self._waiting.clear()
        current, self._current = self._current, None
        if current is not None and current.cancel is not None:
            current.cancel()

    def pause_writing(self) -> None:
        self._is_blocked, self._since = True, time.monotonic()

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._next()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._listener.buffer if self._whole is None else self._whole[self._num_body :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._refusal is not None:
            return
        if self._whole is not None:
            self._take_directly(nbytes)
            return
        if not self._is_reading:
            self._since = time.monotonic()
        self._feed(self._listener.buffer[:nbytes])
        if self._reading is not None and not self._transport.is_closing():
            self._go_direct()

    def _go_direct(self) -> None:
        """Lets the rest of a body come where it will stay: the parser would have it copied twice."""
        size = 0 if b"transfer-encoding" in self._headers else int(self._headers.get(b"content-length", b"0"))
        if not self._num_body < size <= _MAX_DIRECT:
            return
        self._whole = np.empty(size, np.uint8).data
        self._whole[: self._num_body] = b"".join(self._body)

    def _take_directly(self, num: int) -> None:
        assert self._whole is not None
        try:
            self._hold(num)
        except RequestRefused as refusal:
            self._refuse(503, refusal.reason)
            return
        self._num_body += num
        if self._num_body == len(self._whole):
            # The parser still waits for this body.
            self._parser = httptools.HttpRequestParser(self)
            self._complete(self._whole)

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # A wish that is not granted: the request is answered, and that is the last of it.
            pass
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

    def on_message_begin(self) -> None:
        self._is_reading = True
        self._url, self._headers, self._num_head = b"", {}, 0
        self._body, self._num_body = [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limits.body:
            raise BadRequest(413, f"a body may have {self._limits.body} bytes, but got {length[:20].decode('latin1')}")
        method = self._parser.get_method().decode()
        path = self._url.partition(b"?")[0].decode("latin1")
        self._reading = Request(self, method, path, self._headers)
        # A client of HTTP/1.0 may take the end of the connection for the end of the answer, whatever it has asked for.
        self._reading.keep_alive = (
            self._parser.should_keep_alive()
            and not self._parser.should_upgrade()
            and self._parser.get_http_version() != "1.0"
        )
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._num_body > self._limits.body:
            raise BadRequest(413, f"a body may have {self._limits.body} bytes")
        self._hold(len(body))
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete(self._body[0] if len(self._body) == 1 else b"".join(self._body))

    def _complete(self, body: Body) -> None:
        request, self._reading = self._reading, None
        assert request is not None
        request.body = body
        request.held = self._num_body
        request.arrived = time.perf_counter()
        self._body, self._whole, self._is_reading = [], None, False
        if self._current is None and not self._is_blocked:
            self._current = request
            self._listener.handler(request)
        else:
            self._waiting.append(request)
            self._num_waiting += len(request.body)
            if self._has_enough and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def hold(self, request: Request, num: int) -> None:
        """Counts more bytes as a request's; refuses it where there is no room for them."""
        self._hold(num)
        request.held += num

    def answer(self, request: Request, status: int, body: bytes, kind: bytes, extra: bytes) -> None:
        """Writes an answer and goes on to the next request."""
        if request is not self._current:
            return
        keep = request.keep_alive and not self._listener.is_closing
        head = _head(status, kind, len(body), extra if keep else extra + b"Connection: close\r\n")
        self._transport.write(head if request.method == "HEAD" else head + body)
        self._current, self._since = None, time.monotonic()
        self._listener.bodies.give_back(request.held)
        self._num_held -= request.held
        if self._listener.on_answer is not None:
            self._listener.on_answer(request, status, len(body))
        if not keep:
            self._waiting.clear()
            self._transport.close()
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._refusal is not None:
            self._refuse(*self._refusal)

    def check_times(self, now: float) -> None:
        """Ends a client that is too slow, in sending, in taking or in coming back."""
        silent = now - self._since
        if self._is_blocked or (self._is_reading and not self._is_paused):
            if silent > self._limits.receive:
                if self._is_blocked:
                    self._transport.abort()
                else:
                    self._refuse(408, f"a request must be complete within {self._limits.receive:g} s")
        elif self._current is None and silent > self._limits.idle:
            self._transport.close()

    def close(self) -> None:
        """Ends the connection, after what was written is sent."""
        self._transport.close()

    def _next(self) -> None:
        if self._current is None and self._waiting and not self._is_blocked and not self._transport.is_closing():
            self._current = self._waiting.popleft()
            self._num_waiting -= len(self._current.body)
            if self._is_paused and not self._has_enough:
                self._is_paused, self._since = False, time.monotonic()
                self._transport.resume_reading()
            self._listener.handler(self._current)

    def _hold(self, num: int) -> None:
        self._listener.bodies.take(num)
        self._num_held += num

    def _let_go(self) -> None:
        """Gives back the room of all that has come and was not answered."""
        self._listener.bodies.give_back(self._num_held)
        self._num_held, self._body = 0, []

    def _count_head(self, num: int) -> None:
        self._num_head += num
        if self._num_head > self._limits.head:
            raise BadRequest(431, f"a request's head may have {self._limits.head} bytes")

    def _refuse(self, status: int, reason: str) -> None:
        """Answers what cannot be read, and ends the connection: where the next request begins is not known."""
        if self._current is not None or self._waiting:
            self._refusal, self._whole = self._refusal or (status, reason), None
        elif not self._transport.is_closing():
            body = b'{"error":"%b"}' % reason.replace('"', "'").encode()
            extra = b"Connection: close\r\n" + (b"Retry-After: 1\r\n" if status == 503 else b"")
            self._transport.write(_head(status, JSON, len(body), extra) + body)
            self._linger()

    def _linger(self) -> None:
        """Reads on and forgets it: a client that is still sending would lose its answer with the connection."""
        self._refusal, self._whole, self._is_reading = self._refusal or (0, ""), None, False
        self._let_go()
        if self in self._listener.connections and self._transport.can_write_eof():
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(self._limits.receive, self._transport.close)
        else:
            self._transport.close()
