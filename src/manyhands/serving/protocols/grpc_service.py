"""What all gRPC services share: methods from tables of messages, tokens, deadlines, and refusals as status codes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...core import RequestRefused
from ..batcher import Arrays, Ticket
from ..http import BadRequest
from ..limits import Bodies, Limits
from ..security import Tls, Token
from ..version import Version
from .protocol import KEY, STATUS, TRACE, Desk

Method = Callable[[Any, Any], Awaitable[Any]]


class GrpcService(ABC):
    """A service: its name, and its methods with the messages that they take and give."""

    name: str

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    @abstractmethod
    def methods(self) -> Mapping[str, tuple[Method, Any, Any]]:
        """By name: the function, the class of its requests and that of its answers."""

    async def ask(
        self, context: Any, version: Version, inputs: Arrays, seconds: float | None = None, priority: int = 0
    ) -> Mapping[str, Any]:
        """The outputs for a request; one whose client goes away is given up."""
        left = [each for each in (seconds, context.time_remaining()) if each is not None]
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()

        def then(ticket: Ticket) -> None:
            if not future.done():
                future.set_result(ticket)

        deadline = self.desk.deadline(min(left, default=None))
        cancel = self.desk.ask(
            version,
            inputs,
            began=time.perf_counter(),
            deadline=deadline,
            priority=priority,
            then=then,
            parent=said(context, TRACE),
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
    """What decides the part of a split."""
    return said(context, KEY)


def said(context: Any, wanted: bytes) -> bytes:
    """A header of a call; empty where there is none."""
    for name, value in context.invocation_metadata() or ():
        if name.encode() == wanted:
            return value.encode() if isinstance(value, str) else bytes(value)
    return b""


class GrpcListener:
    """A gRPC server for some services."""

    def __init__(
        self, services: Sequence[GrpcService], token: str | None, limits: Limits, tls: Tls | None = None
    ) -> None:
        self._services, self._token, self._limits, self._tls = services, Token(token), limits, tls
        self.bodies = Bodies(limits.bodies)
        self.on_answer: Callable[[str, int, int, int, float], None] | None = None
        """Called with a method, its status as HTTP has it, the bytes of both messages, and when the call came."""
        self.others: Any = None
        """A handler of every method that no service has."""
        self._server: Any = None

    async def open(self, host: str, port: int) -> int:
        """Listens; the port that it got, 0 where there is none."""
        options = [
            ("grpc.max_receive_message_length", self._limits.body),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        for service in self._services:
            handlers = {
                name: grpc.unary_unary_rpc_method_handler(
                    self._guarded(f"/{service.name}/{name}", _parsing(method, asked))
                )
                for name, (method, asked, _) in service.methods().items()
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
        if self.others is not None:
            self.others.guard = self._guarded
            self._server.add_generic_rpc_handlers((self.others,))
        try:
            if self._tls is None:
                found = int(self._server.add_insecure_port(f"{host}:{port}"))
            else:
                found = int(self._server.add_secure_port(f"{host}:{port}", self._tls.grpc_server()))
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        return found

    async def close(self, patience: float) -> None:
        """Takes nothing new and lets what is there finish."""
        if self._server is not None:
            await self._server.stop(patience)

    def _guarded(self, path: str, method: Method) -> Method:
        """A method of bytes whose refusals become status codes, and whose calls are told."""

        async def run(request: bytes, context: Any) -> Any:
            arrived, answer, status = time.perf_counter(), b"", 500
            try:
                self._require_token(context)
                with self.bodies.holding(len(request)):
                    answer = await method(request, context)
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

    def _require_token(self, context: Any) -> None:
        said = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not self._token.is_said(str(said).encode()):
            raise RequestRefused("UNAUTHENTICATED", "this server wants a token")


def _parsing(method: Method, asked: Any) -> Method:
    """A method of bytes: what cannot be parsed is the client's mistake, which gRPC itself would call ours."""

    async def run(request: bytes, context: Any) -> Any:
        try:
            message = asked.FromString(request)
        except DecodeError:
            raise RequestRefused("INVALID_ARGUMENT", f"the message is no {asked.DESCRIPTOR.name}") from None
        answer = await method(message, context)
        return bytes(answer.SerializeToString())

    return run
