"""The client against a hostile server: what it sends, how much it reads, and how long it waits."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from manyhands.core import RequestRefused
from manyhands.serving import Client
from manyhands.serving.client import MAX_ANSWER_TEXTS

TOKEN = "a-token-for-this-server-alone"
ROWS = {"x": np.ones((2, 3), np.float32)}
Hostile = Callable[[Iterable[bytes]], "Server"]


class Server:
    """Answers every connection with the same bytes, and keeps what it got."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.requests: list[bytes] = []
        self._parts = parts
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.requests.append(connection.recv(1 << 16))
                try:
                    for part in self._parts:
                        if self._is_over.is_set():
                            return
                        connection.sendall(part)
                except OSError:
                    continue

    def stop(self) -> None:
        self._is_over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    servers: list[Server] = []

    def start(parts: Iterable[bytes]) -> Server:
        servers.append(Server(parts))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def answer(body: bytes, more: str = "", status: str = "200 OK") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body]


def slowly(parts: Iterable[bytes]) -> Iterator[bytes]:
    for part in parts:
        yield part
        time.sleep(0.05)


def test_token_is_not_sent_to_the_target_of_a_redirect(hostile: Hostile) -> None:
    other = hostile(answer(b"{}"))
    first = hostile(answer(b"", f"Location: {other.url}/v2/models/adder/infer\r\n", "307 Temporary Redirect"))
    with Client(first.url, token=TOKEN, timeout=5) as client, pytest.raises(RequestRefused, match="status 307"):
        client("adder", ROWS)
    assert TOKEN.encode() in first.requests[0]
    assert other.requests == []


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
    ],
    ids=["chunked", "until the end", "error"],
)
def test_endless_answer_is_refused_at_the_size_limit(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr("manyhands.serving.client.MAX_ANSWER", 1 << 20)
    monkeypatch.setattr("manyhands.serving.client._MAX_HEAD", 1 << 10)
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    server = hostile(itertools.chain([head], itertools.repeat(chunk, 1000)))
    with Client(server.url, timeout=10) as client, pytest.raises(RequestRefused, match="more than 1,048,576") as caught:
        client("adder", ROWS)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_huge_declared_length_is_refused_before_it_is_allocated(hostile: Hostile) -> None:
    server = hostile([b"HTTP/1.1 200 OK\r\nContent-Length: 109951162777600\r\n\r\n"])
    with Client(server.url, timeout=5) as client, pytest.raises(RequestRefused, match="answer has more than"):
        client("adder", ROWS)


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b"x"] * 200],
        [b"HTTP/1.1 200 OK\r\n", *[b"A: b\r\n"] * 90],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 200,
    ],
    ids=["body", "headers", "interim responses"],
)
def test_answer_that_trickles_in_ends_at_the_timeout(hostile: Hostile, parts: list[bytes]) -> None:
    """Every read gets some bytes, so that a timeout of single reads would never apply."""
    server = hostile(slowly(parts))
    start = time.monotonic()
    with Client(server.url, timeout=0.5) as client, pytest.raises(RequestRefused) as caught:
        client("adder", ROWS)
    assert time.monotonic() - start < 3
    assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"outputs": [{"name": "y", "datatype": "PICKLE", "shape": [1], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1099511627776], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [5], "parameters": {"binary_data_size": -8}}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": "x", "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1180591620717411303424], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "BYTES", "shape": [8388608], "parameters": {"binary_data_size": 0}}]}',
        b'{"outputs": [{"name": "y", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": "9"}}]}',
    ],
)
def test_malformed_answer_raises_request_refused(hostile: Hostile, body: bytes) -> None:
    server = hostile(answer(body))
    with Client(server.url, timeout=5) as client, pytest.raises(RequestRefused, match="not one of the protocol"):
        client("adder", ROWS)


def test_number_of_strings_in_an_answer_is_limited(hostile: Hostile) -> None:
    num = 4 * (MAX_ANSWER_TEXTS + 1)
    one = {"name": "y", "datatype": "BYTES", "shape": [num // 4], "parameters": {"binary_data_size": num}}
    text = json.dumps({"outputs": [one]}).encode()
    server = hostile(answer(text + bytes(num), f"Inference-Header-Content-Length: {len(text)}\r\n"))
    with Client(server.url, timeout=20) as client, pytest.raises(RequestRefused, match=f"have {MAX_ANSWER_TEXTS} str"):
        client("adder", ROWS)


def test_error_text_of_a_server_is_short_and_does_not_control_the_terminal(hostile: Hostile) -> None:
    text = "\x1b]0;owned\x07" + "x" * 1_000_000
    body = json.dumps({"error": text}).encode()
    server = hostile(answer(body, "Retry-After: \xb2\r\n", "400 Bad Request"))
    with Client(server.url, timeout=5) as client, pytest.raises(RequestRefused) as caught:
        client("adder", ROWS)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert caught.value.retry_after is None
