"""Limits on HTTP/2 frames that apply from the first byte of a connection, before gRPC reads any of it.

gRPC limits headers and streams only after the client has acknowledged its settings, and decodes every header of a block
that is too large. One byte of a block can encode a whole header, so 16 kB took 2 MB and 14 ms without a token.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .limits import Limits

DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 0, 1, 3, 4, 7, 9
END_HEADERS, PADDED, PRIORITY, ACK = 4, 8, 32, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = 9
"""Bytes of a frame's head."""
ACKNOWLEDGED = bytes((0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0))
"""The frame that acknowledges settings."""
PROTOCOL_ERROR, ENHANCE_YOUR_CALM = 1, 11
MAX_CONTROL = 1 << 10
"""Maximum bytes of a frame that is neither DATA nor part of a header block; the longest usual ones have 50."""
MAX_BLOCK_FRAMES = 8
"""Maximum frames of a header block."""
OWN_HEADERS = 16
"""Headers that gRPC itself adds to a call, beyond the limit for the caller's."""
CREDIT, CREDIT_PER_SECOND, MAX_CREDIT = 1024.0, 200.0, 8192.0
"""What the frames of a client may cost: at the start, by time, and at most. A frame costs 1, a header block of a client
without an answered call 8 and 1 for each header. About 60 calls can wait for the first answer at a time."""
CALL_CREDIT = 4
"""Credit for the call of a client whose calls are answered; one that is reset costs more than that."""
SMALL_DATA = 256
"""Bytes of a DATA frame that costs as much as any other frame while no call is answered."""


class FrameRefused(Exception):
    """Raised for a frame after which a connection is closed.

    Attributes:
        code: The HTTP/2 error code.
        reason: The text for the client.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason

    def frame(self) -> bytes:
        """Return the GOAWAY frame that reports the error to the client."""
        payload = struct.pack(">II", (1 << 31) - 1, self.code) + self.reason.encode()
        return struct.pack(">I", len(payload))[1:] + bytes((GOAWAY, 0, 0, 0, 0, 0)) + payload


class ClientFrames:
    """Check what a client sends and return what may be forwarded to gRPC.

    The settings of gRPC are acknowledged on behalf of the client right after the client's own settings, and its first
    acknowledgement is dropped, so that gRPC's limits apply to the first call already. Header blocks are forwarded when
    they are complete.

    Args:
        limits: `head` and `headers` limit a header block.
        now: Returns the time in seconds.
    """

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self._max_block, self._max_headers = 2 * limits.head, limits.headers + OWN_HEADERS
        self._now, self._time, self._credit = now, now(), CREDIT
        self._rest = b""
        """An incomplete preface, frame or header block."""
        self._skip = 0
        """Bytes of a DATA frame that are still to come."""
        self._has_preface = self._has_settings = False
        self.is_waiting = False
        """Whether frames are held back because the client has sent too many."""
        self.has_acknowledged = False
        """Whether the client has acknowledged the server's settings."""
        self.has_answer = False
        """Whether a call of this connection was answered with a message, so that its token was valid."""

    def take(self, data: bytes) -> bytes:
        """Return the bytes that may be forwarded; raises FrameRefused if the connection must be closed.

        While `is_waiting`, pass no more data, and call it with b"" from time to time.
        """
        self.is_waiting = False
        if self._skip:
            if self._skip >= len(data):
                self._skip -= len(data)
                return data
        elif self._rest:
            data, self._rest = self._rest + data, b""
        at, self._skip = self._skip, 0
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[: len(data)]:
                raise FrameRefused(PROTOCOL_ERROR, "the connection must start with the preface of HTTP/2")
            if len(data) < len(PREFACE):
                self._rest = data
                return b""
            self._has_preface, at = True, len(PREFACE)
        return self._take_frames(data, at)

    def take_answer(self, num: int) -> None:
        """Let a client whose calls are answered send more frames; `num` bytes were sent to it."""
        self._credit = min(MAX_CREDIT, self._credit + 2 + (num >> 10))

    def _take_frames(self, data: bytes, at: int) -> bytes:
        pieces: list[bytes] = []
        start, end = 0, len(data)
        while at + HEAD <= end:
            size, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
            after = at + HEAD + size
            if kind == DATA and self._has_settings:
                if size < SMALL_DATA and not (self.has_answer and size) and not self._can_pay(1):
                    break
                at = after
            elif kind == HEADERS and self._has_settings:
                after = self._block_end(data, at)
                if not after:
                    break
                at = after
            elif size > MAX_CONTROL or kind == CONTINUATION or (not self._has_settings and kind != SETTINGS):
                raise FrameRefused(PROTOCOL_ERROR, f"a frame of kind {kind} and {size} bytes is not allowed here")
            elif after > end or not self._can_pay(CALL_CREDIT + 1 if kind == RST_STREAM else 1):
                break
            else:
                if kind == SETTINGS and not self._has_settings:
                    self._has_settings = True
                    pieces += [data[start:after], ACKNOWLEDGED]
                    start = after
                elif kind == SETTINGS and data[at + 4] & ACK and not self.has_acknowledged:
                    self.has_acknowledged = True
                    pieces.append(data[start:at])
                    start = after
                at = after
        if at > end:
            self._skip = at - end
        elif at < end:
            self._rest = data[at:]
        last = data if not start and at >= end else data[start:at]
        return b"".join((*pieces, last)) if pieces else last

    def _block_end(self, data: bytes, first: int) -> int:
        """Check the header block that starts at a HEADERS frame and return its end; 0 if it is incomplete."""
        fragments: list[bytes] = []
        at, num_bytes = first, 0
        while True:
            num_bytes += int.from_bytes(data[at : at + 3], "big")
            if num_bytes > self._max_block or len(fragments) == MAX_BLOCK_FRAMES:
                raise FrameRefused(
                    ENHANCE_YOUR_CALM, f"the headers of a call may have {self._max_block} bytes in few frames"
                )
            start = at + HEAD
            after = start + int.from_bytes(data[at : at + 3], "big")
            if after > len(data):
                return 0
            fragments.append(data[start:after] if at != first else _fragment(data[start:after], data[at + 4]))
            if data[at + 4] & END_HEADERS:
                break
            if after + HEAD > len(data):
                return 0
            if data[after + 3] != CONTINUATION or data[after + 5 : after + 9] != data[first + 5 : first + 9]:
                raise FrameRefused(PROTOCOL_ERROR, "a header block must be complete before another frame")
            at = after
        num = num_headers(fragments[0] if len(fragments) == 1 else b"".join(fragments), self._max_headers)
        if num > self._max_headers:
            raise FrameRefused(ENHANCE_YOUR_CALM, f"a call may have {self._max_headers} headers, but has more")
        if self.has_answer:
            self._credit = min(MAX_CREDIT, self._credit + CALL_CREDIT)
        elif not self._can_pay(8 + num):
            return 0
        return after

    def _can_pay(self, cost: int) -> bool:
        if self._credit < cost:
            now = self._now()
            self._credit = min(CREDIT, self._credit + CREDIT_PER_SECOND * (now - self._time))
            self._time = now
            self.is_waiting = self._credit < cost
        if not self.is_waiting:
            self._credit -= cost
        return not self.is_waiting


class ServerFrames:
    """Find out in what gRPC sends to a client whether a call was answered with a message."""

    def __init__(self) -> None:
        self._rest, self._skip = b"", 0

    def has_message(self, data: bytes) -> bool:
        """Take the next bytes; return whether they start a DATA frame with content."""
        if self._skip >= len(data):
            self._skip -= len(data)
            return False
        data, at = self._rest + data, self._skip
        while at + HEAD <= len(data):
            size = int.from_bytes(data[at : at + 3], "big")
            if data[at + 3] == DATA and size:
                return True
            at += HEAD + size
        self._rest, self._skip = data[at:], max(0, at - len(data))
        return False


def _fragment(payload: bytes, flags: int) -> bytes:
    """Return the part of a header block in a HEADERS frame, without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - payload[0] if payload else -1
    if flags & PRIORITY:
        start += 5
    if start > end:
        raise FrameRefused(PROTOCOL_ERROR, "a HEADERS frame is shorter than its padding")
    return payload[start:end]


def num_headers(block: bytes, most: int) -> int:
    """Count the headers of a block in HPACK without decoding them; stop after `most` and one more.

    Raises FrameRefused if a header is incomplete.

    >>> num_headers(bytes([0x82, 0x40, 1, 120, 1, 121, 0xBE]), 100)
    3
    """
    at, num, end = 0, 0, len(block)
    while at < end and num <= most:
        num += 1
        first = block[at]
        if first & 0x80:
            at = at + 1 if first != 0xFF else _integer(block, at, 0x7F)[1]
            continue
        if first & 0xE0 == 0x20:
            at = _integer(block, at, 0x1F)[1]
            continue
        name, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
        if not name:
            size, at = _integer(block, at, 0x7F)
            at += size
        size, at = _integer(block, at, 0x7F)
        at += size
    if at > end:
        raise FrameRefused(PROTOCOL_ERROR, "a header is incomplete")
    return num


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return an integer of HPACK and the position after it."""
    if at >= len(block):
        raise FrameRefused(PROTOCOL_ERROR, "a header is incomplete")
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise FrameRefused(PROTOCOL_ERROR, "a header has a number that is too long")
