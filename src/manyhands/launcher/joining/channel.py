"""The channel between two hosts: JSON messages of known shape and limited size, each authenticated by an HMAC."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core import RunError

Message = dict[str, Any]

MAX_MESSAGE = 1 << 20
MAX_TEXT = 1 << 15
"""Maximum characters of a text in a message that would otherwise be too long; longer texts lose their middle."""
BEAT_SECONDS = 0.5
_HEAD = struct.Struct("!I")
_PROOF = hashlib.sha256().digest_size
_TLS = 22
"""The first byte of a TLS connection; as the first byte of a message's length it would exceed MAX_MESSAGE."""
_HEX = re.compile("[0-9a-f]{0,64}")
_HEX_FIELDS = ("nonce", "proof", "again")

SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    # while joining
    "hello": {"nonce": str},
    "join": {"nonce": str, "facts": dict, "proof": str, "again": str},
    "welcome": {"proof": str},
    "refused": {"code": str, "reason": str},
    # from the coordinator's host
    "probe": {"ways": list, "key": str},
    "begin": {"devices": list},
    "agreed": {"value": str},
    "start": {"slot": int, "rendezvous": dict},
    "tell": {"slot": int, "message": dict},
    "kill": {"slot": (int, type(None))},
    "over": {"reason": str},
    "log": {"entry": dict},
    "peers": {"hosts": dict, "salt": str},
    # from the other hosts
    "peer": {"port": int},
    "unheard": {"hosts": list},
    "links": {"found": list},
    "event": {"slot": int, "entry": dict},
    "output": {"slot": int, "text": str, "stream": str},
    "lost_world": {"slot": int, "told": dict},
    "failure": {"slot": int, "reason": str, "traceback": str, "echo": bool, "is_ours": bool},
    "end": {"slot": int, "done": bool, "text": str},
    "stop": {},
    "leave": {"reason": str},
    # from both
    "beat": {},
}
"""The fields and their types of every kind of message; no other fields are accepted."""


class ProtocolError(RunError):
    """Raised when the other side sends a message that does not follow the protocol."""


@dataclass(frozen=True)
class JoinTimeouts:
    """Time limits for another host, which are derived from the time limit of the job and are at most ten seconds."""

    timeout: float

    @property
    def silence(self) -> float:
        """Return the seconds after which a host that sends nothing or reads nothing is considered failed."""
        return min(4.0, self.timeout / 10)

    @property
    def answer(self) -> float:
        """Return the seconds to wait for an answer while a host joins."""
        return min(10.0, self.timeout / 4)

    @property
    def connection(self) -> float:
        """Return the seconds to wait until a connection is established."""
        return min(2.0, self.timeout / 10)


class Bare:
    """The transport layer of a connection without TLS: bytes are sent unchanged."""

    binding: tuple[str, ...] = ()
    """Values that only this connection has; proofs of the token cover them (channel binding)."""

    def wrapped(self, data: bytes) -> bytes:
        """Return the bytes to send for `data`."""
        return data

    def opened(self, data: bytes) -> bytes:
        """Return the data in received bytes."""
        return data


class Channel:
    """One end of a connection between hosts. Sending is thread-safe; a separate thread sends heartbeats."""

    def __init__(self, sock: socket.socket, limits: JoinTimeouts, cover: Bare | None = None) -> None:
        self._socket, self.limits, self._cover = sock, limits, cover or Bare()
        self.binding = self._cover.binding
        self.peer = str(sock.getpeername()[0])
        """The address of the other side, which stays available after the connection has ended."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(limits.silence, 1)
        # A sender must not block forever on a frozen host that does not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        sock.settimeout(None)
        self._sending = threading.Lock()
        self._keys: tuple[bytes, bytes] = b"", b""
        self._sent = self._received = 0
        self._rest = bytearray()
        self._closed = threading.Event()
        self.received_at = time.monotonic()
        """When the last bytes arrived from the other side."""

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self._socket.fileno()

    def seal(self, ours: bytes, theirs: bytes) -> None:
        """Authenticate every further message with keys that only these two hosts know, one per direction."""
        self._keys = ours, theirs

    def start_beating(self) -> None:
        """Start the thread that sends heartbeats."""
        threading.Thread(target=self._beat, name="manyhands-beat", daemon=True).start()

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message; return False, and end the connection, if the peer has disconnected or does not read."""
        body = _written({"kind": kind, **values})
        with self._sending:
            frame = _HEAD.pack(len(body)) + self._proof(self._keys[0], self._sent, body) + body
            self._sent += 1
            try:
                self._socket.sendall(self._cover.wrapped(frame))
            except OSError:
                # Part of a message may have been sent, so the other side could not parse anything after it.
                self._hang_up()
                return False
        return True

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived; raise ConnectionError when the connection is closed."""
        chunk = self._socket.recv(65536)
        if not chunk:
            raise ConnectionError("the connection was closed")
        self.received_at = time.monotonic()
        self._rest += self._cover.opened(chunk)
        yield from self._whole()

    def wait_for(self, *kinds: str, seconds: float, first: float | None = None) -> Message:
        """Return the next message, which must be of one of these kinds; heartbeats are skipped.

        Args:
            kinds: The accepted kinds.
            seconds: Time limit for the whole message.
            first: Time limit for its first byte, if that is shorter.

        Raises:
            ProtocolError: The message is of another kind, or invalid.
            TimeoutError: No message has arrived in time.
            ConnectionError: The connection was closed.
        """
        end = time.monotonic() + seconds
        first_end = end if first is None else time.monotonic() + first
        try:
            while True:
                for message in self._whole():
                    if message["kind"] in kinds:
                        return message
                    if message["kind"] != "beat":
                        raise ProtocolError(
                            f"the peer sent the message {message['kind']} instead of {' or '.join(kinds)}"
                        )
                limit = end if self._rest else min(end, first_end)
                if (left := limit - time.monotonic()) <= 0:
                    waited = seconds if self._rest or first is None else min(first, seconds)
                    raise TimeoutError(f"the peer sent no message {' or '.join(kinds)} within {waited:g} s")
                self._socket.settimeout(left)
                try:
                    chunk = self._socket.recv(65536)
                except TimeoutError:
                    continue
                if not chunk:
                    raise ConnectionError("the connection was closed")
                self.received_at = time.monotonic()
                self._rest += self._cover.opened(chunk)
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._hang_up()
        self._socket.close()

    def _hang_up(self) -> None:
        """Shut the socket down, so that readers notice the end of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _whole(self) -> Iterator[Message]:
        head = _HEAD.size + _PROOF
        while len(self._rest) >= head:
            (length,) = _HEAD.unpack_from(self._rest)
            if length >> 24 == _TLS:
                raise ProtocolError(f"{self.peer} was not admitted: it uses TLS, but this job does not")
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message must have at most {MAX_MESSAGE} bytes, but the peer sent {length}")
            if len(self._rest) < head + length:
                return
            proof, body = bytes(self._rest[_HEAD.size : head]), bytes(self._rest[head : head + length])
            del self._rest[: head + length]
            if not hmac.compare_digest(proof, self._proof(self._keys[1], self._received, body)):
                raise ProtocolError("a message has no valid authentication code")
            self._received += 1
            yield checked(body)

    def _proof(self, key: bytes, number: int, body: bytes) -> bytes:
        """Return an HMAC of a message and its number, against replays; zeros as long as there is no key."""
        return bytes(_PROOF) if not key else hmac.new(key, struct.pack("!Q", number) + body, hashlib.sha256).digest()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS) and self.send("beat"):
            pass


def checked(body: bytes) -> Message:
    """Return the message in `body`; raise ProtocolError unless it has exactly the fields of its kind in `SHAPES`.

    >>> checked(b'{"kind": "start", "slot": "1", "rendezvous": {}}')
    Traceback (most recent call last):
    manyhands.launcher.joining.channel.ProtocolError: the field slot of the message start has the type str
    """
    try:
        message = json.loads(body)
        kind = message.pop("kind")
        shape = SHAPES[kind]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ProtocolError("the peer sent a message of an unknown kind") from None
    if set(message) != set(shape):
        raise ProtocolError(f"the message {kind} has unexpected fields: {repr(sorted(message))[:100]}")
    for name, kinds in shape.items():
        value = message[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
            raise ProtocolError(f"the field {name} of the message {kind} has the type {type(value).__name__}")
        if name in _HEX_FIELDS and not _HEX.fullmatch(str(value)):
            raise ProtocolError(f"the field {name} of the message {kind} is not a hexadecimal number")
    return {"kind": kind, **message}


def _written(message: Message) -> bytes:
    """Return an encoded message; if it is too long, the middle of long texts is omitted."""
    body = json.dumps(message, default=str).encode()
    if len(body) > MAX_MESSAGE:
        body = json.dumps(_truncated(message), default=str).encode()
    if len(body) > MAX_MESSAGE:
        raise RunError(
            f"a message between hosts must have at most {MAX_MESSAGE} bytes, but {message['kind']} has {len(body)}"
        )
    return body


def _truncated(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _truncated(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_truncated(one) for one in value]
    if isinstance(value, str) and len(value) > MAX_TEXT:
        half = MAX_TEXT // 2
        return f"{value[:half]} … {len(value) - 2 * half} characters … {value[-half:]}"
    return value
