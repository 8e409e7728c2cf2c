"""The channel between two hosts: JSON messages of known shape and size, each with a proof that it is the other's."""

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
"""Characters of a text that is cut, because the whole message would be too long."""
BEAT_SECONDS = 0.5
_HEAD = struct.Struct("!I")
_PROOF = hashlib.sha256().digest_size
_TLS = 22
"""The first byte of whoever begins with TLS; a message that long is none of ours."""
_HEX = re.compile("[0-9a-f]{0,64}")
_HEX_FIELDS = ("nonce", "proof", "again")

SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    # while joining
    "hello": {"nonce": str},
    "join": {"nonce": str, "facts": dict, "proof": str, "again": str},
    "welcome": {"proof": str},
    "refused": {"code": str, "reason": str},
    # from the host that conducts
    "probe": {"ways": list, "key": str},
    "begin": {"devices": list},
    "agreed": {"value": str},
    "start": {"slot": int, "summons": dict},
    "tell": {"slot": int, "message": dict},
    "kill": {"slot": (int, type(None))},
    "over": {"reason": str},
    # from the others
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
"""Every message by its kind: exactly these fields, of these types."""


class ProtocolError(RunError):
    """The other side said something that nobody of ours would say."""


@dataclass(frozen=True)
class JoinTimeouts:
    """How long another host may take: all from a job's one time limit, and never longer than a person would wait."""

    timeout: float

    @property
    def silence(self) -> float:
        """Without a word from it, or without its taking one."""
        return min(4.0, self.timeout / 10)

    @property
    def answer(self) -> float:
        """For an answer while it joins."""
        return min(10.0, self.timeout / 4)

    @property
    def connection(self) -> float:
        """Until a connection to it is made."""
        return min(2.0, self.timeout / 10)


class Bare:
    """What lies over the bytes of a connection: nothing."""

    binding: tuple[str, ...] = ()
    """What only this connection has; proofs of the token cover it."""

    def wrapped(self, data: bytes) -> bytes:
        """Bytes as they are sent."""
        return data

    def opened(self, data: bytes) -> bytes:
        """What bytes that have come say."""
        return data


class Channel:
    """One end of a connection. Sending is safe from any thread; a thread of its own says that we are alive."""

    def __init__(self, sock: socket.socket, limits: JoinTimeouts, cover: Bare | None = None) -> None:
        self._socket, self.limits, self._cover = sock, limits, cover or Bare()
        self.binding = self._cover.binding
        self.peer = str(sock.getpeername()[0])
        """The other side's address, also when it is gone."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(limits.silence, 1)
        # Whoever sends must not wait for ever for a host that is frozen and reads nothing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        sock.settimeout(None)
        self._sending = threading.Lock()
        self._keys: tuple[bytes, bytes] = b"", b""
        self._sent = self._received = 0
        self._rest = bytearray()
        self._closed = threading.Event()
        self.heard_at = time.monotonic()
        """When the other side last said something."""

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def seal(self, ours: bytes, theirs: bytes) -> None:
        """From now on every message has a proof, made with a key that only these two hosts know."""
        self._keys = ours, theirs

    def start_beating(self) -> None:
        """Begins to tell the other side regularly that this one is alive."""
        threading.Thread(target=self._beat, name="manyhands-beat", daemon=True).start()

    def send(self, kind: str, **values: Any) -> bool:
        """Sends a message; False when the other side is gone, or takes nothing: then the connection is over."""
        body = _written({"kind": kind, **values})
        with self._sending:
            frame = _HEAD.pack(len(body)) + self._proof(self._keys[0], self._sent, body) + body
            self._sent += 1
            try:
                self._socket.sendall(self._cover.wrapped(frame))
            except OSError:
                # Part of a message may be out, so that nothing behind it would be understood.
                self._hang_up()
                return False
        return True

    def receive(self) -> Iterator[Message]:
        """The messages that have arrived; raises ConnectionError when there will be no more."""
        chunk = self._socket.recv(65536)
        if not chunk:
            raise ConnectionError("the connection was closed")
        self.heard_at = time.monotonic()
        self._rest += self._cover.opened(chunk)
        yield from self._whole()

    def wait_for(self, *kinds: str, seconds: float, first: float | None = None) -> Message:
        """The next message, which must be one of these kinds and come in time.

        Args:
            kinds: What it may be.
            seconds: When all of it must be here.
            first: When its first byte must be here, if that is sooner.
        """
        end = time.monotonic() + seconds
        first_end = end if first is None else time.monotonic() + first
        try:
            while True:
                for message in self._whole():
                    if message["kind"] in kinds:
                        return message
                    if message["kind"] != "beat":
                        raise ProtocolError(f"{message['kind']} instead of {' or '.join(kinds)}")
                limit = end if self._rest else min(end, first_end)
                if (left := limit - time.monotonic()) <= 0:
                    waited = seconds if self._rest or first is None else min(first, seconds)
                    raise TimeoutError(f"no {' or '.join(kinds)} within {waited:g} s")
                self._socket.settimeout(left)
                try:
                    chunk = self._socket.recv(65536)
                except TimeoutError:
                    continue
                if not chunk:
                    raise ConnectionError("the connection was closed")
                self.heard_at = time.monotonic()
                self._rest += self._cover.opened(chunk)
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def close(self) -> None:
        """Ends the connection."""
        self._closed.set()
        self._hang_up()
        self._socket.close()

    def _hang_up(self) -> None:
        """Whoever reads here hears that it is over."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _whole(self) -> Iterator[Message]:
        head = _HEAD.size + _PROOF
        while len(self._rest) >= head:
            (length,) = _HEAD.unpack_from(self._rest)
            if length >> 24 == _TLS:
                raise ProtocolError(f"{self.peer} was not taken in: it uses TLS, and this job does not")
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message of {length} bytes; {MAX_MESSAGE} are allowed")
            if len(self._rest) < head + length:
                return
            proof, body = bytes(self._rest[_HEAD.size : head]), bytes(self._rest[head : head + length])
            del self._rest[: head + length]
            if not hmac.compare_digest(proof, self._proof(self._keys[1], self._received, body)):
                raise ProtocolError("a message that is not the other host's")
            self._received += 1
            yield checked(body)

    def _proof(self, key: bytes, number: int, body: bytes) -> bytes:
        """Nothing before the keys are known; then of the message and its number, so that none is taken twice."""
        return bytes(_PROOF) if not key else hmac.new(key, struct.pack("!Q", number) + body, hashlib.sha256).digest()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS) and self.send("beat"):
            pass


def checked(body: bytes) -> Message:
    """A message of a known shape.

    >>> checked(b'{"kind": "start", "slot": "1", "summons": {}}')
    Traceback (most recent call last):
    manyhands.launcher.joining.channel.ProtocolError: start with slot of type str
    """
    try:
        message = json.loads(body)
        kind = message.pop("kind")
        shape = SHAPES[kind]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ProtocolError("a message of no known kind") from None
    if set(message) != set(shape):
        raise ProtocolError(f"{kind} with the fields {repr(sorted(message))[:100]}")
    for name, kinds in shape.items():
        value = message[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
            raise ProtocolError(f"{kind} with {name} of type {type(value).__name__}")
        if name in _HEX_FIELDS and not _HEX.fullmatch(str(value)):
            raise ProtocolError(f"{kind} with a {name} that is no number")
    return {"kind": kind, **message}


def _written(message: Message) -> bytes:
    """A message as it is sent; of one that is too long, long texts lose their middle."""
    body = json.dumps(message, default=str).encode()
    if len(body) > MAX_MESSAGE:
        body = json.dumps(_cut(message), default=str).encode()
    if len(body) > MAX_MESSAGE:
        raise RunError(f"a message between hosts ({message['kind']}) has {len(body)} bytes; {MAX_MESSAGE} are allowed")
    return body


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(one) for one in value]
    if isinstance(value, str) and len(value) > MAX_TEXT:
        half = MAX_TEXT // 2
        return f"{value[:half]} … {len(value) - 2 * half} characters … {value[-half:]}"
    return value
