"""HTTP requests and responses: refusals, bodies with limits, and their decompression in small steps."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .http_connection import Connection

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_PHRASES[499] = b"Client Closed Request"
_ALWAYS_INFLATED, _NUM_INFLATED, _NUM_PLAIN = 1 << 18, 1 << 14, 1 << 18
"""Decompressed size that any compressed body may have, and compressed and plain bytes processed at a time."""
_MORE = {503: b"Retry-After: 1\r\n", 401: b"WWW-Authenticate: Bearer\r\n"}
EVICTED = "the connection is closed for newer ones: this request was not complete yet"
JSON = b"application/json"
Body = bytes | bytearray | memoryview


def response_head(status: int, kind: bytes, size: int, extra: bytes) -> bytes:
    """Return the head of a response with a body of `size` bytes; `extra` are further headers."""
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        status,
        _PHRASES.get(status, b""),
        kind,
        size,
        extra,
    )


def refusal_response(status: int, reason: str) -> bytes:
    """Return an error response that closes its connection."""
    body = b'{"error":"%b"}' % reason.replace("\\", "/").replace('"', "'").encode()
    return response_head(status, JSON, len(body), b"Connection: close\r\n" + _MORE.get(status, b"")) + body


def too_slow(seconds: float) -> str:
    """Return the reason for refusing a request that took longer than `seconds`."""
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
