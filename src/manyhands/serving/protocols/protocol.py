"""What all protocols share: the desk where requests are asked, and the way from a code to a status."""

from __future__ import annotations

import asyncio
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import orjson

from ...core import RequestRefused
from ..batcher import Arrays, Ticket
from ..catalogue import Catalogue
from ..http import BadRequest, Body, Request
from ..limits import Limits
from ..version import Version

STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
TRACE = b"traceparent"
KEY = b"x-manyhands-key"
"""The header whose value decides which part of a split answers, always the same for the same value."""


class Desk:
    """Where every protocol asks: finds the version, waits for its answer, counts what came of it."""

    def __init__(self, catalogue: Catalogue, limits: Limits, timeout: float, *, may_reload: bool = False) -> None:
        self.catalogue, self.limits, self.timeout, self.may_reload = catalogue, limits, timeout, may_reload
        self.record: Callable[[Version, Arrays], None] | None = None
        """Notes requests for a warm-up."""
        self.trace: Callable[[Version, int, str, float, bytes], None] | None = None
        """Hears of every request that is over: version, rows, outcome, beginning, and the trace that it is part of."""
        self.is_ready = False
        """Whether clients should come here."""

    def require_managing(self) -> None:
        """Refuses what changes models where whoever may ask may not manage."""
        if not self.may_reload:
            raise RequestRefused("PERMISSION_DENIED", "models are managed on this server's own machine only")

    def deadline(self, seconds: float | None = None) -> float:
        """When a request is too late; its own wish can only make that earlier."""
        return time.monotonic() + (self.timeout if seconds is None else min(seconds, self.timeout))

    def ask(
        self,
        version: Version,
        inputs: Arrays,
        *,
        began: float,
        deadline: float,
        then: Callable[[Ticket], None],
        priority: int = 0,
        parent: bytes = b"",
    ) -> Callable[[], None]:
        """Asks a version; `then` gets the ticket with its answer or refusal. Returns what cancels the request."""
        figures = version.figures
        rows = len(next(iter(inputs.values())))

        def done(ticket: Ticket) -> None:
            code = "OK" if ticket.refusal is None else ticket.refusal.code
            figures.count(code, time.perf_counter() - began)
            if self.trace is not None:
                self.trace(version, rows, code, began, parent)
            then(ticket)

        try:
            ticket = version.submit(inputs, rows, deadline=deadline, priority=priority, done=done)
        except RequestRefused as refusal:
            figures.count(refusal.code, 0.0)
            raise

        if self.record is not None:
            self.record(version, inputs)

        def cancel() -> None:
            figures.count("CANCELLED", 0.0)
            version.batcher.cancel(ticket)

        return cancel


class RestHandler(ABC):
    """What answers requests over HTTP."""

    @abstractmethod
    def handle(self, request: Request) -> None:
        """Answers a request, now or later; may raise BadRequest or RequestRefused."""

    def refuse(self, request: Request, refusal: RequestRefused, status: int | None = None) -> None:
        """Says why there is no answer."""
        answer_refusal(request, status or STATUS.get(refusal.code, 500), refusal.reason, refusal.retry_after)


class RestProtocol(RestHandler):
    """A protocol over HTTP: the paths that it answers, and how."""

    prefix: str
    """What its paths begin with."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk


def answer_refusal(request: Request, status: int, reason: str, retry_after: float | None = None) -> None:
    """An error as both protocols write it."""
    extra = b"" if retry_after is None else b"Retry-After: %d\r\n" % math.ceil(retry_after)
    if status == 401:
        extra = b"WWW-Authenticate: Bearer\r\n"
    request.answer(status, orjson.dumps({"error": reason}), extra=extra)


def answer_failure(request: Request, error: Exception) -> None:
    """What went wrong here is ours to know; a stranger learns that it did, and does not wait for more."""
    asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})
    answer_refusal(request, 500, "internal error")


def parse_json(text: Body, limit: int) -> Any:
    """A JSON text; NaN and Infinity are understood."""
    if len(text) > limit:
        raise BadRequest(413, f"a JSON text may have {limit} bytes, but got {len(text)}; send binary tensors")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        text = bytes(text)
        if b"NaN" not in text and b"Infinity" not in text:
            raise BadRequest(400, f"JSON parse error: {error}") from None
    try:
        value = json.loads(text.decode())
        if b"\\u" in text:
            # Python's own parser takes half of a pair of surrogates, which no answer could repeat.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"JSON parse error: {error}") from None
    return value


def dump_json(value: Any) -> bytes:
    """A JSON text of arrays and plain values, C-contiguous arrays only."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def require_method(request: Request, *methods: str) -> None:
    """Refuses other methods."""
    if request.method not in methods:
        raise BadRequest(405, f"Method Not Allowed: {request.method}")
