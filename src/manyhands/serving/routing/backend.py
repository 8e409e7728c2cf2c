"""One of the servers behind a router: its ports, its connections, and how much of it is in use."""

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
    """A backend was gone before its answer came: another one may be asked."""

    def __init__(self, *, with_request: bool = True, in_silence: bool = False) -> None:
        self.with_request = with_request
        """Whether it may have begun to compute."""
        self.in_silence = in_silence
        """Whether nobody is there, not even one that refuses: who waits for it already may wait for ever."""
        super().__init__("lost")


class BackendOverloaded(Exception):
    """A backend has too much to do, and says so."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        super().__init__("refused")


@dataclass(frozen=True)
class Address:
    """Where a server listens: for gRPC, for HTTP and for management.

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
        """From host, host:grpc or host:grpc/http/manage; without more the ports are next to each other."""
        match = _ADDRESS.fullmatch(text.strip())
        ports = [int(port) for port in (match["ports"] or "8500").split("/")] if match else []
        if match is None or len(ports) == 2 or not all(0 < port < 65536 for port in ports):
            raise SettingsError(
                "a backend is host:port, the port of its gRPC; HTTP and management are the next two",
                got=repr(text),
                remedy="write for instance a:8500, or a:8500/8501/8502 where they are others",
            )
        first = ports[0]
        return cls(match["host"], *(ports if len(ports) == 3 else (first, first + 1, first + 2)))

    def at(self, host: str) -> Address:
        """The same ports elsewhere."""
        return replace(self, host=host)

    def __str__(self) -> str:
        return f"{self.host}:{self.grpc}"


@dataclass(frozen=True, slots=True)
class BackendResponse:
    """What a backend answered over HTTP."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Backend:
    """A server, as the router sees it."""

    def __init__(self, address: Address, name: str, tls: ServingTls | None, limit: int) -> None:
        self.address = address
        self.is_up = False
        """Whether requests are sent there."""
        self.num_busy = 0
        """Requests that it has not answered."""
        self.num_answered = 0
        """Requests of clients."""
        self.num_lost = 0
        self.reason = "not asked yet"
        """Why it is not up."""
        self._name, self._tls, self._limit = name, tls, limit
        self._idle: list[BackendConnection] = []
        self._wires: set[BackendConnection] = set()
        self._calls: set[Any] = set()
        self._channel: Any = None

    async def fetch(
        self, head: bytes, body: Body, seconds: float, *, manage: bool = False, is_look: bool = False
    ) -> BackendResponse:
        """Sends a request over HTTP; raises Lost, Refused or TimeoutError. A look is nobody's request."""
        self.num_busy += not is_look
        wire: BackendConnection | None = None
        try:
            async with asyncio.timeout(seconds):
                wire = None if manage else self._kept()
                wire = wire or await self._connect(manage)
                answer = await wire.ask(head, body)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            self._lose(str(error))
            raise Lost(with_request=False, in_silence=not isinstance(error, ConnectionRefusedError)) from None
        except Lost:
            self.num_lost += 1
            raise
        finally:
            self.num_busy -= not is_look
            if wire is not None and (manage or not wire.is_free):
                wire.close()
        if not manage and wire.is_free:
            self._idle.append(wire)
        if answer.status == 503:
            raise BackendOverloaded(answer)
        self.num_answered += not (manage or is_look)
        return answer

    async def call(self, method: str, request: bytes, seconds: float, metadata: Any) -> tuple[bytes, Any]:
        """Sends a request over gRPC: the answer and its trailing metadata; raises Lost, Refused or AioRpcError."""
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
        """It says nothing any more: whoever waits for it asks another one."""
        self.is_up, self.reason = False, reason
        for wire in list(self._wires):
            wire.abort()
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        """Ends all connections."""
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
            # Not the request's own deadline: another backend may still answer within it.
            raise ConnectionError(f"did not take a connection within {CONNECT_SECONDS:g} s") from None
        return wire

    def _grpc(self) -> Any:
        if self._channel is None:
            options = [
                ("grpc.max_receive_message_length", -1),
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
    """One connection over HTTP: a request, its answer, the next request."""

    def __init__(self, all_: set[BackendConnection], limit: int) -> None:
        self._all, self._limit = all_, limit
        self._transport: Any = None
        self._parser: Any = None
        self._answer: asyncio.Future[BackendResponse] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._num_body = 0
        self._is_open = False

    @property
    def is_free(self) -> bool:
        """Whether another request may be sent."""
        return self._is_open and self._answer is None

    async def ask(self, head: bytes, body: Body) -> BackendResponse:
        """Sends a request and waits for its answer."""
        if not self.is_free:
            raise Lost
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
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
        self._headers, self._body, self._num_body = {}, [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if self._num_body > self._limit:
            self.abort()
        self._body.append(body)

    def on_message_complete(self) -> None:
        future, self._answer = self._answer, None
        if not self._parser.should_keep_alive():
            self.close()
        if future is not None and not future.done():
            future.set_result(BackendResponse(self._parser.get_status_code(), self._headers, b"".join(self._body)))

    def close(self) -> None:
        """Ends the connection."""
        self._is_open = False
        self._transport.close()

    def abort(self) -> None:
        """Ends it at once."""
        self._is_open = False
        with contextlib.suppress(RuntimeError):
            self._transport.abort()
