"""gRPC in a separate process: floods of calls and frames cost that process its time, not the server's event loop.

gRPC's own threads accept what clients send as fast as it comes, and every call takes Python far more time than it
takes its sender. The process has less priority than the server. It checks tokens and limits, reads whole messages, and
hands them to the server over a socket; the server's services answer them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import orjson

from ..core import RequestRefused, RunError
from ..distributed import Device, SocketChannel, World
from ..launcher import Engine, Service
from .frame_socket import FrameError, FrameSocket
from .http import BadRequest
from .limits import Bodies, Limits
from .port_reservation import PortReservation
from .protocols.grpc_service import Decoder, GrpcListener, GrpcService, MessageRule, Method, metadata_value
from .protocols.protocol import KEY, STATUS, TRACE
from .replica_rendezvous import ReplicaRendezvous
from .scheduling import step_aside
from .security import AccessToken, ServingTls

READY, CALL, CANCEL, ANSWER, REFUSAL, STOP, OUTLINE = range(7)
"""Kinds of frames. An OUTLINE is a call whose message has no tensors: the server answers whether it needs the rest."""
NICENESS = 5
START_SECONDS = 60.0
RESTART_SECONDS = 1.0
"""Before a process that has ended is started again."""
MAX_FRAME_HEAD = 256 << 10
"""Maximum bytes of a frame's header from the process: the path of a method and two headers of a call."""
NUMBERS = range(1 << 63)
"""Numbers of calls."""
NAME = "manyhands-grpc"
"""Of the process, for tools that list processes."""


# -- in the process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frontend:
    """Makes the listener in its process, as a service of an engine.

    Attributes:
        rendezvous: The socket where the server waits.
        key: Which process this is.
        host: The address to listen on.
        port: The port to listen on, which the server has reserved.
        methods: The paths of all methods, each with the rule of its messages; None where this listener has it not.
    """

    rendezvous: str
    key: str
    host: str
    port: int
    token: AccessToken
    limits: Limits
    tls: ServingTls | None
    methods: Mapping[str, MessageRule | None]
    closed: str

    def __call__(self, world: World) -> NoReturn:
        step_aside(NICENESS)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(NAME)
        channel = world.channel
        assert isinstance(channel, SocketChannel)
        # The server unpickles what comes over the channel of a service, so this process may not send anything there.
        channel.close()
        self._run()

    def _run(self) -> NoReturn:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        finally:
            # The server restarts a process that has ended, and ends one that it has no connection to.
            os._exit(0)

    async def _serve(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(self.rendezvous)
            server.send(orjson.dumps({"key": self.key}))
            _, (descriptor,), _, _ = socket.recv_fds(server, 16, 1)
        stopping: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        forwarding = Forwarding(self.methods, stopping)
        frames = await FrameSocket.over(socket.socket(fileno=descriptor), forwarding.handle_frame, forwarding.end)
        forwarding.frames = frames
        listener = GrpcListener([], self.token, self.limits, self.tls, closed=self.closed)
        listener.others = forwarding
        try:
            path = str(Path(self.rendezvous).with_name(f"grpc-{self.key[:8]}"))
            found = {"port": await listener.open(self.host, self.port, is_reserved=True, path=path)}
        except OSError as error:
            frames.send(READY, 0, orjson.dumps({"error": str(error)}))
            await stopping
            return
        frames.send(READY, 0, orjson.dumps(found))
        await listener.close(await stopping)


class Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands whole messages to the server and gives its answers to the clients."""

    def __init__(self, methods: Mapping[str, MessageRule | None], stopping: asyncio.Future[float]) -> None:
        self._methods, self._stopping = methods, stopping
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._num = 0
        self.frames: FrameSocket
        self.guard: Callable[[str, Method | None], Method]

    def service(self, details: Any) -> Any:
        path = details.method
        if path not in self._methods:
            return None

        rule = self._methods[path]
        if rule is None:
            return grpc.stream_unary_rpc_method_handler(self.guard(path, None))

        async def run(message: bytes, context: Any) -> bytes:
            rule.require_size(len(message))
            outlined = rule.outline(message)
            if outlined is not None:
                # The server is asked about the model before it gets a large message.
                await self._forward(path, outlined, context, is_outline=True)
            return await self._forward(path, message, context)

        return grpc.stream_unary_rpc_method_handler(self.guard(path, run))

    async def _forward(self, path: str, message: bytes, context: Any, *, is_outline: bool = False) -> bytes:
        self._num += 1
        number, answer = self._num, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        headers = {name.decode(): metadata_value(context, name).decode("latin1") for name in (KEY, TRACE)}
        head = {"path": path, "left": context.time_remaining(), "headers": headers}
        self.frames.send(OUTLINE if is_outline else CALL, number, orjson.dumps(head), message)
        try:
            return bytes(await answer)
        except asyncio.CancelledError:
            self.frames.send(CANCEL, number)
            raise
        finally:
            self._calls.pop(number, None)

    def handle_frame(self, kind: int, number: int, head: bytes, message: bytes) -> None:
        """Take a frame of the server."""
        answer = self._calls.get(number)
        if kind == STOP:
            if not self._stopping.done():
                self._stopping.set_result(orjson.loads(head)["patience"])
        elif answer is None or answer.done():
            return
        elif kind == ANSWER:
            answer.set_result(message)
        else:
            reply = orjson.loads(head)
            answer.set_exception(RequestRefused(reply["code"], reply["reason"], reply["retry"]))

    def end(self) -> None:
        """End without the server."""
        if not self._stopping.done():
            self._stopping.set_result(0.0)


# -- in the server ----------------------------------------------------------------------------------------------------


class CallContext:
    """What services may ask about a call: as much of gRPC's context as they use."""

    def __init__(self, left: float | None, headers: Mapping[str, str]) -> None:
        self._until = None if left is None else time.monotonic() + left
        self._headers = tuple((name, value) for name, value in headers.items() if value)

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None where it has none."""
        return None if self._until is None else self._until - time.monotonic()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that the server uses, such as the token."""
        return self._headers


@dataclass(frozen=True)
class ForwardedCall:
    """A call as the process describes it, with the types of all values checked.

    Attributes:
        path: The path of the method, which the listener may not have.
        number: The number of the call, for its answer.
        left: The seconds until the client's deadline; None where it has none.
        headers: Headers of the call by name: the key of a traffic split and the parent of a trace.
        is_outline: Whether the message has only the fields that say which model is asked.
    """

    path: str
    number: int
    left: float | None
    headers: Mapping[str, str]
    is_outline: bool

    @classmethod
    def read(cls, head: bytes, number: int, *, is_outline: bool) -> ForwardedCall:
        """Read a frame's header; raises FrameError if it is not what the process writes."""
        value = _object(head)
        path, left, headers = (value.get(name) for name in ("path", "left", "headers"))
        is_left = left is None or (type(left) in (int, float) and math.isfinite(left))
        if number not in NUMBERS or not isinstance(path, str) or not is_left or not isinstance(headers, dict):
            raise FrameError("a call without a number, a path, a deadline or headers")
        known = {name.decode() for name in (KEY, TRACE)}
        if not headers.keys() <= known or not all(isinstance(one, str) for one in headers.values()):
            raise FrameError("a call with headers that the server does not use")
        return cls(path, number, left, headers, is_outline)


def read_ready(head: bytes) -> dict[str, Any]:
    """Return the port that the process listens on, or its error; raises FrameError if it is neither."""
    value = _object(head)
    port = value.get("port")
    if value.keys() == {"error"} and isinstance(value["error"], str):
        return value
    if value.keys() != {"port"} or type(port) is not int or not 0 < port < 1 << 16:
        raise FrameError("neither the port that it listens on nor an error")
    return value


def _object(head: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(head)
    except orjson.JSONDecodeError:
        raise FrameError("a header that is not JSON") from None
    if not isinstance(value, dict):
        raise FrameError("a header that is not an object")
    return value


class GrpcProcess:
    """The server's end: starts the process, answers the calls that it hands on, and restarts it when it has ended."""

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
        self._token, self._limits, self._closed = token, limits, closed
        # A copy without the context that the server has made of it, which cannot be sent.
        self._tls = None if tls is None else dataclasses.replace(tls)
        self.bodies = Bodies(limits.bodies)
        self.on_answer: Callable[[str, int, int, int, float], None] | None = None
        """Called with a method, its status as HTTP has it, the bytes of both messages, and when the call came."""
        self.engine: Engine
        self.rendezvous: ReplicaRendezvous
        self._methods: dict[str, Decoder] = {}
        """The methods of this listener. The server itself looks them up here: it does not trust the process, which
        reads what clients send, to name no others."""
        self._rules: dict[str, MessageRule | None] = {}
        for service in services:
            for name in service.methods():
                path, is_here = f"/{service.name}/{name}", manages or name not in service.managing
                if is_here:
                    self._methods[path] = Decoder(service, name, limits)
                self._rules[path] = self._methods[path].rule if is_here else None
        self._service: Service | None = None
        self._frames: FrameSocket | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._restarting: asyncio.Task[None] | None = None
        self._host = ""
        self._reservation = PortReservation()
        self._is_closing = False

    async def open(self, host: str, port: int) -> int:
        """Start the process and return the port that it listens on; raises OSError where that is not free."""
        self._host = host
        await self._reservation.open(host, port)
        return await self._start()

    async def close(self, patience: float) -> None:
        """Accept no new calls, finish those in flight, and end the process."""
        self._is_closing = True
        if self._restarting is not None:
            self._restarting.cancel()
        service, self._service = self._service, None
        if service is None:
            self._reservation.close()
            return
        if self._frames is not None and patience > 0:
            self._frames.send(STOP, 0, orjson.dumps({"patience": patience}))
            await asyncio.wait([_ending(service)], timeout=patience + 1.0)
        if self._frames is not None:
            self._frames.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.to_thread(service.kill)
        self._reservation.close()

    async def _start(self) -> int:
        loop = asyncio.get_running_loop()
        key, coming = self.rendezvous.expect()
        frontend = Frontend(
            self.rendezvous.path, key, self._host, self._reservation.port, self._token, self._limits, self._tls,
            self._rules, self._closed,
        )  # fmt: skip
        self._service = await asyncio.to_thread(self.engine.start_service, frontend, Device("cpu"))
        ended = _ending(self._service)
        self._ready = loop.create_future()
        own_end, peer_end = socket.socketpair()
        try:
            async with asyncio.timeout(START_SECONDS):
                both: list[asyncio.Future[Any]] = [coming, ended]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    raise RunError(f"the gRPC process has ended: {ended.exception()}")
                arrival = coming.result().socket
                socket.send_fds(arrival, [b"frames"], [peer_end.fileno()])
                arrival.close()
                most = MAX_FRAME_HEAD, self._limits.body
                self._frames = await FrameSocket.over(own_end, self._handle_frame, self._end, most)
                reply = await self._ready
        except TimeoutError:
            raise RunError(f"the gRPC process did not start within {START_SECONDS:.0f} s") from None
        finally:
            self.rendezvous.forget(key)
            peer_end.close()
        if "error" in reply:
            self._frames.close()
            await asyncio.to_thread(self._service.kill)
            raise OSError(reply["error"])
        return int(reply["port"])

    def _end(self) -> None:
        """Give up the calls of a process that has ended, and start another one on the same port."""
        for task in self._tasks.values():
            task.cancel()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result({"error": "the gRPC process has ended"})
        elif not self._is_closing and (self._restarting is None or self._restarting.done()):
            self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        while True:
            if self._service is not None:
                # A compromised process may not end on request.
                await asyncio.to_thread(self._service.kill)
            await asyncio.sleep(RESTART_SECONDS)
            with contextlib.suppress(OSError, RunError):
                await self._start()
                return

    def _handle_frame(self, kind: int, number: int, head: bytes, message: bytes) -> None:
        """Take a frame of the process; raises FrameError for one that it must not send."""
        if kind == READY and self._ready is not None and not self._ready.done():
            self._ready.set_result(read_ready(head))
        elif kind in (CALL, OUTLINE):
            if number in self._tasks:
                raise FrameError("a call with the number of another one that is not answered")
            call = ForwardedCall.read(head, number, is_outline=kind == OUTLINE)
            method = self._methods.get(call.path)
            if method is None or (call.is_outline and not method.rule.addressed):
                raise FrameError("a call of a method that its listener does not have")
            is_over = len(self._tasks) >= self._limits.calls
            self._tasks[number] = asyncio.ensure_future(self._answer(call, message, is_over=is_over))
            self._tasks[number].add_done_callback(lambda task: self._tasks.pop(number, None))
        elif kind == CANCEL:
            # A call that has been answered in the meantime has no state left.
            if number in self._tasks:
                self._tasks[number].cancel()
        else:
            raise FrameError(f"a frame of the kind {kind}")

    async def _answer(self, call: ForwardedCall, message: bytes, *, is_over: bool) -> None:
        arrived, answer, status, path, number = time.perf_counter(), b"", 500, call.path, call.number
        frames = self._frames
        assert frames is not None
        refusal: RequestRefused | None = None
        try:
            if is_over:
                reason = f"overloaded: {self._limits.calls} calls are waiting"
                raise RequestRefused("RESOURCE_EXHAUSTED", reason, 1.0)
            context = CallContext(call.left, call.headers)
            if call.is_outline:
                self._methods[path].require_served(message, context)
            else:
                with self.bodies.holding(len(message)):
                    answer = await self._methods[path](message, context)
                if frames.num_unsent + len(answer) > self._limits.bodies:
                    # The refusal refers to this frame, and would keep the answer until the next garbage collection.
                    answer = b""
                    reason = f"overloaded: {frames.num_unsent} bytes of answers are waiting"
                    raise RequestRefused("UNAVAILABLE", reason, 1.0)
            status = 200
        except asyncio.CancelledError:
            status = STATUS["CANCELLED"]
            raise
        except RequestRefused as error:
            refusal, status = error, STATUS.get(error.code, 500)
        except BadRequest as error:
            refusal, status = RequestRefused("INVALID_ARGUMENT", error.reason), error.status
        except Exception:
            refusal = RequestRefused("UNKNOWN", "the server failed; see its log")
            raise
        finally:
            if refusal is not None:
                reply = {"code": refusal.code, "reason": refusal.reason, "retry": refusal.retry_after}
                frames.send(REFUSAL, number, orjson.dumps(reply))
            elif status == 200:
                frames.send(ANSWER, number, b"", answer)
            if self.on_answer is not None and (refusal is not None or not call.is_outline):
                self.on_answer(path, status, len(message), len(answer), arrived)


def _ending(service: Service) -> asyncio.Future[None]:
    """Return a future of the end of a process, whose exception may be ignored."""
    ended = asyncio.wrap_future(service.ended)
    ended.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return ended
