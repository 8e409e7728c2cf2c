"""Base of all protocols: the gateway for requests, and the map from codes to HTTP status."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import orjson

from ...core import RequestRefused
from ..batcher import Arrays, Ticket
from ..catalogue import Catalogue
from ..http import JSON, BadRequest, Body, Request
from ..limits import Bodies, Limits
from ..parsing import INLINE, Parsing
from ..scheduling import restore_slice
from ..texts import TooManyTexts
from ..version import Version
from .answer_text import PIECE

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
COMPRESS = 16 << 10
"""Bytes from which responses are compressed."""
TRACE = b"traceparent"
KEY = b"x-manyhands-key"
"""Header whose value selects the share of a traffic split, always the same for equal values."""


NOT_HERE = (
    "models are managed on another listener, with a separate token: over HTTP on the management port, over gRPC "
    "where the server was started with --manage-grpc PORT"
)


class InferenceGateway:
    """Gateway of all protocols: finds the version, submits the request, and counts the outcome."""

    def __init__(self, catalogue: Catalogue, limits: Limits, timeout: float, parsing: Parsing) -> None:
        self.catalogue, self.limits, self.timeout, self.parsing = catalogue, limits, timeout, parsing
        self.bodies = Bodies(limits.bodies)
        """Bytes of requests that the server holds."""
        self.compressing = ThreadPoolExecutor(1, "manyhands-compressing", restore_slice)
        """Compresses large answers; the thread starts with the first of them."""
        self.record: Callable[[Version, Arrays], None] | None = None
        """Records requests for a warm-up."""
        self.trace: Callable[[Version, int, str, float, bytes], None] | None = None
        """Called with every finished request: version, rows, outcome, start time, and its parent trace."""
        self.is_ready = False
        """Whether the server is ready for clients."""

    def deadline(self, seconds: float | None = None) -> float:
        """Return the deadline of a request; its own timeout can only shorten the server's."""
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
        """Submit a request; `then` gets the ticket with its answer or refusal. Returns a function that cancels it."""
        metrics = version.metrics
        rows = len(next(iter(inputs.values())))

        def done(ticket: Ticket) -> None:
            code = "OK" if ticket.refusal is None else ticket.refusal.code
            metrics.count(code, time.perf_counter() - began)
            if self.trace is not None:
                self.trace(version, rows, code, began, parent)
            then(ticket)

        try:
            ticket = version.submit(inputs, rows, deadline=deadline, priority=priority, done=done)
        except RequestRefused as refusal:
            metrics.count(refusal.code, 0.0)
            raise

        if self.record is not None:
            self.record(version, inputs)

        def cancel() -> None:
            metrics.count("CANCELLED", 0.0)
            version.batcher.cancel(ticket)

        return cancel


Answer = tuple[bytes, bytes, bytes]
"""A body, its kind, and more header lines."""


def _plain(text: bytes) -> Answer:
    return text, JSON, b""


def compressed(answer: Answer, coding: bytes) -> Answer:
    """Return an answer compressed with b"gzip" or b"deflate"; unchanged if it is small or no coding is given."""
    body, kind, extra = answer
    if not coding or len(body) <= COMPRESS:
        return answer
    packed = gzip.compress(body, 1) if coding == b"gzip" else zlib.compress(body, 1)
    return packed, kind, extra + b"Content-Encoding: " + coding + b"\r\n"


class RestHandler(ABC):
    """Base of handlers of HTTP requests."""

    inflates = True
    """Whether it reads bodies, so that compressed ones must be decompressed first."""

    @abstractmethod
    def handle(self, request: Request) -> None:
        """Answer a request, now or later; may raise BadRequest or RequestRefused."""

    def refuse(self, request: Request, refusal: RequestRefused, status: int | None = None) -> None:
        """Answer a request with the reason of its refusal."""
        answer_refusal(request, status or STATUS.get(refusal.code, 500), refusal.reason, refusal.retry_after)


class RestProtocol(RestHandler):
    """Base of HTTP protocols: the paths that they handle, and how."""

    prefix: str
    """Prefix of its paths."""

    def __init__(self, gateway: InferenceGateway) -> None:
        self.gateway = gateway
        self._reading: set[asyncio.Task[None]] = set()

    def read_then(
        self, request: Request, text: Body, then: Callable[[Any], None], work: Callable[..., Any], *args: Any
    ) -> None:
        """Call `work` to parse a text, then `then` with its result: inline, or in another process if it is large."""
        if len(text) <= INLINE:
            then(work(*args))
            return
        self._start(request, self._read(request, len(text), then, work, *args))

    def answer_pieces(
        self,
        request: Request,
        pieces: Iterable[bytes],
        num: int,
        *,
        finish: Callable[[bytes], Answer] = _plain,
        coding: bytes = b"",
    ) -> None:
        """Answer a request with a text of `num` numbers, in pieces; `finish` makes the answer of the whole text.

        A text of many numbers is written between other requests, and its bytes count as bytes of the request until
        it is sent. A large answer is compressed on another thread. The coding is b"gzip", b"deflate" or b"".
        """
        if num <= PIECE:
            answer = finish(b"".join(pieces))
            if not coding or len(answer[0]) <= INLINE:
                request.answer(200, *compressed(answer, coding))
                return
            finish, pieces = lambda text: answer, ()
        self._start(request, self._answer_pieces(request, pieces, finish, coding))

    async def _answer_pieces(
        self, request: Request, pieces: Iterable[bytes], finish: Callable[[bytes], Answer], coding: bytes
    ) -> None:
        try:
            listed: list[bytes] = []
            for piece in pieces:
                request.hold(len(piece))
                listed.append(piece)
                await asyncio.sleep(0)
            answer = finish(b"".join(listed))
            listed.clear()
            if coding:
                loop, thread = asyncio.get_running_loop(), self.gateway.compressing
                answer = await loop.run_in_executor(thread, compressed, answer, coding)
            request.answer(200, *answer)
        except RequestRefused as refusal:
            self.refuse(request, refusal)
        except Exception as error:
            answer_failure(request, error)

    def _start(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Run the rest of a request as a task, which is cancelled if the client disconnects."""
        task = asyncio.ensure_future(work)
        request.cancel = lambda: cancel(task)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(
        self, request: Request, size: int, then: Callable[[Any], None], work: Callable[..., Any], *args: Any
    ) -> None:
        try:
            result = await self.gateway.parsing.run(size, work, *args)
            request.cancel = None
            then(result)
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except RequestRefused as refusal:
            self.refuse(request, refusal)
        except Exception as error:
            answer_failure(request, error)


def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task whose client has disconnected."""
    task.cancel()


def answer_refusal(request: Request, status: int, reason: str, retry_after: float | None = None) -> None:
    """Send an error in the format of both protocols."""
    extra = b"" if retry_after is None else b"Retry-After: %d\r\n" % math.ceil(retry_after)
    if status == 401:
        extra = b"WWW-Authenticate: Bearer\r\n"
    request.answer(status, orjson.dumps({"error": reason}), extra=extra)


def answer_failure(request: Request, error: Exception) -> None:
    """Report an internal error to the loop's exception handler; the client only gets a generic 500."""
    asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})
    answer_refusal(request, 500, "internal error")


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Refuse values that are not as `reason` says, and more strings than a request may have."""
    try:
        yield
    except TooManyTexts as error:
        raise BadRequest(413, f"{error}, but got more; send several requests") from None
    except (ValueError, TypeError, OverflowError):
        raise BadRequest(400, reason) from None


def parse_json(text: Body, limit: int, values: int = Limits.values) -> Any:
    """Parse a JSON text, including NaN and Infinity."""
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
            # Python's own parser accepts lone surrogates, which cannot be encoded in a response.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"JSON parse error: {error}") from None
    return value


def shown(value: object, num: int) -> str:
    """Return the first characters of a JSON value for an error; nested or huge values are only named.

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
    """Return an upper bound of the number of values in a JSON text, without parsing it.

    >>> num_values(b"[[1, 2], {}]")
    5
    """
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def dump_json(value: Any) -> bytes:
    """Return the JSON text of plain values and C-contiguous arrays."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def require_method(request: Request, *methods: str) -> None:
    """Raise BadRequest for other HTTP methods."""
    if request.method not in methods:
        raise BadRequest(405, f"Method Not Allowed: {request.method}")
