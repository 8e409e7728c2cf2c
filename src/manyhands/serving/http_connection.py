"""HTTP/1.1 connection with limits against slow, greedy and malformed clients; httptools parses the requests.

The handler is called with complete requests, without an asyncio task or coroutine per request. Measured beside granian
and uvicorn on the same work, this takes a quarter of their time per request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools
import numpy as np

from ..core import RequestRefused
from .connections import Slot
from .http import EVICTED, BadRequest, Body, Request, refusal_response, response_head, too_slow
from .http_entrance import has_input

if TYPE_CHECKING:
    from .http_listener import HttpListener

_MAX_WAITING, _MAX_WAITING_BYTES = 16, 1 << 20
"""Number and bytes of pipelined requests buffered per connection; beyond that, reading pauses (back-pressure)."""
_MAX_NOW = 1
"""Pipelined requests read together that are handled before other connections get a turn."""
_NUM_PIPELINED = 1 << 11
"""Bytes parsed at a time when a client has sent several requests together."""
_MAX_DIRECT = 1 << 22
"""The largest body that bypasses the parser and is read into its final buffer."""
_LINGER_SECONDS, _LINGER_PAUSE = 5.0, 0.01
"""Seconds a refused client may keep sending, and the pause between reads of that data."""
_ONCE = {b"host", b"origin", b"authorization", b"content-type", b"content-encoding", b"inference-header-content-length"}
"""Headers that affect how a request is handled; a request with one of them twice is ambiguous and refused."""
_MAX_URL = 4096
"""Maximum bytes of a URL; protocols cache URLs that repeat."""


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
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise BadRequest(505, f"the version of HTTP must be 1.0 or 1.1, but got {version}")
        if version == "1.0" and b"transfer-encoding" in self._headers:
            raise BadRequest(400, "HTTP/1.0 has no transfer-encoding: a proxy of that version would not know it")
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
            self._parser.should_keep_alive() and not self._parser.should_upgrade() and version != "1.0"
        )
        if version != "1.0" and self._headers.get(b"expect", b"").lower() == b"100-continue":
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
        head = response_head(status, kind, len(body), extra if keep else extra + b"Connection: close\r\n")
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
                    self._refuse(408, too_slow(self.limits.receive))
        elif self._current is None and silent > self.limits.idle:
            self._transport.close()

    def close(self) -> None:
        """Close the connection after the written data is sent."""
        self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is in flight or has arrived; closing would reset the latter."""
        if not self.is_busy and not self._waiting and not has_input(self._transport):
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
            self._transport.write(refusal_response(status, reason))
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
