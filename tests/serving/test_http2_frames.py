"""Limits of HTTP/2 frames in front of gRPC, without sockets."""

from __future__ import annotations

import pytest
from benchmarks.attacks.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    literal,
)

from manyhands.serving.http2_frames import (
    ACKNOWLEDGED,
    CREDIT,
    MAX_CREDIT,
    ClientFrames,
    FrameRefused,
    ServerFrames,
    num_headers,
)
from manyhands.serving.limits import Limits

OPENING = PREFACE + frame(SETTINGS, 0, 0, bytes(6))
CLIENT_ACK = frame(SETTINGS, ACK, 0, b"")
BLOCK = b"".join(literal(name, b"y" * 20) for name in (b":path", b"authorization", b"x"))
CALL = frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 1, 1, bytes(500))


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock | None = None, limits: Limits | None = None) -> ClientFrames:
    """Return a connection after both sides' settings."""
    frames = ClientFrames(limits or Limits(), clock or Clock())
    assert frames.take(OPENING + CLIENT_ACK) == OPENING + ACKNOWLEDGED
    return frames


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_frames_in_any_pieces_are_forwarded_and_settings_acknowledged_once(size: int) -> None:
    frames = ClientFrames(Limits(), Clock())
    sent = OPENING + CALL + CLIENT_ACK + CALL + CLIENT_ACK + frame(PING, 0, 0, bytes(8)) + CALL
    got = b"".join(frames.take(sent[start : start + size]) for start in range(0, len(sent), size))
    assert got == OPENING + ACKNOWLEDGED + CALL + CALL + CLIENT_ACK + frame(PING, 0, 0, bytes(8)) + CALL
    assert frames.has_acknowledged


def test_client_without_acknowledgement_is_noticed() -> None:
    frames = ClientFrames(Limits(), Clock())
    assert frames.take(OPENING + CALL) == OPENING + ACKNOWLEDGED + CALL
    assert not frames.has_acknowledged


def test_header_block_is_held_until_it_is_complete() -> None:
    frames = opened()
    first, last = frame(HEADERS, 0, 1, BLOCK[:10]), frame(CONTINUATION, END_HEADERS, 1, BLOCK[10:])
    assert frames.take(first) == b""
    assert frames.take(last) == first + last


def test_padding_and_priority_are_no_headers() -> None:
    payload = bytes([200]) + bytes(5) + BLOCK + bytes(200)
    sent = frame(HEADERS, END_HEADERS | 0x8 | 0x20, 1, payload)
    assert opened(limits=Limits(headers=1)).take(sent) == sent


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(HEADERS, END_HEADERS, 1, b"\x82" * 16384), "may have 116 headers"),
        (frame(HEADERS, END_HEADERS, 1, b"\x20" * 200), "may have 116 headers"),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 20, "in few frames"),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(16384)) * 5, "may have 65536 bytes"),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, END_HEADERS, 3, b""), "complete before another frame"),
        (frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, b""), "complete before another frame"),
        (frame(CONTINUATION, END_HEADERS, 1, b""), "not allowed here"),
        (frame(SETTINGS, 0, 0, bytes(6000)), "not allowed here"),
        (frame(HEADERS, END_HEADERS, 1, b"\x40\x7f\xff\xff\xff\xff\xff\xff"), "too long"),
        (frame(HEADERS, END_HEADERS, 1, b"\x40\x7f\xff\xff\x7f"), "incomplete"),
        (frame(HEADERS, END_HEADERS | 0x8, 1, b"\xff\x82"), "shorter than its padding"),
        (frame(HEADERS, END_HEADERS | 0x8, 1, b""), "shorter than its padding"),
    ],
)
def test_hostile_frames_close_the_connection_with_a_reason(sent: bytes, reason: str) -> None:
    frames = opened()
    with pytest.raises(FrameRefused, match=reason) as caught:
        frames.take(sent)
    assert caught.value.reason.encode() in caught.value.frame()


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", PREFACE + CALL, PREFACE + frame(PING, 0, 0, bytes(8)), PREFACE[:10] + b"x"]
)
def test_connection_must_start_with_preface_and_settings(sent: bytes) -> None:
    with pytest.raises(FrameRefused):
        ClientFrames(Limits(), Clock()).take(sent)


@pytest.mark.parametrize("kind", ["ping", "call", "data"])
def test_floods_are_held_back_until_time_has_passed(kind: str) -> None:
    clock = Clock()
    frames = opened(clock)
    unit = {"ping": frame(PING, 0, 0, bytes(8)), "call": CALL[: 9 + len(BLOCK)], "data": frame(DATA, 0, 1, b"")}[kind]
    num = len(frames.take(unit * 3000)) // len(unit)
    assert frames.is_waiting
    assert 0 < num <= CREDIT
    assert frames.take(b"") == b""
    clock.now = 1.0
    more = frames.take(b"")
    assert 0 < len(more) // len(unit) <= 201
    assert more == unit * (len(more) // len(unit))


def test_client_with_an_answered_call_is_not_held_back() -> None:
    frames = opened()
    frames.take(CALL * 2000)
    assert frames.is_waiting
    frames.has_answer = True
    rest = frames.take(b"")
    assert len(rest) > 1000 * len(CALL)
    assert not frames.is_waiting
    window = frame(8, 0, 0, bytes(4))
    for _ in range(5000):
        frames.take_answer(100)
        assert frames.take(CALL + window) == CALL + window


def test_message_in_an_answer_is_found_in_any_pieces() -> None:
    before = frame(SETTINGS, 0, 0, bytes(12)) + frame(HEADERS, END_HEADERS, 1, bytes(300))
    for size in (1, 3, 10, 1000):
        answers = ServerFrames()
        assert not any(answers.has_message(before[start : start + size]) for start in range(0, len(before), size))
        after = frame(DATA, 0, 1, b"abc")
        assert any(answers.has_message(after[start : start + size]) for start in range(0, len(after), size))


def test_headers_are_counted_without_decoding() -> None:
    block = b"\x82\xff\x05\x20" + literal(b"a" * 200, b"b" * 300) + b"\x40\x01x\x01y\x7f\x00\x01z"
    assert num_headers(block, 100) == 6


def test_calls_that_are_reset_at_once_are_held_back_also_after_an_answer() -> None:
    """A reset takes nine bytes, and the server has to begin and to end a call for it (rapid reset)."""
    frames = opened()
    frames.has_answer = True
    unit = CALL[: 9 + len(BLOCK)] + frame(RST_STREAM, 0, 1, bytes(4))
    assert len(frames.take(unit * 20_000)) < len(unit) * MAX_CREDIT
    assert frames.is_waiting
    # Clients that cancel every second call are not held back.
    frames = opened()
    frames.has_answer = True
    for _ in range(20_000):
        assert frames.take(CALL + unit) == CALL + unit
        frames.take_answer(100)
