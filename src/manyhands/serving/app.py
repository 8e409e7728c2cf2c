"""Request handling of one listener: access control, choice of the protocol, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ..core import RequestRefused
from . import openapi
from .exposition import KIND
from .http import BadRequest, Inflating, Request, inflated
from .limits import Limits
from .parsing import Parsing
from .protocols.protocol import RestHandler, answer_failure, answer_refusal, cancel
from .security import AccessToken, Sites

METRICS = ("/metrics", "/monitoring/prometheus/metrics")
HEALTH = ("/v2/health/live", "/v2/health/ready")
"""Paths that health probes may request without a token and with any host name."""
PAGE = b"Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\nX-Content-Type-Options: nosniff\r\n"
INFLATED_HERE = 2048
"""Compressed bytes that are decompressed immediately; larger bodies are decompressed in another process, so that the
event loop keeps answering."""


class Access:
    """Access control of a listener, applied when a request's headers are complete, before its body is read."""

    def __init__(self, token: AccessToken, sites: Sites, closed: str = "") -> None:
        self._token, self._sites, self._closed = token, sites, closed

    def __call__(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal, or None."""
        if path in HEALTH:
            # Without a token no body is accepted.
            has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
            return (413, "a health check has no body, but got one") if has_body else None
        if (refusal := self._sites.refusal(headers)) is not None:
            return refusal
        if self._closed:
            return 403, self._closed
        return None if self._token.is_valid(headers.get(b"authorization", b"")) else (401, self._token.reason)


class App:
    """Dispatch every request to the handler of its path."""

    def __init__(
        self,
        handlers: Mapping[str, RestHandler],
        metrics: Callable[[], bytes],
        limits: Limits,
        parsing: Parsing | None = None,
    ) -> None:
        self._handlers, self._metrics, self._limits, self._parsing = handlers, metrics, limits, parsing
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, request: Request) -> None:
        path = request.path
        try:
            end = path.find("/", 1)
            handler = self._handlers.get(path[:end] if end > 0 else path)
            if handler is not None:
                self._handle(handler, request)
            elif path in METRICS:
                request.answer(200, self._metrics(), KIND)
            elif path == "/openapi.json":
                request.answer(200, openapi.as_json())
            elif path in ("/", "/docs"):
                request.answer(200, openapi.as_page(), b"text/html; charset=utf-8", PAGE)
            else:
                raise BadRequest(404, "Not Found")
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except Exception as error:
            answer_failure(request, error)

    def _handle(self, handler: RestHandler, request: Request) -> None:
        if b"content-encoding" in request.headers and handler.inflates and len(request.body) > INFLATED_HERE:
            self._inflate(handler, request)
            return
        try:
            handler.handle(request)
        except RequestRefused as refusal:
            handler.refuse(request, refusal)

    def _inflate(self, handler: RestHandler, request: Request) -> None:
        """Decompress a body in another process, then handle the request."""
        coding = request.coding
        if coding is None:
            del request.headers[b"content-encoding"]
            self._handle(handler, request)
            return
        is_text = b"inference-header-content-length" not in request.headers
        limit = self._limits.json if is_text else self._limits.body
        task = asyncio.ensure_future(self._inflated(request, coding, limit))
        request.cancel = lambda: cancel(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _inflated(self, request: Request, coding: bytes, limit: int) -> None:
        try:
            if self._parsing is not None:
                body = bytes(request.body)
                plain = await self._parsing.run(len(body), inflated, body, coding, limit, request.inflation)
                request.hold(len(plain))
                request.body = plain
                del request.headers[b"content-encoding"]
            else:
                loop = asyncio.get_running_loop()
                for step in Inflating(request, coding, limit).steps():
                    await loop.run_in_executor(None, step)
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except RequestRefused as refusal:
            answer_refusal(request, 503, refusal.reason, refusal.retry_after)
        else:
            request.cancel = None
            self(request)
