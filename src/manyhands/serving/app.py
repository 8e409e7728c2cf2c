"""One listener's requests: the token, the protocol, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core import RequestRefused
from . import openapi
from .exposition import KIND
from .http import BadRequest, Request
from .protocols.protocol import RestHandler, answer_failure, answer_refusal
from .security import Token

METRICS = ("/metrics", "/monitoring/prometheus/metrics")
HEALTH = ("/v2/health/live", "/v2/health/ready")
"""What a probe may ask without a token."""
PAGE = b"Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\nX-Content-Type-Options: nosniff\r\n"


class App:
    """Hands every request to whoever answers its path."""

    def __init__(self, handlers: Mapping[str, RestHandler], metrics: Callable[[], bytes], token: str | None) -> None:
        self._handlers, self._metrics, self._token = handlers, metrics, Token(token)

    def __call__(self, request: Request) -> None:
        path = request.path
        try:
            if path not in HEALTH and not self._token.is_said(request.headers.get(b"authorization", b"")):
                raise BadRequest(401, "this server wants a token")
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
        try:
            handler.handle(request)
        except RequestRefused as refusal:
            handler.refuse(request, refusal)
