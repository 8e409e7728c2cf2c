"""Post: sockets of ZeroMQ that speak only with whoever knows the token, and carry tensors as raw frames."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from ...core import RunError
from .messages import (
    MAX_FRAME,
    AnyMessage,
    Challenge,
    Hello,
    Message,
    Proof,
    Stranger,
    Welcome,
    decode,
    encode,
)

Frame = Any
"""Anything with a buffer: bytes, an array, a ZeroMQ frame."""
NONCE = 32
MAX_STRANGERS = 1024
LAST = 20
"""Milliseconds in which what was sent before a connection was lost still comes."""
_BIG = 65536
"""Bytes from which a frame is sent without a copy."""


class LinkLost(RunError):
    """The other end of a connection does not answer or does not know us any more."""


def new_context() -> zmq.Context[Any]:
    """What sockets are made in; one for every process and purpose, ended when its sockets are closed."""
    return zmq.Context()


def new_token() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(32)


class Listener:
    """Many members at one address; only those that proved to know the token are heard."""

    def __init__(
        self, context: zmq.Context[Any], token: bytes, timeout: float, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _settle(self.socket, timeout)
        where = f"tcp://{host}"
        if port:
            self.socket.bind(f"{where}:{port}")
        else:
            port = self.socket.bind_to_random_port(where)
        self.address = f"{where}:{port}"
        self._token = token
        self._strangers: dict[bytes, tuple[bytes, bytes]] = {}
        self._known: set[bytes] = set()
        self.num_bytes = 0
        """Bytes that came and went, of messages and of tensors, those in shared memory included."""

    def receive(self) -> tuple[bytes, AnyMessage, list[Frame]] | None:
        """The next message of a known peer; None where it was a stranger's, or none at all."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        name = bytes(peer)
        self.num_bytes += sum(len(frame) for frame in frames)
        try:
            message = decode(frames[0].buffer)
        except (msgspec.DecodeError, IndexError):
            self._known.discard(name)
            return None
        if name in self._known:
            return name, message, [frame.buffer for frame in frames[1:]]
        self._meet(name, message)
        return None

    def send(self, peer: bytes, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Sends to a peer; one that is gone hears nothing."""
        head = encode(message)
        self.num_bytes += len(head) + sum(memoryview(frame).nbytes for frame in frames)
        self.socket.send_multipart([peer, head, *frames])

    def close(self) -> None:
        """Stops listening."""
        self.socket.close(linger=200)

    def _meet(self, peer: bytes, message: AnyMessage) -> None:
        if isinstance(message, Hello) and len(message.nonce) == NONCE:
            ours = secrets.token_bytes(NONCE)
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.pop(next(iter(self._strangers)))
            self._strangers[peer] = message.nonce, ours
            self.send(peer, Challenge(ours, _proof(self._token, b"listener", message.nonce, ours)))
        elif isinstance(message, Proof) and peer in self._strangers:
            theirs, ours = self._strangers.pop(peer)
            if hmac.compare_digest(message.proof, _proof(self._token, b"caller", theirs, ours)):
                self._known.add(peer)
                self.send(peer, Welcome())
        else:
            self.send(peer, Stranger())


class Caller:
    """One connection to a listener, which must answer within `reach` seconds when it is made."""

    def __init__(
        self, context: zmq.Context[Any], token: bytes, address: str, timeout: float, reach: float | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _settle(self.socket, timeout)
        self.address = address
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Becomes readable when the connection is lost; what it held is lost too, so it is not used again."""
        self.socket.connect(address)
        try:
            self._introduce(token, timeout if reach is None else reach)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Sends a message; a large frame must stay as it is until it is answered."""
        parts = [encode(message), *frames]
        last = len(parts) - 1
        for index, part in enumerate(parts):
            more = zmq.SNDMORE if index < last else 0
            self.socket.send(part, more, copy=memoryview(part).nbytes < _BIG)

    def receive(self, timeout: float | None = 0.0) -> tuple[AnyMessage, list[Frame]] | None:
        """The next message, within so many seconds; None where none came."""
        if not self._has_come(timeout):
            return None
        head, *frames = self.socket.recv_multipart(copy=False)
        message = decode(head.buffer)
        if isinstance(message, Stranger):
            raise LinkLost(f"{self.address} does not know this connection any more")
        return message, [frame.buffer for frame in frames]

    def _has_come(self, timeout: float | None) -> bool:
        """Waits for a message; what came before a connection was lost is still read."""
        if self.socket.poll(0):
            return True
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else int(1000 * timeout)))
        if self.monitor in ready and not self.socket.poll(LAST):
            raise LinkLost(f"the connection to {self.address} was lost")
        return bool(self.socket.poll(0))

    def expect(self, timeout: float | None) -> tuple[AnyMessage, list[Frame]]:
        """The next message; an error where none comes in time."""
        got = self.receive(timeout)
        if got is None:
            assert timeout is not None
            raise LinkLost(f"{self.address} did not answer within {timeout:.0f} s")
        return got

    def close(self) -> None:
        """Ends the connection; what was sent still leaves."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=200)

    def _introduce(self, token: bytes, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        ours = secrets.token_bytes(NONCE)
        self.send(Hello(ours))
        answer, _ = self.expect(timeout)
        expected = _proof(token, b"listener", ours, answer.nonce) if isinstance(answer, Challenge) else b""
        if not isinstance(answer, Challenge) or not hmac.compare_digest(answer.proof, expected):
            raise LinkLost(f"whoever listens at {self.address} does not know this job's token")
        self.send(Proof(_proof(token, b"caller", ours, answer.nonce)))
        got = self.receive(max(0.1, min(5.0, deadline - time.monotonic())))
        if got is None or not isinstance(got[0], Welcome):
            raise LinkLost(f"{self.address} refused this job's token")


def call_again(context: zmq.Context[Any], token: bytes, address: str, timeout: float) -> Caller:
    """A new connection to somebody who may be starting anew: within the time limit it may fail and is tried again."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return Caller(context, token, address, timeout, max(0.1, deadline - time.monotonic()))
        except LinkLost as lost:
            if time.monotonic() >= deadline:
                raise LinkLost(f"{address} did not answer within {timeout:.0f} s: {lost}") from None
            time.sleep(0.1)


def _proof(token: bytes, role: bytes, caller: bytes, listener: bytes) -> bytes:
    return hmac.digest(token, b"manyhands " + role + caller + listener, "sha256")


def _settle(socket: Any, timeout: float) -> None:
    """Bounds what a frame may hold, and how long the other end may be silent, whose ZeroMQ answers by itself.

    What is sent waits in memory, bounded by who asks how often.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, int(1000 * timeout / 8)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(400, int(1000 * timeout / 2)))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
