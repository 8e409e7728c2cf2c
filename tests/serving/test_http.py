"""The HTTP listener without a model: responses to clients of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import os
import socket
import time
import tracemalloc
import weakref
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from manyhands.core import RequestRefused, SettingsError
from manyhands.serving.http import BadRequest, Request
from manyhands.serving.http_connection import _MAX_DIRECT, Connection
from manyhands.serving.http_entrance import NUM_READ
from manyhands.serving.http_listener import HttpListener
from manyhands.serving.limits import Limits

Talk = Callable[[int], Awaitable[Any]]


def serve(
    talk: Talk,
    handler: Callable[[Request], None] | None = None,
    listening: list[HttpListener] | None = None,
    **limits: Any,
) -> tuple[Any, HttpListener]:
    """Runs a client's side against a listener that answers with the body, or as the handler says."""

    def echo(request: Request) -> None:
        try:
            request.answer(200, request.content(request_limits.body), b"text/plain")
        except BadRequest as error:
            request.answer(error.status, error.reason.encode())

    request_limits = Limits(**limits)
    listener = HttpListener(handler or echo, request_limits)
    if listening is not None:
        listening.append(listener)

    async def run() -> Any:
        port = await listener.open("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(talk(port), 20)
        finally:
            listener.close()
            await asyncio.sleep(0.01)

    return asyncio.run(run()), listener


async def say(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends parts one after the other and reads until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        if pause:
            await asyncio.sleep(pause)
    answer = await reader.read()
    writer.close()
    return answer


def post(body: bytes, *headers: str, close: bool = True) -> bytes:
    lines = ["POST /x HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *headers]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_body_is_reassembled_from_small_segments() -> None:
    message = post(b"hello")
    answer, _ = serve(lambda port: say(port, *(message[i : i + 7] for i in range(0, len(message), 7)), pause=0.002))
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize("size", [NUM_READ - 1, NUM_READ, 3 * NUM_READ + 5, _MAX_DIRECT + 1])
@pytest.mark.parametrize("cut", [100, NUM_READ, 2 * NUM_READ + 1])
def test_request_after_a_large_body_is_parsed_separately(size: int, cut: int) -> None:
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    message = post(body, close=False) + post(b"small", close=False) + post(body[::-1])
    parts = (message[:cut], message[cut : 2 * cut], message[2 * cut :])
    answer, _ = serve(lambda port: say(port, *parts, pause=0.005))
    answers = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert answers == [body, b"small", body[::-1]]


def test_chunked_and_compressed_bodies_are_decoded() -> None:
    chunked = (
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    answer, _ = serve(lambda port: say(port, chunked))
    assert answer.endswith(b"abcde")
    for coding, packed in (("gzip", gzip.compress(b"zipped")), ("deflate", zlib.compress(b"zipped"))):
        message = post(packed, f"Content-Encoding: {coding}")
        answer, _ = serve(lambda port, message=message: say(port, message))
        assert answer.endswith(b"zipped")


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (post(b"x" * 101), 413),
        (b"POST /x HTTP/1.1\r\nContent-Length: 99999999999999999\r\n\r\n", 413),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + 2 * (b"40\r\n" + b"x" * 64 + b"\r\n"), 413),
        (post(gzip.compress(b"\0" * 100_000), "Content-Encoding: gzip"), 413),
        (post(b"abc", "Content-Encoding: br"), 415),
        (post(b"abc", "Content-Encoding: gzip"), 400),
        (post(gzip.compress(b"abcdefgh")[:-6], "Content-Encoding: gzip"), 400),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 5000 + b"\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: -3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nConnection: close, upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
)  # fmt: skip
def test_oversized_or_malformed_request_gets_matching_status_code(message: bytes, wanted: int) -> None:
    answer, listener = serve(lambda port: say(port, message), body=100, head=4000)
    assert status(answer) == wanted
    assert not listener.connections


@pytest.mark.parametrize(
    ("start", "piece", "wanted"),
    [
        (b"GET / HTTP/1.1\r\nA: ", b"b" * 1000, 431),
        (b"GET / HTTP/1.1\r\nA", b"b" * 1000, 431),
        (b"GET /", b"b" * 1000, 414),
        (b"", b"\r\n" * 500, 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 200, 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;a=", b"b" * 1000, 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nA: ", b"b" * 1000, 400),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 20, 431),
    ],
)
def test_endless_request_parts_are_rejected_when_sent_in_pieces(start: bytes, piece: bytes, wanted: int) -> None:
    answer, listener = serve(lambda port: say(port, start, *[piece] * 40, pause=0.001), head=8000, headers=50)
    assert status(answer) == wanted
    assert b"but got" in answer
    assert not listener.bodies.num_bytes


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"POST /x HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\nabcde",),
        (b"POST /x HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\n", b"ab", b"cde"),
        (
            b"POST /x HTTP/1.1\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
            b"2\r\nde\r\n0\r\n\r\n",
        ),
        tuple(bytes([byte]) for byte in b"POST /x HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\nabcde"),
    ],
    ids=["whole", "in pieces", "chunked", "byte by byte"],
)
def test_upgrade_to_http2_is_ignored_and_the_body_is_read(pieces: tuple[bytes, ...]) -> None:
    """As sent by `curl --http2` and by Java's HttpClient; the connection takes further requests."""
    answer, listener = serve(lambda port: say(port, *pieces, post(b"second", "Connection: close"), pause=0.001))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"abcde" in answer
    assert answer.endswith(b"second")
    assert not listener.bodies.num_bytes


def test_upgrade_does_not_bypass_limits_or_admission() -> None:
    long = b"POST /x HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 101\r\n\r\n" + b"x" * 101
    answer, _ = serve(lambda port: say(port, long), body=100)
    assert status(answer) == 413
    twice = b"POST /x HTTP/1.1\r\n" + UPGRADE + b"X: a\r\nX: b\r\nContent-Length: 2\r\n\r\nab" + post(b"second")
    answer, _ = serve(lambda port: say(port, twice))
    assert answer.count(b"HTTP/1.1 200 OK") == 1, "the connection is closed where framing could be ambiguous"


def test_trailers_do_not_override_headers_and_duplicate_headers_are_rejected() -> None:
    seen: list[dict[bytes, bytes]] = []

    def keep(request: Request) -> None:
        seen.append(dict(request.headers))
        request.answer(200, b"")

    chunked = b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nX-Key: a\r\nConnection: close\r\n\r\n"
    serve(lambda port: say(port, chunked + b"1\r\na\r\n0\r\nX-Key: b\r\nAuthorization: c\r\n\r\n"), keep)
    assert seen[0][b"x-key"] == b"a"
    assert b"authorization" not in seen[0]
    for name in ("Host", "Authorization", "Content-Encoding", "Origin"):
        answer, _ = serve(lambda port, name=name: say(port, post(b"", f"{name}: a", f"{name}: b")), keep)
        assert status(answer) == 400
    assert len(seen) == 1


def test_many_small_chunks_use_memory_proportional_to_their_bytes() -> None:
    sizes: list[int] = []

    def weigh(request: Request) -> None:
        sizes.append(tracemalloc.get_traced_memory()[1])
        request.answer(200, b"")

    num = 100_000
    chunks = b"10\r\n0123456789abcdef\r\n" * num
    head = b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    tracemalloc.start(1)
    try:
        answer, _ = serve(lambda port: say(port, head, chunks, b"0\r\n\r\n"), weigh)
    finally:
        tracemalloc.stop()
    assert status(answer) == 200
    # The client's own buffer has all chunks too. An object for each chunk would take 57 bytes and more.
    assert sizes[0] < 1.5 * 16 * num + len(chunks)


def test_unauthorized_request_is_rejected_before_the_body_is_read() -> None:
    def admit(path: str, headers: Any) -> tuple[int, str] | None:
        return None if headers.get(b"authorization") == b"yes" else (401, "no")

    async def run() -> tuple[bytes, int]:
        listener = HttpListener(lambda request: request.answer(200, b""), Limits(), None, admit)
        port = await listener.open("127.0.0.1", 0)
        try:
            head = b"POST /x HTTP/1.1\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
            return await asyncio.wait_for(say(port, head), 20), listener.bodies.num_bytes
        finally:
            listener.close()

    answer, num_bytes = asyncio.run(run())
    assert status(answer) == 401
    assert b"WWW-Authenticate: Bearer" in answer
    assert num_bytes == 0


def test_body_exceeding_the_decompression_ratio_is_rejected() -> None:
    message = post(gzip.compress(bytes(2 << 20)), "Content-Encoding: gzip")
    answer, _ = serve(lambda port: say(port, message))
    assert status(answer) == 413
    assert b"may become 100 times larger by decompression" in answer


def test_client_that_keeps_sending_receives_the_rejection_response() -> None:
    """Its answer would be lost with the connection, if that ended before all was sent."""

    async def talk(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (32 << 20))
        for _ in range(32):
            writer.write(bytes(1 << 20))
            await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer

    answer, listener = serve(talk, body=100)
    assert status(answer) == 413
    assert b"a body may have 100 bytes, but got 33554432" in answer
    assert not listener.connections


def test_rejected_body_releases_its_buffer_while_the_client_keeps_sending() -> None:
    async def talk(port: int) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n50\r\n" + b"x" * 80 + b"\r\n50\r\n" + b"x" * 80
        )
        refused = await reader.read()
        # The first connection is still there.
        answer = await say(port, post(b"x" * 80))
        writer.close()
        return refused, answer

    answers, _ = serve(talk, body=100, bodies=100)
    assert list(map(status, answers)) == [413, 200]


def test_client_that_sends_endlessly_after_rejection_is_disconnected() -> None:
    async def talk(port: int) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /x HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0.01)
                sent += 1
        writer.close()
        return sent

    sent, listener = serve(talk, body=100, receive=0.3)
    assert sent > 3
    assert not listener.connections


def test_pipelined_requests_are_answered_in_order() -> None:
    waiting: list[Request] = []

    def late(request: Request) -> None:
        waiting.append(request)
        asyncio.get_running_loop().call_later(0.001, lambda: waiting.pop(0).answer(200, request.body))

    messages = [post(b"%d" % i, close=i == 39) for i in range(40)]
    answer, _ = serve(lambda port: say(port, b"".join(messages)), late)
    bodies = [int(part.rpartition(b"\r\n\r\n")[2]) for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == list(range(40))


@pytest.mark.parametrize("close", [False, True])
def test_parse_error_is_sent_after_responses_to_earlier_pipelined_requests(close: bool) -> None:
    def late(request: Request) -> None:
        asyncio.get_running_loop().call_later(0.01, lambda: request.answer(200, request.body))

    first = post(b"one", close=False) + post(b"two", close=close)
    answer, _ = serve(lambda port: say(port, first + b"nonsense\r\n\r\n"), late)
    # A client that announced the end of its requests gets no response to bytes that follow.
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", *([] if close else [b"400"])]
    assert answer.index(b"one") < answer.index(b"two")


def test_http_1_0_response_closes_the_connection() -> None:
    asked = b"POST /x HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nold"
    answer, _ = serve(lambda port: say(port, asked))
    assert answer.endswith(b"Connection: close\r\n\r\nold")


def test_http_1_0_client_gets_no_interim_response() -> None:
    asked = b"POST /x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nold"
    answer, _ = serve(lambda port: say(port, asked))
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("request_line", [b"GET /x\r\n\r\n", b"GET /x HTTP/0.9\r\n\r\n", b"GET /x HTTP/2.0\r\n\r\n"])
def test_requests_of_other_http_versions_are_rejected(request_line: bytes) -> None:
    """A request of HTTP/0.9 has no headers, and would pass the checks of the web page that sent it."""
    answer, _ = serve(lambda port: say(port, request_line + b"GET /y HTTP/1.1\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_read_ahead_of_large_pipelined_requests_is_limited() -> None:
    requests: list[Request] = []
    body = bytes(1 << 20)

    async def talk(port: int) -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body, close=False) * 40)
        while not requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        (connection,) = listeners[0].connections
        ahead = connection._num_waiting
        num_answered = 0
        while num_answered < 40:
            if num_answered < len(requests):
                requests[num_answered].answer(200, b"")
                num_answered += 1
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            else:
                await asyncio.sleep(0.001)
        writer.close()
        return ahead, connection._num_waiting

    listeners: list[HttpListener] = []

    def keep(request: Request) -> None:
        listeners.append(request._connection._listener)
        requests.append(request)

    (ahead, left), _ = serve(talk, keep)
    assert 0 < ahead <= 2 << 20
    assert left == 0


def test_slow_client_gets_408_while_others_are_served() -> None:
    async def talk(port: int) -> tuple[bytes, bytes, bytes]:
        slow = asyncio.ensure_future(say(port, b"POST /x HTTP/1.1\r\n", *[b"A: b\r\n"] * 10, pause=0.02))
        late_body = asyncio.ensure_future(say(port, b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"))
        good = await say(port, post(b"quick"))
        return await slow, await late_body, good

    (slow, late_body, good), _ = serve(talk, receive=0.4)
    assert good.endswith(b"quick")
    assert status(slow) == status(late_body) == 408


def test_client_that_never_reads_its_response_is_disconnected() -> None:
    def much(request: Request) -> None:
        request.answer(200, b"x" * (64 << 20))

    async def talk(port: int) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post(b"", close=False))
        for _ in range(100):
            await asyncio.sleep(0.05)
            if started and not listener_connections():
                break
            started.append(True)
        writer.transport.abort()
        return len(listener_connections())

    started: list[bool] = []
    holder: list[HttpListener] = []

    def listener_connections() -> set[Any]:
        return holder[0].connections

    limits = Limits(receive=0.4)
    holder.append(HttpListener(much, limits))

    async def run() -> int:
        port = await holder[0].open("127.0.0.1", 0)
        try:
            return await talk(port)
        finally:
            holder[0].close()

    assert asyncio.run(run()) == 0


def test_unread_response_bytes_count_until_the_client_disconnects() -> None:
    listeners: list[HttpListener] = []

    def much(request: Request) -> None:
        listeners.append(request._connection._listener)
        request.answer(200, b"x" * (16 << 20))

    async def talk(port: int) -> tuple[int, int]:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(post(b"", close=False))
        while not (listeners and listeners[0].bodies.num_bytes):
            await asyncio.sleep(0.01)
        held = listeners[0].bodies.num_bytes
        writer.transport.abort()
        while listeners[0].connections:
            await asyncio.sleep(0.01)
        return held, listeners[0].bodies.num_bytes

    (held, left), _ = serve(talk, much)
    assert held > 1 << 20
    assert left == 0


async def unread(port: int, listener: HttpListener) -> socket.socket:
    """Ask until an answer waits in the server's memory, but less than pauses writing, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    name = client.getsockname()
    for _ in range(500):
        with contextlib.suppress(OSError):
            client.send(post(b"", close=False))
        await asyncio.sleep(0.002)
        transports = [each._transport for each in listener.connections]
        if any(each.get_extra_info("peername") == name and each.get_write_buffer_size() for each in transports):
            return client
    raise AssertionError("the answers were all sent")


@pytest.mark.parametrize("limits", [{"connections": 4}, {"receive": 0.4}], ids=["evicted", "too slow"])
def test_sockets_of_clients_that_never_read_small_responses_are_closed(limits: dict[str, Any]) -> None:
    def some(request: Request) -> None:
        request.answer(200, b"x" * 30_000)

    def num_sockets() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def talk(port: int) -> tuple[bool, int]:
        before = num_sockets()
        clients = [await unread(port, listeners[0]) for _ in range(12)]
        is_blocked = any(each._is_blocked for each in listeners[0].connections)
        await asyncio.sleep(1.0)
        left = num_sockets() - before - len(clients)
        for client in clients:
            client.close()
        return is_blocked, left

    listeners: list[HttpListener] = []
    (is_blocked, left), _ = serve(talk, some, listeners, **limits)
    assert not is_blocked, "the answers were too large for this attack"
    assert left <= limits.get("connections", 0)


def test_idle_connection_is_closed_after_timeout() -> None:
    ended, listener = serve(lambda port: say(port), idle=0.2, receive=0.4)
    assert ended == b""
    assert not listener.connections


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_connection_over_the_limit_evicts_the_longest_idle_connection(limit: str) -> None:
    async def talk(port: int) -> tuple[bytes, bytes, bytes]:
        idle = await asyncio.open_connection("127.0.0.1", port)
        half = await asyncio.open_connection("127.0.0.1", port)
        half[1].write(b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\nab")
        await asyncio.sleep(0.05)
        answers = [await say(port, post(b"new")), await idle[0].read()]
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        answers.append(await half[0].read())
        for _, writer in (idle, half, *others):
            writer.close()
        return answers[0], answers[1], answers[2]

    (new, idle, half), _ = serve(talk, **{limit: 2})
    assert new.endswith(b"new")
    assert idle == b""
    assert status(half) == 503
    assert b"Retry-After" in half
    assert b"this request was not complete yet" in half


def test_connection_with_request_in_flight_is_not_evicted() -> None:
    requests: list[Request] = []

    async def talk(port: int) -> tuple[bytes, bytes]:
        first = asyncio.ensure_future(say(port, post(b"first")))
        while not requests:
            await asyncio.sleep(0.01)
        refused = await say(port)
        requests[0].answer(200, b"done")
        return await first, refused

    (first, refused), _ = serve(talk, requests.append, connections=1)
    assert first.endswith(b"done")
    assert status(refused) == 503
    assert b"all of 1 have requests that are being answered" in refused


def test_client_disconnect_cancels_its_request() -> None:
    cancelled = []

    def never(request: Request) -> None:
        request.cancel = lambda: cancelled.append(request.body)

    async def talk(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"mine", close=False))
        await asyncio.sleep(0.05)
        writer.close()
        while not cancelled:
            await asyncio.sleep(0.01)

    serve(talk, never)
    assert cancelled == [b"mine"]


def test_partial_body_is_freed_when_the_client_disconnects() -> None:
    async def talk(port: int) -> Any:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(bytes(1 << 20))[: 1 << 19])
        while not (found := [one for one in listeners[0].connections if one._num_body]):
            await asyncio.sleep(0.001)
        left = weakref.ref(found.pop()._whole)
        assert left() is not None
        writer.close()
        while listeners[0].connections:
            await asyncio.sleep(0.001)
        return left()

    listeners = [HttpListener(lambda request: None, Limits())]

    async def run() -> Any:
        port = await listeners[0].open("127.0.0.1", 0)
        try:
            return await talk(port)
        finally:
            listeners[0].close()

    gc.disable()
    try:
        assert asyncio.run(run()) is None
    finally:
        gc.enable()
    assert listeners[0].bodies.num_bytes == 0


def test_decompressed_bytes_count_toward_the_limit_until_the_response() -> None:
    found: list[str] = []
    kept: list[Request] = []

    def keep(request: Request) -> None:
        try:
            request.content(2500)
            kept.append(request)
        except RequestRefused as refusal:
            found.append(refusal.reason)
            request.answer(503, b"")
            kept[0].answer(200, b"")

    async def talk(port: int) -> list[bytes]:
        packed = post(gzip.compress(bytes(2500), mtime=0), "Content-Encoding: gzip")
        return await asyncio.gather(say(port, packed), say(port, packed))

    answers, listener = serve(talk, keep, body=2500, bodies=3000)
    assert sorted(map(status, answers)) == [200, 503]
    assert found[0].startswith("overloaded: 25")
    assert listener.bodies.num_bytes == 0


def test_limits_reject_body_larger_than_the_total_and_zero_queue_size() -> None:
    with pytest.raises(SettingsError, match="Lower body, or raise bodies"):
        Limits(bodies=10)
    with pytest.raises(SettingsError, match="queue_mib must be a whole number of at least 1, but got 0"):
        Limits.holding(0)


def test_responses_during_shutdown_close_their_connection() -> None:
    async def run() -> list[bytes]:
        listener = HttpListener(lambda request: requests.append(request), Limits())
        requests: list[Request] = []
        port = await listener.open("127.0.0.1", 0)
        whole, half = post(b"last", close=False), post(b"later", close=False)
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for (_, writer), message in zip(clients, (whole, half[:-2]), strict=True):
            writer.write(message)
        while not requests or listener.num_busy < 2:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(listener.drain(0.0, time.monotonic() + 20))
        await asyncio.sleep(0)
        requests[0].answer(200, b"done")
        # Who had begun to ask may finish.
        clients[1][1].write(half[-2:])
        while len(requests) < 2:
            await asyncio.sleep(0.01)
        requests[1].answer(200, requests[1].body)
        answers = [await reader.read() for reader, _ in clients]
        await draining
        listener.close()
        for _, writer in clients:
            writer.close()
        return answers

    answers = asyncio.run(run())
    assert all(b"Connection: close" in answer for answer in answers)
    assert [answer.rpartition(b"\r\n")[2] for answer in answers] == [b"done", b"later"]


def test_shutdown_resets_no_request_of_keep_alive_clients_and_of_the_backlog() -> None:
    async def ask(port: int, pause: float) -> bool:
        """Send requests until a response closes the connection; return whether each was answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b""
        while b"Connection: close" not in head:
            writer.write(post(b"x", close=False))
            head = await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"x"
            await asyncio.sleep(pause)
        writer.close()
        return await reader.read() == b""

    async def run() -> list[bool]:
        listener = HttpListener(lambda request: request.answer(200, bytes(request.body)), Limits())
        port = await listener.open("127.0.0.1", 0)
        clients = [asyncio.ensure_future(ask(port, 0.01 * number)) for number in range(20)]
        await asyncio.sleep(0.2)
        # The kernel has established this connection, but the listener has not accepted it.
        late = socket.create_connection(("127.0.0.1", port))
        late.sendall(post(b"late", close=False))
        await listener.drain(2.0, time.monotonic() + 20)
        late.settimeout(5)
        answer = await asyncio.to_thread(late.recv, 4096)
        late.close()
        listener.close()
        return [*await asyncio.gather(*clients), answer.endswith(b"late")]

    assert asyncio.run(run()) == [True] * 21


async def count_turns(turns: list[int]) -> None:
    """Count the turns of the loop."""
    while True:
        turns[0] += 1
        await asyncio.sleep(0)


def test_connections_without_a_complete_header_are_not_admitted() -> None:
    async def talk(port: int) -> tuple[int, int, bytes]:
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _, writer in clients[:20]:
            writer.write(b"POST /x HTTP/1.1\r\nContent-Length: 3\r\nConnection: close\r\n")
        while listening[0].num_pending < 30:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        num_inside = len(listening[0].connections)
        clients[0][1].write(b"\r\nabc")
        answer = await clients[0][0].read()
        for _, writer in clients:
            writer.close()
        while listening[0].num_pending:
            await asyncio.sleep(0.01)
        return num_inside, len(listening[0].connections), answer

    listening: list[HttpListener] = []
    (num_inside, num_after, answer), _ = serve(talk, listening=listening)
    assert (num_inside, num_after) == (0, 0)
    assert answer.endswith(b"abc")


def test_accepted_connections_per_event_loop_iteration_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[int] = Counter()
    turns = [0]
    original = Connection.connection_made

    def count(connection: Connection, transport: Any) -> None:
        made[turns[0]] += 1
        original(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", count)

    async def talk(port: int) -> list[bytes]:
        counting = asyncio.ensure_future(count_turns(turns))
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        for sock in sockets:
            sock.sendall(post(b"a"))
        answers = [await asyncio.to_thread(sock.recv, 1000) for sock in sockets]
        for sock in sockets:
            sock.close()
        counting.cancel()
        return answers

    answers, _ = serve(talk)
    assert all(answer.endswith(b"a") for answer in answers)
    assert sum(made.values()) == 60
    assert max(made.values()) <= 8


def test_pipelined_requests_dispatched_per_event_loop_iteration_are_limited() -> None:
    handed: Counter[int] = Counter()
    turns = [0]

    def handle(request: Request) -> None:
        handed[turns[0]] += 1
        request.answer(200, b"done")

    async def talk(port: int) -> list[bytes]:
        counting = asyncio.ensure_future(count_turns(turns))
        message = post(b"a", close=False) * 99 + post(b"a")
        answers = await asyncio.gather(*(say(port, message) for _ in range(3)))
        counting.cancel()
        return answers

    answers, _ = serve(talk, handle)
    assert [answer.count(b"done") for answer in answers] == [100] * 3
    assert max(handed.values()) <= 3 + 4


def test_idle_connection_flood_does_not_evict_an_active_connection() -> None:
    async def talk(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"first", close=False))
        assert (await reader.read(1000)).endswith(b"first")
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await asyncio.sleep(0.05)
        writer.write(post(b"again"))
        answer = await reader.read()
        for _, other in silent:
            other.close()
        return answer

    answer, _ = serve(talk, connections_per_address=8)
    assert answer.endswith(b"again")
