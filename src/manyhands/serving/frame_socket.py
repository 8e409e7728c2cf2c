"""Frames over a socket between the server and its gRPC process: a kind, a number, a header and a message."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

HEAD = struct.Struct("<BQII")
"""Of a frame: its kind, the number of its call, and the bytes of its header and of its message."""
NUM_READ = 1 << 16
"""Bytes that are read at a time; a longer frame is read to where it stays."""
OnFrame = Callable[[int, int, bytes, bytes], None]


class FrameError(Exception):
    """Raised for a frame that the process never sends unless it is broken or compromised."""


class FrameSocket(asyncio.BufferedProtocol):
    """One end of the socket between the server and the process: reads and writes frames.

    Args:
        on_frame: Called with every frame; raises FrameError to end the connection.
        on_end: Called when the connection has ended.
        most: Maximum bytes of a frame's header and of its message; None on the side that trusts the other one.
    """

    def __init__(self, on_frame: OnFrame, on_end: Callable[[], None], most: tuple[int, int] | None = None) -> None:
        self._on_frame, self._on_end, self._most = on_frame, on_end, most
        self._transport: Any = None
        self._buffer, self._num = memoryview(bytearray(NUM_READ)), 0
        self._long: tuple[bytearray, int, tuple[int, int, int]] | None = None
        """A frame that does not fit the buffer: its bytes, how many have come, and its kind, number and header size."""

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        on_frame: OnFrame,
        on_end: Callable[[], None],
        most: tuple[int, int] | None = None,
    ) -> FrameSocket:
        """Read and write frames on a connected socket."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, frames = await loop.create_unix_connection(lambda: cls(on_frame, on_end, most), sock=sock)
        return frames

    def send(self, kind: int, number: int, head: bytes = b"", message: bytes = b"") -> None:
        """Send a frame; do nothing if the peer has closed the connection."""
        if not self._transport.is_closing():
            start = HEAD.pack(kind, number, len(head), len(message)) + head
            if len(message) < NUM_READ:
                self._transport.write(start + message)
            else:
                self._transport.writelines([start, message])

    @property
    def num_unsent(self) -> int:
        """Number of bytes that wait until the other side reads."""
        return int(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._long is not None:
            data, num, _ = self._long
            return memoryview(data)[num:]
        return self._buffer[self._num :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._long is None:
            self._num += nbytes
            self._take()
            return
        data, num, first = self._long
        num += nbytes
        self._long = (data, num, first) if num < len(data) else None
        if self._long is None:
            self._give(data, *first)

    def _take(self) -> None:
        start = 0
        while self._num - start >= HEAD.size and not self._transport.is_closing():
            kind, number, num_head, num_message = HEAD.unpack_from(self._buffer, start)
            if self._most is not None and (num_head > self._most[0] or num_message > self._most[1]):
                self._end_broken(f"a frame of {num_head} and {num_message} bytes")
                return
            size, begin = num_head + num_message, start + HEAD.size
            if begin + size <= self._num:
                start = begin + size
                self._give(self._buffer[begin:start], kind, number, num_head)
            elif HEAD.size + size > NUM_READ // 2:
                data, num = bytearray(size), self._num - begin
                data[:num] = self._buffer[begin : self._num]
                self._long, start = (data, num, (kind, number, num_head)), self._num
            else:
                break
        rest = bytes(self._buffer[start : self._num])
        self._num = len(rest)
        self._buffer[: self._num] = rest

    def _give(self, data: bytearray | memoryview, kind: int, number: int, num_head: int) -> None:
        view = memoryview(data)
        try:
            self._on_frame(kind, number, bytes(view[:num_head]), bytes(view[num_head:]))
        except FrameError as error:
            self._end_broken(str(error))

    def _end_broken(self, what: str) -> None:
        """Close the connection after an invalid frame, and report it."""
        self._num = 0
        self._transport.abort()
        text = f"the gRPC process sent {what}, and is restarted"
        asyncio.get_running_loop().call_exception_handler({"message": text})
