"""Base of gRPC services: methods from message tables, tokens, deadlines, and refusals as status codes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...core import RequestRefused
from ..batcher import Arrays, Ticket
from ..grpc_gate import GrpcGate
from ..heap import resident_bytes
from ..http import BadRequest
from ..limits import Bodies, Limits
from ..security import AccessToken, ServingTls
from ..version import Version
from .messages import outline, require_light
from .protocol import KEY, NOT_HERE, STATUS, TRACE, InferenceGateway

Method = Callable[[Any, Any], Awaitable[Any]]
SMALL_BYTES = 1 << 20
"""Maximum bytes of a message without tensors. A larger message is decoded only if the model that it names is served."""
SMALL_ANSWER = 1 << 14
"""Maximum bytes of an answer that is not counted while its client reads it: the number of such answers is limited."""
UNREAD_RATIO, UNREAD_SECONDS = 2, 0.25
"""Unread answers over all connections as a multiple of the calls that may wait, and seconds between two checks."""
SHED_SECONDS = 0.05
"""Seconds between two checks of the memory that unfinished messages take."""
KEEPALIVE_SECONDS = 60
"""Seconds of silence before a keep-alive ping."""
IDLE_SECONDS = 10.0
"""Maximum seconds that a connection may be idle; clients reconnect."""


class GrpcService(ABC):
    """A gRPC service: its name, and its methods with their request and response messages."""

    name: str
    managing: Collection[str] = ()
    """The methods that change what is served; only a management listener has them."""
    addressed: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Methods whose messages contain tensors, each with the numbers of the fields that say which model is asked."""

    def __init__(self, gateway: InferenceGateway) -> None:
        self.gateway = gateway

    @abstractmethod
    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        """Return by name: the function, the class of its requests and that of its responses."""

    def require_served(self, request: Any, context: Any) -> None:
        """Raise RequestRefused if a request names a model that is not served; only its addressed fields are set.

        Services with addressed methods must override it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override require_served")

    async def ask(
        self, context: Any, version: Version, inputs: Arrays, seconds: float | None = None, priority: int = 0
    ) -> Mapping[str, Any]:
        """Return the outputs for a request; it is cancelled if the client disconnects."""
        left = [each for each in (seconds, context.time_remaining()) if each is not None]
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()

        def then(ticket: Ticket) -> None:
            if not future.done():
                future.set_result(ticket)

        deadline = self.gateway.deadline(min(left, default=None))
        cancel = self.gateway.ask(
            version,
            inputs,
            began=time.perf_counter(),
            deadline=deadline,
            priority=priority,
            then=then,
            parent=metadata_value(context, TRACE),
        )
        try:
            ticket = await future
        except asyncio.CancelledError:
            cancel()
            raise
        if ticket.refusal is not None:
            raise ticket.refusal
        return ticket.outputs


def key_of(context: Any) -> bytes:
    """Return the key that selects the share of a traffic split."""
    return metadata_value(context, KEY)


def metadata_value(context: Any, wanted: bytes) -> bytes:
    """Return a header of a call; empty if there is none."""
    for name, value in context.invocation_metadata() or ():
        if name.encode() == wanted:
            return value.encode() if isinstance(value, str) else bytes(value)
    return b""


class Receiving:
    """Messages being received. gRPC reports them when they are complete; until then only their number is known.

    While that many could exceed the memory limit of all bodies, the memory of the process is monitored, and the calls
    that have been sending for the longest time are aborted when it has grown that much.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls: dict[asyncio.Timeout, None] = {}
        self._usual = resident_bytes()
        self._shed: set[asyncio.Timeout] = set()

    async def read(self, context: Any) -> bytes:
        """Return the message of a call; raises RequestRefused if it is not complete in time."""
        limits = self._limits
        timeout = asyncio.timeout(limits.receive)
        try:
            async with timeout:
                self._calls[timeout] = None
                message = await context.read()
        except TimeoutError:
            if timeout in self._shed:
                reason = f"overloaded: unfinished messages take more than {limits.bodies} bytes"
                raise RequestRefused("RESOURCE_EXHAUSTED", reason, 1.0) from None
            reason = f"a message must be complete within {limits.receive:g} s"
            raise RequestRefused("DEADLINE_EXCEEDED", reason) from None
        finally:
            self._calls.pop(timeout, None)
            self._shed.discard(timeout)
        if message is grpc.aio.EOF:
            raise RequestRefused("INVALID_ARGUMENT", "a call must have a message, but got none")
        return bytes(message)

    async def watch(self) -> None:
        """Abort the oldest calls while they take too much memory."""
        while True:
            await asyncio.sleep(SHED_SECONDS)
            if not self._calls:
                self._usual = resident_bytes()
            elif len(self._calls) * self._limits.body > self._limits.bodies and self._is_too_much():
                self._give_up((len(self._calls) + 1) // 2)

    def _is_too_much(self) -> bool:
        # Half of the limit: more arrives between two checks.
        return resident_bytes() - self._usual > self._limits.bodies // 2

    def _give_up(self, num: int) -> None:
        now = asyncio.get_running_loop().time()
        for timeout in list(self._calls)[:num]:
            self._shed.add(timeout)
            timeout.reschedule(now)


class Unread:
    """Answers that their clients have not read yet. gRPC keeps them, with their calls, for as long as clients wish.

    A client that opens no window for an answer in time is disconnected, as one of HTTP that does not read, and so are
    those with the oldest answers while there are too many.
    """

    def __init__(self, limits: Limits) -> None:
        self._seconds, self._most = limits.receive, UNREAD_RATIO * limits.calls
        self._waiting: dict[int, tuple[float, Any]] = {}
        """When each answer was given, and the context of its call; the oldest first."""
        self._num = 0

    def add(self, context: Any) -> None:
        """Count an answer until its call is over."""
        number, self._num = self._num, self._num + 1
        self._waiting[number] = asyncio.get_running_loop().time(), context
        context.add_done_callback(lambda _: self._waiting.pop(number, None))

    async def watch(self, drop: Callable[[str], None]) -> None:
        """Pass the names of connections that must be closed to a function."""
        while True:
            await asyncio.sleep(UNREAD_SECONDS)
            late = asyncio.get_running_loop().time() - self._seconds
            while self._waiting:
                number, (since, context) = next(iter(self._waiting.items()))
                if since > late and len(self._waiting) <= self._most:
                    break
                del self._waiting[number]
                drop(context.peer())


class GrpcListener:
    """gRPC server for some services.

    Methods are stream handlers although every call has one message: a handler starts when the headers of a call have
    arrived, so the token is checked before the message is read. Clients do not notice it.
    """

    def __init__(
        self,
        services: Sequence[GrpcService],
        token: AccessToken,
        limits: Limits,
        tls: ServingTls | None = None,
        *,
        manages: bool = False,
        closed: str = "",
    ) -> None:
        self._services, self._token, self._limits, self._tls = services, token, limits, tls
        self._manages, self._closed = manages, closed
        self.bodies = Bodies(limits.bodies)
        self.on_answer: Callable[[str, int, int, int, float], None] | None = None
        """Called with a method, its equivalent HTTP status, the bytes of both messages, and the arrival time."""
        self.others: Any = None
        """Handler of every method that no service has."""
        self._server: Any = None
        self._gate: GrpcGate | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._receiving, self._unread = Receiving(limits), Unread(limits)
        self._watching: list[asyncio.Task[None]] = []
        self._num_calls = 0

    async def open(self, host: str, port: int, *, is_reserved: bool = False, path: str = "") -> int:
        """Start listening and return the port; raises OSError if it cannot be bound.

        A port that is reserved is shared with the socket that reserves it. gRPC itself listens on the Unix socket
        `path`, by default in a temporary folder; only this user may enter its folder.
        """
        if not path:
            self._folder = tempfile.TemporaryDirectory(prefix="manyhands-")
            path = f"{self._folder.name}/grpc"
        most = _most_connections(self._limits)
        self._server = grpc.aio.server(options=_options(self._limits, 2 * most))
        for service in self._services:
            handlers = {
                name: grpc.stream_unary_rpc_method_handler(
                    self._guarded(
                        f"/{service.name}/{name}",
                        Decoder(service, name, self._limits) if self._manages or name not in service.managing else None,
                    )
                )
                for name in service.methods()
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
        if self.others is not None:
            self.others.guard = self._guarded
            self._server.add_generic_rpc_handlers((self.others,))
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        per_network = max(1, most * self._limits.connections_per_address // self._limits.connections)
        self._gate = GrpcGate(path, self._limits, self._tls, most, per_network)
        found = await self._gate.open(host, port, is_reserved=is_reserved)
        watches = self._receiving.watch(), self._unread.watch(self._gate.drop)
        self._watching = [asyncio.ensure_future(watch) for watch in watches]
        return found

    async def close(self, patience: float) -> None:
        """Stop accepting calls and let those in flight finish."""
        if self._gate is not None:
            self._gate.stop()
        if self._server is not None:
            await self._server.stop(patience)
        if self._gate is not None:
            self._gate.close()
        for task in self._watching:
            task.cancel()
        if self._folder is not None:
            self._folder.cleanup()

    def _guarded(self, path: str, method: Method | None) -> Method:
        """Wrap a method of bytes: refusals become status codes, calls are logged; None is a management method."""

        async def run(requests: Any, context: Any) -> Any:
            arrived, request, answer, status = time.perf_counter(), b"", b"", 500
            try:
                with self._counted():
                    self._require_token(context)
                    if method is None:
                        raise RequestRefused("PERMISSION_DENIED", NOT_HERE)
                    request = await self._receiving.read(context)
                    with self.bodies.holding(len(request)):
                        answer = await method(request, context)
                    self._hold_answer(len(answer), context)
                status = 200
                return answer
            except asyncio.CancelledError:
                status = STATUS["CANCELLED"]
                raise
            except grpc.aio.AbortError:
                status = STATUS.get(context.code().name, 500)
                raise
            except RequestRefused as refusal:
                if refusal.retry_after is not None:
                    context.set_trailing_metadata((("retry-after", f"{refusal.retry_after:.0f}"),))
                status = STATUS.get(refusal.code, 500)
                code, reason = getattr(grpc.StatusCode, refusal.code, grpc.StatusCode.UNKNOWN), refusal.reason
            except BadRequest as error:
                status = error.status
                code, reason = grpc.StatusCode.INVALID_ARGUMENT, error.reason
            finally:
                if self.on_answer is not None:
                    self.on_answer(path, status, len(request), len(answer), arrived)
            return await context.abort(code, reason)

        return run

    def _hold_answer(self, num: int, context: Any) -> None:
        """Count the bytes of an answer until its client has read it; raises RequestRefused if there are too many."""
        self._unread.add(context)
        if num > SMALL_ANSWER:
            self.bodies.take(num)
            context.add_done_callback(lambda _: self.bodies.give_back(num))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_calls >= self._limits.calls:
            raise RequestRefused("RESOURCE_EXHAUSTED", f"overloaded: {self._num_calls} calls are waiting", 1.0)
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def _require_token(self, context: Any) -> None:
        if self._closed:
            raise RequestRefused("PERMISSION_DENIED", self._closed)
        if not self._token.is_valid(metadata_value(context, b"authorization")):
            raise RequestRefused("UNAUTHENTICATED", self._token.reason)


def _most_connections(limits: Limits) -> int:
    """Return the number of connections; each takes three file descriptors."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(limits.connections, files - 256) // 4)


def _options(limits: Limits, connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.body),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_metadata_size", limits.head // 2),
        ("grpc.absolute_max_metadata_size", limits.head),
        ("grpc.max_connection_idle_ms", int(min(limits.idle, IDLE_SECONDS) * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", int(limits.receive * 1000)),
    ]


@dataclass(frozen=True)
class MessageRule:
    """Checks of a method's messages that need no decoding.

    Attributes:
        name: The name of the message.
        most: The maximum number of bytes.
        addressed: The numbers of the fields that say which model is asked; empty for a message without tensors.
    """

    name: str
    most: int
    addressed: tuple[int, ...]

    def require_size(self, num: int) -> None:
        """Raise RequestRefused for a message that is too large for its method."""
        if num > self.most:
            raise RequestRefused(
                "RESOURCE_EXHAUSTED", f"a {self.name} may have {self.most} bytes, but got {num}; send a smaller one"
            )

    def outline(self, message: bytes) -> bytes | None:
        """Return the fields of a large message that say which model is asked; None for a small message."""
        return outline(message, self.addressed, self.name) if len(message) > SMALL_BYTES else None


class Decoder:
    """A method of bytes: checks and decodes its message, calls the service's method and encodes the answer."""

    def __init__(self, service: GrpcService, name: str, limits: Limits) -> None:
        self._service = service
        self._method, self._asked, _ = service.methods()[name]
        addressed = service.addressed.get(name, ())
        most = limits.body if addressed else min(limits.body, SMALL_BYTES)
        self.rule = MessageRule(self._asked.DESCRIPTOR.name, most, addressed)

    async def __call__(self, request: bytes, context: Any) -> bytes:
        self.rule.require_size(len(request))
        outlined = self.rule.outline(request)
        if outlined is not None:
            self.require_served(outlined, context)
        answer = await self._method(self._decoded(request), context)
        return bytes(answer.SerializeToString())

    def require_served(self, outlined: bytes, context: Any) -> None:
        """Raise RequestRefused if a message names a model that is not served; takes its addressed fields."""
        self._service.require_served(self._decoded(outlined), context)

    def _decoded(self, message: bytes) -> Any:
        """Decode a message; errors are the client's, which gRPC itself would report as internal."""
        require_light(message, self._asked)
        try:
            return self._asked.FromString(message)
        except DecodeError:
            raise RequestRefused("INVALID_ARGUMENT", f"the message is not a valid {self.rule.name}") from None
