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
from ..parsing import INLINE, Parsing
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


NOT_HERE = (
    "models are managed on another listener, with a token of its own: over HTTP on the management port, over gRPC "
    "where the server was started with --manage-grpc PORT"
)


class InferenceGateway:
    """Where every protocol asks: finds the version, waits for its answer, counts what came of it."""

    def __init__(self, catalogue: Catalogue, limits: Limits, timeout: float, parsing: Parsing) -> None:
        self.catalogue, self.limits, self.timeout, self.parsing = catalogue, limits, timeout, parsing
        self.record: Callable[[Version, Arrays], None] | None = None
        """Notes requests for a warm-up."""
        self.trace: Callable[[Version, int, str, float, bytes], None] | None = None
        """Hears of every request that is over: version, rows, outcome, beginning, and the trace that it is part of."""
        self.is_ready = False
        """Whether clients should come here."""

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

    inflates = True
    """Whether it reads bodies, so that compressed ones are decompressed for it."""

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

    def __init__(self, desk: InferenceGateway) -> None:
        self.desk = desk
        self._reading: set[asyncio.Task[None]] = set()

    def read_then(
        self, request: Request, text: Body, then: Callable[[Any], None], work: Callable[..., Any], *args: Any
    ) -> None:
        """Call a function that parses a text, and `then` with its result: at once, or in a process if it is large."""
        if len(text) <= INLINE:
            then(work(*args))
            return
        task = asyncio.ensure_future(self._read(request, len(text), then, work, *args))
        request.cancel = lambda: cancel(task)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(
        self, request: Request, size: int, then: Callable[[Any], None], work: Callable[..., Any], *args: Any
    ) -> None:
        try:
            result = await self.desk.parsing.run(size, work, *args)
            request.cancel = None
            then(result)
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except RequestRefused as refusal:
            self.refuse(request, refusal)
        except Exception as error:
            answer_failure(request, error)


def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task whose client is gone."""
    task.cancel()


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


def parse_json(text: Body, limit: int, values: int = Limits.values) -> Any:
    """A JSON text; NaN and Infinity are understood."""
    if len(text) > limit:
        raise BadRequest(413, f"a JSON text may have {limit} bytes, but got {len(text)}; send binary tensors")
    if len(text) > values and (num := num_values(bytes(text))) > values:
        raise BadRequest(413, f"a JSON text may have {values} values, but got {num}; send binary tensors")
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


def shown(value: object, num: int) -> str:
    """The first characters of a value of JSON for an error; what is nested or huge is only named.

    >>> shown("digits", 3), shown(2.5, 9), shown([[1]], 9), shown(10**400, 9)
    ('dig', '2.5', 'a list', 'a huge number')
    """
    if isinstance(value, str):
        return value[:num]
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a huge number"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return str(value)[:num]


def num_values(text: bytes) -> int:
    """How many values a JSON text has at most, found without parsing it.

    >>> num_values(b"[[1, 2], {}]")
    5
    """
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def dump_json(value: Any) -> bytes:
    """A JSON text of arrays and plain values, C-contiguous arrays only."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def require_method(request: Request, *methods: str) -> None:
    """Refuses other methods."""
    if request.method not in methods:
        raise BadRequest(405, f"Method Not Allowed: {request.method}")
