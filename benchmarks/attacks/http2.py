"""A small HTTP/2 client that sends gRPC messages byte by byte, obeys flow control, and never finishes unless told."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW, MAX_FRAME = 65535, 16384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame as it is sent."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK, neither indexed nor compressed."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    rest, found = len(text) - 127, [127]
    while rest >= 128:
        found.append(rest % 128 + 128)
        rest //= 128
    return bytes([*found, rest])


@dataclass
class Stream:
    """One call: what it may still send, and what came back."""

    window: int
    sent: int = 0
    is_closed: bool = False
    answer: bytes = b""
    """The payloads of all HEADERS frames; the texts of literals can be found in them."""


@dataclass
class Http2:
    """A connection to a gRPC server."""

    host: str
    port: int
    streams: dict[int, Stream] = field(default_factory=dict)
    is_closed: bool = False
    goaway: bytes = b""

    def __post_init__(self) -> None:
        self.socket = socket.create_connection((self.host, self.port), 5)
        self._window, self._initial, self._rest = INITIAL_WINDOW, INITIAL_WINDOW, b""
        self.send(PREFACE + frame(SETTINGS, 0, 0, b""))

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes as they are; a connection that the server has closed is only marked so."""
        try:
            self.socket.settimeout(5)
            self.socket.sendall(data)
        except OSError:
            self.is_closed = True

    def call(self, path: str, headers: dict[str, str] | None = None, *, is_over: bool = False) -> int:
        """Send the headers of a call and return its stream."""
        number = 2 * len(self.streams) + 1
        first = {":method": "POST", ":scheme": "http", ":path": path, ":authority": f"{self.host}:{self.port}"}
        all_ = {**first, "content-type": "application/grpc", "te": "trailers", **(headers or {})}
        block = b"".join(literal(name.encode(), value.encode()) for name, value in all_.items())
        self.streams[number] = Stream(self._initial)
        pieces = [block[start : start + MAX_FRAME] for start in range(0, len(block), MAX_FRAME)]
        flags = [END_HEADERS if piece is pieces[-1] else 0 for piece in pieces]
        first_flags = flags[0] | (END_STREAM if is_over else 0)
        self.send(frame(HEADERS, first_flags, number, pieces[0]))
        for piece, flag in zip(pieces[1:], flags[1:], strict=True):
            self.send(frame(CONTINUATION, flag, number, piece))
        return number

    def send_data(self, number: int, data: bytes, *, is_over: bool = False) -> int:
        """Send as much of some data as the server's windows allow, and return how much that was."""
        stream = self.streams[number]
        num = max(0, min(len(data), stream.window, self._window, MAX_FRAME))
        if num or not data:
            self.send(frame(DATA, END_STREAM if is_over and num == len(data) else 0, number, data[:num]))
        stream.window -= num
        stream.sent += num
        self._window -= num
        return num

    def read(self, seconds: float) -> None:
        """Take what the server sends for so long."""
        until = time.monotonic() + seconds
        while not self.is_closed and (left := until - time.monotonic()) > 0:
            self.socket.settimeout(max(left, 0.001))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return
            except OSError:
                data = b""
            self.is_closed = not data
            self._rest += data
            self._take_frames()

    def _take_frames(self) -> None:
        while len(self._rest) >= 9:
            size = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + size:
                return
            kind, flags, number = self._rest[3], self._rest[4], int.from_bytes(self._rest[5:9], "big")
            payload, self._rest = self._rest[9 : 9 + size], self._rest[9 + size :]
            self._take(kind, flags, number, payload)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._set(payload)
            self.send(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.goaway = payload[8:]
        elif kind == WINDOW_UPDATE and number == 0:
            self._window += int.from_bytes(payload, "big")
        elif number in self.streams:
            self._take_stream(self.streams[number], kind, flags, payload)

    def _take_stream(self, stream: Stream, kind: int, flags: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            stream.window += int.from_bytes(payload, "big")
        elif kind == HEADERS:
            stream.answer += payload
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            stream.is_closed = True

    def _set(self, payload: bytes) -> None:
        for start in range(0, len(payload), 6):
            name, value = struct.unpack(">HI", payload[start : start + 6])
            if name == 4:
                for stream in self.streams.values():
                    stream.window += value - self._initial
                self._initial = value
