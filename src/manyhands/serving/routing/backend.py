"""Backend server of a router: its address, its connections and its load."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import httptools

from ...core import SettingsError
from ..http import Body
from ..security import ServingTls

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::(?P<ports>\d+(?:/\d+){0,2}))?")
CONNECT_SECONDS = 2.0


class Lost(Exception):
    """Raised when a backend failed before it answered; the request may be retried on another backend."""

    def __init__(self, *, with_request: bool = True, in_silence: bool = False) -> None:
        self.with_request = with_request
        """Whether the backend may have started to compute the request."""
        self.in_silence = in_silence
        """Whether the backend does not even refuse connections, so that requests in flight may hang."""
        super().__init__("lost")


class BackendOverloaded(Exception):
    """Raised when a backend rejects a request because it is overloaded."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        super().__init__("refused")


@dataclass(frozen=True)
class Address:
    """Host and ports (gRPC, HTTP and management) of a server.

    >>> Address.parse("a:8500")
    Address(host='a', grpc=8500, http=8501, manage=8502)
    >>> Address.parse("a:1/2/3").http
    2
    """

    host: str
    grpc: int
    http: int
    manage: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse host, host:grpc or host:grpc/http/manage; HTTP and management default to the two ports after gRPC."""
        match = _ADDRESS.fullmatch(text.strip())
        ports = [int(port) for port in (match["ports"] or "8500").split("/")] if match else []
        if match is None or len(ports) == 2 or not all(0 < port < 65536 for port in ports):
            raise SettingsError(
                "a backend must be written HOST:PORT with its gRPC port; HTTP and management use the next two ports",
                got=repr(text),
                remedy="write for example a:8500, or a:8500/8501/8502 for other ports",
            )
        first = ports[0]
        return cls(match["host"], *(ports if len(ports) == 3 else (first, first + 1, first + 2)))

    def at(self, host: str) -> Address:
        """Return an address with the same ports on another host."""
        return replace(self, host=host)

    def __str__(self) -> str:
        return f"{self.host}:{self.grpc}"


@dataclass(frozen=True, slots=True)
class BackendResponse:
    """HTTP response of a backend."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Backend:
    """Router-side state of a server: health, load and open connections."""

    def __init__(self, address: Address, name: str, tls: ServingTls | None, limit: int) -> None:
        self.address = address
        self.is_up = False
        """Whether the router sends requests to it."""
        self.num_busy = 0
        """Number of requests in flight."""
        self.num_answered = 0
        """Number of client requests answered."""
        self.num_lost = 0
        self.reason = "not asked yet"
        """Why the backend is not up."""
        self._name, self._tls, self._limit = name, tls, limit
        self._idle: list[BackendConnection] = []
        self._wires: set[BackendConnection] = set()
        self._calls: set[Any] = set()
        self._channel: Any = None

    async def fetch(
        self, head: bytes, body: Body, seconds: float, *, manage: bool = False, is_probe: bool = False
    ) -> BackendResponse:
        """Send an HTTP request and return the response; health checks (`is_probe`) do not count as load.

        Raises:
            Lost: The backend failed before it answered.
            BackendOverloaded: The backend rejected the request.
            TimeoutError: There was no answer within `seconds`.
        """
        self.num_busy += not is_probe
        wire: BackendConnection | None = None
        try:
            async with asyncio.timeout(seconds):
                wire = None if manage else self._kept()
                wire = wire or await self._connect(manage)
                answer = await wire.ask(head, body)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            if not manage:
                # A server may answer requests although its management port cannot be reached.
                self._lose(str(error))
            raise Lost(with_request=False, in_silence=not isinstance(error, ConnectionRefusedError)) from None
        except Lost:
            self.num_lost += 1
            raise
        finally:
            self.num_busy -= not is_probe
            if wire is not None and (manage or not wire.is_free):
                wire.close()
        if not manage and wire.is_free:
            self._idle.append(wire)
        if answer.status == 503:
            raise BackendOverloaded(answer)
        self.num_answered += not (manage or is_probe)
        return answer

    async def call(self, method: str, request: bytes, seconds: float, metadata: Any) -> tuple[bytes, Any]:
        """Send a gRPC request and return the answer and its trailing metadata.

        Raises:
            Lost: The backend failed before it answered.
            BackendOverloaded: The backend rejected the request.
            AioRpcError: The call failed with another status.
        """
        call = self._grpc().unary_unary(method)(request, timeout=seconds, metadata=metadata)
        self._calls.add(call)
        self.num_busy += 1
        try:
            answer = await call
            self.num_answered += 1
            return answer, await call.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            trailing = error.trailing_metadata()
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.num_answered += 1
                raise
            if trailing is not None and "retry-after" in trailing:
                raise BackendOverloaded(error) from None
            text = error.details() or "unavailable"
            self._lose(f"gRPC: {text}")
            raise Lost(with_request="failed to connect" not in text) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            self.num_lost += 1
            raise Lost from None
        finally:
            self.num_busy -= 1
            self._calls.discard(call)

    def give_up(self, reason: str) -> None:
        """Mark an unresponsive backend as down and abort its requests, so that they are retried on another backend."""
        self.is_up, self.reason = False, reason
        for wire in list(self._wires):
            wire.abort()
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        """Close all connections."""
        for wire in list(self._wires):
            wire.close()
        if self._channel is not None:
            await self._channel.close()

    def _lose(self, reason: str) -> None:
        self.num_lost += 1
        self.is_up, self.reason = False, reason

    def _kept(self) -> BackendConnection | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.is_free:
                return wire
        return None

    async def _connect(self, manage: bool) -> BackendConnection:
        port = self.address.manage if manage else self.address.http
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.for_client, "server_hostname": self._name}
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, wire = await loop.create_connection(
                    lambda: BackendConnection(self._wires, self._limit), self.address.host.strip("[]"), port, **secured
                )
        except TimeoutError:
            # This is not the request's deadline: another backend may still answer in time.
            raise ConnectionError(f"did not take a connection within {CONNECT_SECONDS:g} s") from None
        return wire

    def _grpc(self) -> Any:
        if self._channel is None:
            options = [
                ("grpc.max_receive_message_length", min(self._limit, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_reconnect_backoff_ms", 500),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.use_local_subchannel_pool", 1),
            ]
            where = f"{self.address.host}:{self.address.grpc}"
            if self._tls is None:
                self._channel = grpc.aio.insecure_channel(where, options=options)
            else:
                options.append(("grpc.ssl_target_name_override", self._name))  # type: ignore[arg-type]
                self._channel = grpc.aio.secure_channel(where, self._tls.grpc_client(), options=options)
        return self._channel


class BackendConnection(asyncio.Protocol):
    """HTTP connection to a backend that carries one request at a time."""

    def __init__(self, all_: set[BackendConnection], limit: int) -> None:
        self._all, self._limit = all_, limit
        self._transport: Any = None
        self._parser: Any = None
        self._answer: asyncio.Future[BackendResponse] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._num_read = 0
        """Bytes of the current response, with its head, so that a backend cannot fill the router's memory."""
        self._is_open = False

    @property
    def is_free(self) -> bool:
        """Whether another request may be sent on this connection."""
        return self._is_open and self._answer is None

    async def ask(self, head: bytes, body: Body) -> BackendResponse:
        """Send a request and wait for its response."""
        if not self.is_free:
            raise Lost
        self._answer = asyncio.get_running_loop().create_future()
        self._parser, self._num_read = httptools.HttpResponseParser(self), 0
        self._transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self._transport.write(body)
        return await self._answer

    def connection_made(self, transport: Any) -> None:
        self._transport, self._is_open = transport, True
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.abort()
            return
        self._num_read += len(data)
        if self._num_read > self._limit:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False
        self._all.discard(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost())

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        headers, name = self._headers, name.lower()
        headers[name] = value if name != b"connection" or name not in headers else headers[name] + b"," + value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            # An interim response: a client would take it, with its length, for the beginning of another one.
            return
        future, self._answer = self._answer, None
        if not self._parser.should_keep_alive():
            self.close()
        if future is not None and not future.done():
            future.set_result(BackendResponse(self._parser.get_status_code(), self._headers, b"".join(self._body)))

    def close(self) -> None:
        """Close the connection after the written data is sent."""
        self._is_open = False
        self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._is_open = False
        with contextlib.suppress(RuntimeError):
            self._transport.abort()
