"""ZeroMQ sockets that authenticate peers by the job's token and send tensors as raw frames."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..core import RunError
from .authentication import TokenAuthenticator, set_credentials
from .messages import (
    MAX_FRAME,
    AnyMessage,
    Challenge,
    Hello,
    Message,
    Proof,
    Unauthenticated,
    Welcome,
    decode,
    encode,
)

Frame = Any
"""A part of a message: any object with a buffer, such as bytes, an array or a ZeroMQ frame."""
NONCE = 32
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
SOON = 3.0
"""Seconds of waiting for the coordinator after which a notice informs the user."""
LAST = 20
"""Milliseconds to wait for messages that were sent before a connection was lost."""
_BIG = 65536
"""Size in bytes from which a frame is sent without a copy."""


class ConnectionLost(RunError):
    """Raised when the peer of a connection does not answer or no longer accepts this connection."""


def new_context() -> zmq.Context[Any]:
    """Return a new ZeroMQ context, which the caller must terminate after closing its sockets."""
    return zmq.Context()


def new_token() -> bytes:
    """Return a random secret for one job."""
    return secrets.token_bytes(32)


class MessageListener:
    """A ROUTER socket for many peers; messages are accepted only from peers that proved to know the token."""

    def __init__(
        self, context: zmq.Context[Any], token: bytes, timeout: float, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _settle(self.socket, timeout)
        self.socket.plain_server = True
        self._authenticator = TokenAuthenticator(context, token)
        where = f"tcp://{host}"
        if port:
            self.socket.bind(f"{where}:{port}")
        else:
            port = self.socket.bind_to_random_port(where)
        self.address = f"{where}:{port}"
        self._token = token
        self._unproven: dict[str, tuple[bytes, bytes]] = {}
        self._known: set[str] = set()
        """Authenticated connections, by the user id that the ZeroMQ authenticator assigned."""
        self.num_bytes = 0
        """Bytes sent and received, of messages and of tensors, including those in shared memory."""

    def receive(self) -> tuple[bytes, AnyMessage, list[Frame]] | None:
        """Return the peer, message and frames received next; None if there is none or the peer is not authenticated."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        name = bytes(peer)
        self.num_bytes += sum(len(frame) for frame in frames)
        try:
            message = decode(frames[0].buffer)
        except (msgspec.DecodeError, IndexError):
            return None
        connection = str(frames[0].get("User-Id"))
        if connection in self._known:
            return name, message, _joined([frame.buffer for frame in frames[1:]])
        self._authenticate(name, connection, message)
        return None

    def send(self, peer: bytes, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send a message to a peer; it is dropped if the peer is no longer connected."""
        head = encode(message)
        self.num_bytes += len(head) + sum(memoryview(frame).nbytes for frame in frames)
        self.socket.send_multipart([peer, head, *_cut(frames)])

    def close(self) -> None:
        """Stop listening and close the socket."""
        self.socket.close(linger=200)
        self._authenticator.close()

    def _authenticate(self, peer: bytes, connection: str, message: AnyMessage) -> None:
        if isinstance(message, Hello) and len(message.nonce) == NONCE:
            own_nonce = secrets.token_bytes(NONCE)
            self._unproven[connection] = message.nonce, own_nonce
            self.send(peer, Challenge(own_nonce, _proof(self._token, b"listener", message.nonce, own_nonce)))
        elif isinstance(message, Proof) and connection in self._unproven:
            peer_nonce, own_nonce = self._unproven.pop(connection)
            if hmac.compare_digest(message.proof, _proof(self._token, b"caller", peer_nonce, own_nonce)):
                self._known.add(connection)
                self.send(peer, Welcome())
        else:
            self.send(peer, Unauthenticated())


class Caller:
    """A DEALER socket connected to one listener, which must answer the handshake within `reach` seconds."""

    def __init__(
        self, context: zmq.Context[Any], token: bytes, address: str, timeout: float, reach: float | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _settle(self.socket, timeout)
        set_credentials(self.socket, token)
        self.address, self._lost = address, ""
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        """Readable when the connection is lost. Pending messages are lost with it, so the connection is not reused."""
        self.socket.connect(address)
        try:
            self._introduce(token, timeout if reach is None else reach)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send a message without blocking; a large frame must not change until the message is answered.

        If the connection is lost the message is dropped, and the next `receive` raises.
        """
        parts = [encode(message), *_cut(frames)]
        last = len(parts) - 1
        for index, part in enumerate(parts):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
            try:
                self.socket.send(part, flags, copy=memoryview(part).nbytes < _BIG)
            except zmq.Again:
                return

    def receive(self, timeout: float | None = 0.0) -> tuple[AnyMessage, list[Frame]] | None:
        """Return the next message and its frames; None if none arrives within `timeout` seconds.

        Raise `ConnectionLost` if the connection is lost. A timeout of None waits indefinitely.
        """
        if not self._has_arrived(timeout):
            return None
        head, *frames = self.socket.recv_multipart(copy=False)
        try:
            message = decode(head.buffer)
        except msgspec.DecodeError as error:
            raise ConnectionLost(f"{self.address} sent an invalid message: {error}") from None
        if isinstance(message, Unauthenticated):
            raise ConnectionLost(f"{self.address} no longer knows this connection")
        return message, _joined([frame.buffer for frame in frames])

    def _has_arrived(self, timeout: float | None) -> bool:
        """Return whether a message arrives within the timeout; raise `ConnectionLost` if the connection is lost.

        Messages that arrived before the connection was lost can still be received.
        """
        if self.socket.poll(0):
            return True
        if self._lost:
            raise ConnectionLost(self._lost)
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else int(1000 * timeout)))
        if self.monitor in ready and not self.socket.poll(LAST):
            # Consume the event, so that polling the monitor does not wake up again.
            is_refused = recv_monitor_message(self.monitor)["event"] & REFUSED
            refused = f"the program that listens at {self.address} does not have this job's token"
            self._lost = refused if is_refused else f"the connection to {self.address} was lost"
            raise ConnectionLost(self._lost)
        return bool(self.socket.poll(0))

    def expect(self, timeout: float | None) -> tuple[AnyMessage, list[Frame]]:
        """Return the next message and its frames; raise `ConnectionLost` if none arrives within `timeout` seconds."""
        got = self.receive(timeout)
        if got is None:
            assert timeout is not None
            raise ConnectionLost(f"{self.address} did not answer within {timeout:.0f} s")
        return got

    def close(self) -> None:
        """Close the connection; messages that are queued have 200 ms to be sent."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=200)

    def _introduce(self, token: bytes, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        own_nonce = secrets.token_bytes(NONCE)
        self.send(Hello(own_nonce))
        answer, _ = self.expect(timeout)
        expected = _proof(token, b"listener", own_nonce, answer.nonce) if isinstance(answer, Challenge) else b""
        if not isinstance(answer, Challenge) or not hmac.compare_digest(answer.proof, expected):
            raise ConnectionLost(f"the program that listens at {self.address} does not have this job's token")
        self.send(Proof(_proof(token, b"caller", own_nonce, answer.nonce)))
        got = self.receive(max(0.1, min(5.0, deadline - time.monotonic())))
        if got is None or not isinstance(got[0], Welcome):
            raise ConnectionLost(f"{self.address} refused this job's token")


def call_until_reached(
    context: zmq.Context[Any], token: bytes, address: str, timeout: float, on_wait: Callable[[str], None]
) -> Caller:
    """Connect to a coordinator that may be restarting, retrying until the timeout.

    `on_wait` is called once when this takes longer than a few seconds.
    """
    began, has_notified = time.monotonic(), False
    while True:
        left = began + timeout - time.monotonic()
        try:
            return Caller(context, token, address, timeout, max(0.1, min(left, SOON)))
        except ConnectionLost as lost:
            if time.monotonic() >= began + timeout:
                raise ConnectionLost(f"{address} did not answer within {timeout:.0f} s: {lost}") from None
            if not has_notified and time.monotonic() - began >= SOON:
                has_notified = True
                on_wait(
                    f"waiting up to {timeout:.0f} s for the coordinator at {address.removeprefix('tcp://')}: {lost}"
                )
            time.sleep(0.1)


def _proof(token: bytes, role: bytes, caller: bytes, listener: bytes) -> bytes:
    return hmac.digest(token, b"manyhands " + role + caller + listener, "sha256")


def _cut(frames: Sequence[Frame]) -> list[Frame]:
    """Split frames into chunks of at most MAX_FRAME bytes; a chunk of exactly that size is continued by the next."""
    parts: list[Frame] = []
    for frame in frames:
        whole = memoryview(frame)
        parts += [whole[at : at + MAX_FRAME] for at in range(0, len(whole) + 1, MAX_FRAME)]
    return parts


def _joined(parts: Sequence[Frame]) -> list[Frame]:
    """Join the chunks that `_cut` made back into frames."""
    frames: list[Frame] = []
    start = 0
    for index, part in enumerate(parts):
        if len(part) == MAX_FRAME:
            continue
        if start == index:
            frames.append(part)
        else:
            whole: Any = np.concatenate([np.frombuffer(piece, np.uint8) for piece in parts[start : index + 1]])
            frames.append(memoryview(whole))
        start = index + 1
    return frames


def _settle(socket: Any, timeout: float) -> None:
    """Limit the frame size and set heartbeats, which the peer's ZeroMQ answers without the application.

    The send queue has no limit: it is bounded by how often peers send requests.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, int(1000 * timeout / 8)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(400, int(1000 * timeout / 2)))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
