"""The control channel between a rank and its coordinator: the rank sends events, the coordinator sends messages."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..core import Event

_HEAD = struct.Struct("!cI")
EVENT, CONTROL, RESULT, FAILURE, MESSAGE, CALL, ANSWER = b"E", b"C", b"R", b"F", b"M", b"Q", b"A"
"""Kinds of frames. With a result, a failure, a call and an answer, a file descriptor of a pickle is sent."""
MAX_FRAME = 64 * 1024 * 1024


class ControlChannel(ABC):
    """The connection between a rank and its coordinator: events in one direction, messages in the other."""

    recovers = False
    """Whether the ranks join again (a new rendezvous) after one of them has failed."""

    is_watched = False
    """Whether a coordinator is connected that can ask all ranks for their stacks."""

    def __init__(self) -> None:
        self.report_stack: Callable[[], Event] | None = None
        """Function that returns an event with this rank's stack and operation; called on the channel's thread."""
        self.checks_stop = False
        """Whether the training loop checks the stop flag, as the loops of manyhands do after every step."""
        self._stopping = False
        self.lost = ""
        """A description of the failed peer, once the coordinator has sent it."""
        self.taps: list[Callable[[Event], None]] = []
        """Functions that this process calls with every event before it sends the event."""
        self._lost_generation = -1
        self._rendezvous: dict[str, Any] = {}
        self._is_closed = False
        self._changed = threading.Condition()
        self._on_lost: tuple[int, Callable[[], None]] = 0, lambda: None

    @property
    def stopping(self) -> bool:
        """Whether the user asked to stop; the training loop then ends after the same step on all replicas."""
        self.checks_stop = True
        return self._stopping

    @stopping.setter
    def stopping(self, stopping: bool) -> None:
        self._stopping = stopping

    def report(self, entry: Event) -> None:
        """Send an event to the coordinator, after passing it to `taps`."""
        for tap in self.taps:
            tap(entry)
        self.send_up(entry)

    @abstractmethod
    def send_up(self, entry: Event) -> None:
        """Send an event to the coordinator."""

    def report_peer_failure(self, generation: int, reason: str, step: int) -> None:
        """Report to the coordinator that this rank's connections to other ranks broke, for `reason`, at step `step`.

        All processes may be alive, for example after a network failure.
        """
        raise NotImplementedError("there is no coordinator that could restart the ranks")

    def on_lost(self, generation: int, act: Callable[[], None]) -> None:
        """Call `act`, on the channel's thread, as soon as the coordinator reports that the generation has ended."""
        with self._changed:
            self._on_lost = generation, act
        if self.has_lost(generation):
            act()

    def has_lost(self, generation: int) -> bool:
        """Return whether the coordinator has reported that the world of this generation has ended."""
        return self._lost_generation >= generation

    def wait_for_failure(self, generation: int, seconds: float) -> str:
        """Wait at most `seconds` for the description of the failed peer, and return it; "" if none arrives.

        A rank notices a broken connection before the coordinator knows the cause.
        """
        with self._changed:
            is_known = self._changed.wait_for(lambda: self.has_lost(generation) or self._is_closed, seconds)
        return self.lost if is_known else ""

    def wait_for_rendezvous(self, generation: int) -> dict[str, Any] | None:
        """Wait for the message by which ranks join a generation after this one; return None if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._rendezvous.get("generation", -1) > generation or self._is_closed)
            return None if self._is_closed else self._rendezvous

    def handle_message(self, message: dict[str, Any]) -> None:
        """Handle a message from the coordinator."""
        if message.get("stop"):
            self.stopping = True
        if message.get("stacks") and self.report_stack is not None:
            self.send_up({**self.report_stack(), "listens": self.checks_stop})
        with self._changed:
            self._rendezvous = message.get("rendezvous", self._rendezvous)
            self._is_closed = self._is_closed or bool(message.get("final"))
            if "lost" in message:
                self.lost, self._lost_generation = str(message["lost"]), int(message["generation"])
            generation, act = self._on_lost
            self._changed.notify_all()
        if "lost" in message and self.has_lost(generation):
            act()

    def mark_closed(self) -> None:
        """Mark the channel as closed and wake all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class DirectChannel(ControlChannel):
    """The channel of a rank that runs in the coordinator's own process."""

    def __init__(self, handler: Callable[[Event], None] | None = None) -> None:
        super().__init__()
        self.handler = handler

    def send_up(self, entry: Event) -> None:
        if self.handler is not None:
            self.handler(entry)


class SocketChannel(ControlChannel):
    """The channel of a rank in its own process, over an inherited socket pair."""

    is_watched = True

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._socket = sock
        self.calls: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        """Calls of a service's methods: the number and the file descriptor of the pickle; None after the last call."""
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="manyhands-channel", daemon=True).start()

    def send_up(self, entry: Event) -> None:
        self.send(EVENT, json.dumps(entry, default=str).encode())

    def report_peer_failure(self, generation: int, reason: str, step: int) -> None:
        self.send(CONTROL, json.dumps({"lost_world": generation, "reason": reason, "step": step}).encode())

    def send(self, kind: bytes, body: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send one frame to the coordinator, and the file descriptors of its pickle if it has one."""
        with self._sending:
            send_frame(self._socket, kind, body, fds)

    def close(self) -> None:
        """Shut down the connection; nothing that this process sends afterwards reaches the coordinator."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def handle_message(self, message: dict[str, Any]) -> None:
        super().handle_message(message)
        if self._stopping:
            self.calls.put(None)

    def _listen(self) -> None:
        frames, pickle_fds = FrameReader(), list[int]()
        while True:
            chunk, fds = _receive(self._socket)
            if not chunk:
                break
            pickle_fds += fds
            for kind, body in frames.feed(chunk):
                if kind == CALL:
                    self.calls.put((json.loads(body)["number"], pickle_fds.pop(0)))
                else:
                    self.handle_message(json.loads(body))
        self.calls.put(None)
        self.mark_closed()


class FrameReader:
    """Splits a stream of bytes into frames.

    >>> list(FrameReader().feed(_HEAD.pack(b"E", 2) + b"{}"))
    [(b'E', b'{}')]
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that are complete with this chunk, as (kind, body)."""
        self._rest += chunk
        frames = []
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            if length > MAX_FRAME:
                raise ValueError(f"a frame holds at most {MAX_FRAME} bytes, but got {length}")
            end = _HEAD.size + length
            if len(self._rest) < end:
                break
            frames.append((kind, self._rest[_HEAD.size : end]))
            self._rest = self._rest[end:]
        return frames


def frame(message: dict[str, Any]) -> bytes:
    """Return the encoded frame of a message from the coordinator to a rank."""
    body = json.dumps(message).encode()
    return _HEAD.pack(MESSAGE, len(body)) + body


def send_frame(sock: socket.socket, kind: bytes, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send one frame over a socket pair, and the file descriptors of its pickle if it has one."""
    whole = _HEAD.pack(kind, len(body)) + body
    sent = socket.send_fds(sock, [whole], list(fds)) if fds else 0
    sock.sendall(whole[sent:])


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    try:
        chunk, fds, _, _ = socket.recv_fds(sock, 65536, 1)
        return chunk, fds
    except OSError:
        return b"", []
