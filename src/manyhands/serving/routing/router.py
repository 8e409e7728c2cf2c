"""Router: one address for several servers, with load balancing (power of two choices) and retries on failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from ...core import RequestRefused, SettingsError
from ...distributed import this_host
from ..app import App
from ..http import BadRequest, Request
from ..http_listener import HttpListener
from ..listener_thread import Background, access_of, manage_access_of
from ..options import Listen, ServingLog
from ..protocols import GrpcListener, GrpcService, Method
from ..protocols.health_grpc import MESSAGES, NOT_SERVING, SERVING
from ..protocols.protocol import NOT_HERE, RestHandler, answer_failure, cancel
from ..security import AccessToken, ServingTls
from .backend import Address, Backend, BackendOverloaded, BackendResponse
from .fleet import Fleet
from .management import RouterManagement

_OWN = {
    b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host", b"expect", b"upgrade", b"te",
    b"trailer", b"proxy-authorization", b"proxy-connection", b"origin", b"sec-fetch-site",
}  # fmt: skip
"""Headers that belong to a single connection or to a web page, and are not forwarded."""


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Backends of a router, and how it listens."""

    listen: Listen = field(default_factory=Listen)
    log: ServingLog = field(default_factory=ServingLog)
    backends: tuple[str, ...] = ()
    """`host:port` of each backend's gRPC; HTTP and management are the next two ports. A name may have several hosts."""
    backend_tls: ServingTls | None = None
    """TLS settings for connections to the backends."""

    def __post_init__(self) -> None:
        self.addresses()
        if self.backend_tls is not None:
            self.backend_tls.for_client  # noqa: B018 - an unreadable certificate authority raises at once

    def addresses(self) -> list[Address]:
        """Return the parsed addresses of the backends."""
        return [Address.parse(text) for text in self.backends]


class Router(Background):
    """A running router. `stop()` drains all requests; a `with` block does so at its end."""

    def __init__(self, settings: RouteSettings) -> None:
        super().__init__(settings.listen, settings.log)
        self.settings = settings
        self._management = RouterManagement(self.listen.limits, self.listen.manage_token)

    def state(self) -> dict[str, Any]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._management.state(), self._loop).result()

    async def serve(self, stopping: asyncio.Event, is_up: Callable[[], None]) -> None:
        listen, management = self.listen, self._management
        fleet = Fleet(
            self.settings.addresses(), self.settings.backend_tls, 2 * listen.limits.body, self._emit, management.admit
        )
        management.fleet = fleet
        forward = Forward(fleet, listen.timeout)
        handlers: dict[str, RestHandler] = {"/v1": forward, "/v2": forward}
        public, private = (
            HttpListener(App(each, lambda: exposition(fleet), listen.limits), listen.limits, listen.tls, access)
            for each, access in (
                (handlers, access_of(listen)),
                ({**handlers, "/manage": management}, manage_access_of(listen)),
            )
        )
        remote = GrpcListener([RouterHealth(fleet)], AccessToken(listen.token), listen.limits, listen.tls)
        remote.others = ForwardGrpc(fleet, listen.timeout)
        looking = asyncio.ensure_future(management.keep_looking())
        try:
            await self._listen(public, remote, private)
            await self._open(fleet)
            await fleet.start()
            backends = [str(address) for address in fleet.backends]
            ports = {"http": self.http, "grpc": self.grpc, "manage": self.manage}
            self._emit("routing", host=this_host(), **ports, backends=backends)
            is_up()
            await stopping.wait()
            self._emit("stopping")
            forward.is_ready = False
            await self._drain(public, remote)
        finally:
            looking.cancel()
            await remote.close(0)
            public.close()
            private.close()
            await fleet.stop()
            await self._close()
            await asyncio.sleep(0)
            self._emit("stopped")

    async def _open(self, fleet: Fleet) -> None:
        """Prepare backends before requests are accepted. Here they are configured and already running."""
        if not self.settings.backends:
            raise SettingsError(
                "a router needs at least one backend", remedy='pass for example backends="a:8500,b:8500"'
            )

    async def _close(self) -> None:
        """Release what `_open` prepared."""


class Forward(RestHandler):
    """Forward HTTP requests to backends unchanged."""

    inflates = False

    def __init__(self, fleet: Fleet, timeout: float) -> None:
        self.is_ready = True
        self._fleet, self._timeout = fleet, timeout
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request) -> None:
        if request.path == "/v2/health/live":
            request.answer(200, b"")
        elif request.path == "/v2/health/ready":
            request.answer(200 if self.is_ready and self._fleet.up else 400, b"")
        elif request.path.startswith("/v2/repository/models/"):
            raise BadRequest(403, NOT_HERE)
        else:
            task = asyncio.ensure_future(self._forward(request))
            request.cancel = lambda: cancel(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, request: Request) -> None:

        def send(backend: Backend, seconds: float) -> Any:
            return backend.fetch(head_of(request, backend.address.host), request.body, seconds)

        try:
            answer, _ = await self._fleet.ask(send, self._timeout)
        except BackendOverloaded as refused:
            answer = refused.answer
        except RequestRefused as refusal:
            self.refuse(request, refusal)
            return
        except Exception as error:
            answer_failure(request, error)
            return
        give(request, answer)


def head_of(request: Request, host: str) -> bytes:
    """Return the head of a request for a backend; a body is always sent with its length."""
    method = "GET" if request.method == "HEAD" else request.method
    lines = [f"{method} {request.path} HTTP/1.1\r\nHost: {host}\r\n".encode("latin1")]
    lines += [b"%b: %b\r\n" % field for field in end_to_end(request.headers)]
    lines.append(b"Content-Length: %d\r\n\r\n" % len(request.body))
    return b"".join(lines)


def end_to_end(headers: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Return the headers that are forwarded: none that `Connection` names (RFC 9110, 7.6.1).

    >>> list(end_to_end({b"connection": b"close, X-Hop", b"x-hop": b"1", b"x-kept": b"2"}))
    [(b'x-kept', b'2')]
    """
    named = {name.strip().lower() for name in headers.get(b"connection", b"").split(b",")}
    return ((name, value) for name, value in headers.items() if name not in _OWN and name not in named)


def give(request: Request, answer: BackendResponse) -> None:
    """Send a backend's response to the client."""
    headers = answer.headers
    extra = b"".join(b"%b: %b\r\n" % field for field in end_to_end(headers) if field[0] != b"content-type")
    request.answer(answer.status, answer.body, headers.get(b"content-type", b"application/json"), extra)


class ForwardGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forward gRPC calls as bytes, whatever the method."""

    def __init__(self, fleet: Fleet, timeout: float) -> None:
        self._fleet, self._timeout = fleet, timeout
        self.guard: Callable[[str, Method | None], Method]

    def service(self, details: Any) -> Any:
        method = details.method

        async def run(request: bytes, context: Any) -> bytes:
            return await self._forward(method, request, context)

        return grpc.stream_unary_rpc_method_handler(self.guard(method, None if method in MANAGING else run))

    async def _forward(self, method: str, request: bytes, context: Any) -> bytes:
        left = context.time_remaining()
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if not key.startswith((":", "grpc-")) and key not in ("user-agent", "content-type", "te")
        ]
        seconds = self._timeout if left is None else min(left, self._timeout)
        try:
            (answer, trailing), _ = await self._fleet.ask(
                lambda backend, seconds: backend.call(method, request, seconds, metadata), seconds
            )
        except BackendOverloaded as refused:
            return await _abort(context, refused.answer)
        except grpc.aio.AioRpcError as error:
            return await _abort(context, error)
        context.set_trailing_metadata(tuple(trailing or ()))
        return answer


MANAGING = {
    "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
    "/inference.GRPCInferenceService/RepositoryModelLoad",
    "/inference.GRPCInferenceService/RepositoryModelUnload",
}
"""Methods that change a server: a router applies them to all backends, over HTTP on its management port."""


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> bytes:
    trailing = tuple(error.trailing_metadata() or ())
    await context.abort(error.code(), error.details() or "", trailing)
    raise AssertionError("abort raises")


class RouterHealth(GrpcService):
    """Health service (`grpc.health.v1.Health/Check`) of the router itself."""

    name = "grpc.health.v1.Health"

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def methods(self) -> dict[str, tuple[Callable[[Any, Any], Awaitable[Any]], Any, Any]]:
        return {"Check": (self._check, MESSAGES["HealthCheckRequest"], MESSAGES["HealthCheckResponse"])}

    async def _check(self, request: Any, context: Any) -> Any:
        return MESSAGES["HealthCheckResponse"](status=SERVING if self._fleet.up else NOT_SERVING)


def exposition(fleet: Fleet) -> bytes:
    """Return the router's own metrics in Prometheus' text format."""
    gauges: Sequence[tuple[str, str, Callable[[Backend], int]]] = (
        ("manyhands_backend_up", "gauge", lambda backend: int(backend.is_up)),
        ("manyhands_backend_busy", "gauge", lambda backend: backend.num_busy),
        ("manyhands_backend_answered_total", "counter", lambda backend: backend.num_answered),
        ("manyhands_backend_lost_total", "counter", lambda backend: backend.num_lost),
    )
    lines = []
    for name, kind, value in gauges:
        lines.append(f"# TYPE {name} {kind}")
        lines += [f'{name}{{backend="{backend.address}"}} {value(backend)}' for backend in fleet.backends.values()]
    return "\n".join([*lines, ""]).encode()
