"""Several servers behind a router: load balancing, failover, and changes on all servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from manyhands.core import RequestRefused, SettingsError, from_flat
from manyhands.serving import Client, Listen, Router, RouteSettings, Server, ServingLog
from manyhands.serving.protocols import tensorflow_grpc
from manyhands.serving.routing.backend import Address, Backend, BackendResponse, Lost
from manyhands.serving.routing.fleet import READY, Fleet
from manyhands.serving.routing.management import RouterManagement
from manyhands.serving.routing.router import MANAGING
from manyhands.testing import NamespaceHosts

from .conftest import Start, publish
from .test_grpc import predict, tensor
from .test_versions import Moody

Route = Callable[..., Router]


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return found


def address(server: Server | Router) -> str:
    return f"127.0.0.1:{server.grpc}/{server.http}/{server.manage}"


@pytest.fixture
def route() -> Iterator[Route]:
    """Starts routers and stops them."""
    with contextlib.ExitStack() as stack:

        def run(*backends: str, **settings: Any) -> Router:
            values = {"http": 0, "grpc": 0, "manage": 0, **settings}
            listen, log = from_flat((Listen, ServingLog), values)
            router = Router(RouteSettings(backends=backends, listen=listen, log=log))
            return stack.enter_context(router.start())

        yield run


def backends_of(router: Router) -> dict[str, dict[str, Any]]:
    return {backend["address"]: backend for backend in router.state()["backends"]}


def test_router_forwards_http_and_grpc_to_both_servers(start: Start, route: Route, adder: Path, tmp_path: Path) -> None:
    publish(adder, tmp_path / "adder", 2)
    servers = [start(tmp_path), start(tmp_path)]
    router = route(*map(address, servers), log=tmp_path / ".log")
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    client = Client(router.url, manage=router.manage_url)
    try:
        for _ in range(40):
            np.testing.assert_array_equal(client("adder", rows), rows + 2)
        answer = predict(router.grpc, tensor(rows, as_bytes=True))
        assert (answer.model_spec.name, answer.model_spec.version.value) == ("adder", 2)
        with httpx.Client(base_url=router.url) as http:
            assert http.post("/v1/models/adder:predict", json={"instances": [[1, 2, 3]]}).json() == {
                "predictions": [[3, 4, 5]]
            }
            unknown = http.get("/v1/models/foo")
            assert (unknown.status_code, unknown.json()["error"]) == (
                404, "Servable not found for request: Latest(foo)",
            )  # fmt: skip
            assert http.head("/v2/models/adder").status_code == 200
            assert http.post("/v2/repository/models/adder/unload").status_code == 403
            assert 'manyhands_backend_up{backend="127.0.0.1:' in http.get("/metrics").text
        for method in sorted(MANAGING):
            with grpc.insecure_channel(f"127.0.0.1:{router.grpc}") as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"\x12\x05adder", timeout=20)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as caught:
            predict(router.grpc, tensor(rows, as_bytes=True), version={"value": 9})
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        assert caught.value.details() == "Servable not found for request: Specific(adder, 9)"  # type: ignore[attr-defined]
        assert all(backend["answered"] > 5 for backend in backends_of(router).values())
        (model,) = client.models()["models"]
        assert model["versions"][0]["requests"]["OK"] == 42
        assert len(model["versions"][0]["replicas"]) == 2
    finally:
        client.close()
    router.stop()
    lines = [json.loads(line) for line in (tmp_path / ".log" / "access.jsonl").read_text().splitlines()]
    called = [(line["path"], line["status"], line["out"] > 0) for line in lines if line["method"] == "gRPC"]
    path = "/tensorflow.serving.PredictionService/Predict"
    assert [each for each in called if each[0] == path] == [(path, 200, True), (path, 404, False)]
    assert {each for each in called if each[0] != path} == {(method, 403, False) for method in MANAGING}


def test_management_call_is_applied_to_all_backends_or_none(
    start: Start, route: Route, adder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        publish(adder, tmp_path / name / "adder", 1)
    publish(adder, tmp_path / "a" / "adder", 2)
    publish(adder, tmp_path / "b" / "adder", 2)
    servers = [start(tmp_path / name, versions="all") for name in ("a", "b")]
    router = route(address(servers[0]))
    client = Client(router.url, manage=router.manage_url, timeout=5)
    try:
        client.label("adder", "stable", 1)
        client.split("adder", [{"version": 1, "weight": 1}])
        # A backend that joins first gets the current settings, also those that another router has made.
        other = route(address(servers[0]))
        httpx.post(f"{servers[1].manage_url}/manage/models/adder/label", json={"label": "old", "version": 1})
        for each in (other, router):
            joined = httpx.post(f"{each.manage_url}/manage/backends", json={"add": address(servers[1])})
            assert len(joined.json()["backends"]) == 2
            until(lambda each=each: all(backend["up"] for backend in backends_of(each).values()))
        for server in servers:
            assert server.state()["models"][0]["labels"] == {"stable": 1}
            assert server.state()["splits"]["adder"][0]["version"] == 1
        client.label("adder", "stable", 2)
        assert [server.state()["models"][0]["labels"] for server in servers] == 2 * [{"stable": 2}]
        # A version that only one backend has cannot be labelled.
        publish(adder, tmp_path / "b" / "adder", 3)
        until(lambda: servers[1].state()["models"][0]["current"] == 3)
        with pytest.raises(RequestRefused, match="does not serve version 3 of adder") as caught:
            client.label("adder", "stable", 3)
        assert caught.value.code == "INVALID_ARGUMENT"
        with pytest.raises(RequestRefused, match="must name loaded versions"):
            client.split("adder", [{"version": 3, "weight": 1}])
        for server in servers:
            assert server.state()["models"][0]["labels"] == {"stable": 2}
            assert server.state()["splits"]["adder"][0]["version"] == 1
        # If a backend fails during the change, the new label is removed from all backends.
        tell = RouterManagement._forward

        async def lose(self: Any, backend: Backend, model: str, act: str, value: dict[str, Any]) -> dict[str, Any]:
            if value["version"] == 1 and backend.address == Address.parse(address(servers[1])):
                raise RequestRefused("UNAVAILABLE", "lost")
            return await tell(self, backend, model, act, value)

        monkeypatch.setattr(RouterManagement, "_forward", lose)
        with pytest.raises(RequestRefused, match="lost"):
            client.label("adder", "fresh", 1)
        assert [server.state()["models"][0]["labels"] for server in servers] == 2 * [{"stable": 2}]
        client.label("adder", "stable", None)
        assert [server.state()["models"][0]["labels"] for server in servers] == 2 * [{}]
        gone = httpx.post(f"{router.manage_url}/manage/backends", json={"remove": address(servers[1])})
        assert len(gone.json()["backends"]) == 1
        for mistake in ({"remove": "unknown:1"}, {"add": "a b"}):
            assert httpx.post(f"{router.manage_url}/manage/backends", json=mistake).status_code in (400, 404)
        nameless = {"label": {"a": 1}, "version": 1}
        assert httpx.post(f"{router.manage_url}/manage/models/adder/label", json=nameless).status_code == 400
    finally:
        client.close()


def test_router_balances_load_and_hides_a_server_shutdown(start: Start, route: Route) -> None:
    servers = [start({"moody": Moody()}) for _ in range(2)]
    router = route(*map(address, servers))
    answers: list[Any] = []

    def ask(client: Client) -> None:
        for _ in range(15):
            answers.append(client("moody", np.full((1, 1), 20.0, np.float32))[0, 0])
        client.close()

    threads = [threading.Thread(target=ask, args=(Client(router.url),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) > 8)
    servers[0].stop()
    for thread in threads:
        thread.join()
    assert answers == [21.0] * 60
    stopped = str(Address.parse(address(servers[0])))
    until(lambda: not backends_of(router)[stopped]["up"])
    assert backends_of(router)[stopped]["reason"]
    servers[1].stop()
    refused = httpx.get(f"{router.url}/v1/models/moody")
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert httpx.get(f"{router.url}/v2/health/ready").status_code == 400
    assert httpx.get(f"{router.url}/v2/health/live").status_code == 200


def test_killed_router_loses_no_request_of_clients_that_know_another(start: Start, route: Route) -> None:
    backends = [address(start({"moody": Moody()})) for _ in range(2)]
    kept = route(*backends)
    command = [sys.executable, "-m", "manyhands", "serve", "--router", "--backends", ",".join(backends)]
    ports = ["--http", "0", "--grpc", "0", "--manage", "0"]
    killed = subprocess.Popen([*command, *ports], stderr=subprocess.PIPE, text=True)
    try:
        assert killed.stderr is not None
        url = next(line.split()[2] for line in killed.stderr if line.startswith("serving on "))
        answers: list[Any] = []
        over = threading.Event()

        def ask(urls: str) -> None:
            with Client(urls, timeout=60) as client:
                while not over.is_set():
                    answers.append(client("moody", np.full((1, 1), 20.0, np.float32))[0, 0])

        both = (f"{url},{kept.url}", f"{kept.url},{url}")
        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask, both[number % 2]) for number in range(4)]
            until(lambda: len(answers) > 40)
            killed.kill()
            num = len(answers)
            until(lambda: len(answers) > num + 40)
            over.set()
            for client in clients:
                client.result()
        assert set(answers) == {21.0}
    finally:
        killed.kill()
        killed.wait()
        killed.stderr.close()


def test_request_is_retried_when_a_backend_accepts_no_connection(
    start: Start, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.serving.routing.backend.CONNECT_SECONDS", 0.3)
    server = start({"moody": Moody()})
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        # The listener does not accept: once its queue is full, a connection is neither accepted nor refused.
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        router = route(address(server), f"127.0.0.1:{port}/{port}/{port}")
        silent = next(backend for backend in router._management.fleet.backends.values() if backend.address.http == port)
        silent.is_up = True
        for _ in range(8):
            silent.is_up = True
            answer = httpx.post(f"{router.url}/v1/models/moody:predict", json={"instances": [[20.0]]}, timeout=10)
            assert answer.json() == {"predictions": [[21.0]]}
        assert silent.num_lost > 0
        assert "did not take a connection" in silent.reason


def test_pending_request_fails_over_when_its_backend_stops_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.serving.routing.backend.CONNECT_SECONDS", 0.1)

    async def admit(backend: Backend) -> None:
        """Nothing was settled."""

    async def run(mute: int, deaf: int) -> None:
        backend = Backend(Address("127.0.0.1", mute, mute, mute), "127.0.0.1", None, 1000)
        fleet = Fleet([], None, 1000, lambda kind, **values: None, admit)
        waiting = asyncio.ensure_future(backend.fetch(READY, b"", 60))
        while not backend._wires:
            await asyncio.sleep(0.01)
        backend.address = Address("127.0.0.1", deaf, deaf, deaf)
        await fleet._check(backend)
        with pytest.raises(Lost):
            await asyncio.wait_for(waiting, 20)
        await backend.close()

    with contextlib.ExitStack() as stack:
        mute, deaf = (stack.enter_context(socket.socket()) for _ in range(2))
        for one in (mute, deaf):
            one.bind(("127.0.0.1", 0))
            one.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        asyncio.run(run(mute.getsockname()[1], deaf.getsockname()[1]))


class Fragile(socketserver.ThreadingTCPServer):
    """A server that is well, and gone as soon as anybody asks for more."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked = 0
        super().__init__(("127.0.0.1", 0), Reading)
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class Reading(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            while self.rfile.readline().strip():
                pass
            if not line.startswith(b"GET /v2/health/ready"):
                self.server.asked += b"/poison" in line  # type: ignore[attr-defined]
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_request_that_crashes_servers_fails_after_max_attempts(route: Route) -> None:
    with Fragile() as first, Fragile() as second:
        ports = [each.server_address[1] for each in (first, second)]
        router = route(*(f"127.0.0.1:{port}/{port}/{port}" for port in ports))
        answer = httpx.get(f"{router.url}/v1/models/poison", timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (500, "servers failed while computing this request")
        assert first.asked + second.asked == 3


def fetched(*parts: bytes, limit: int = 1 << 20) -> BackendResponse:
    """Return a backend's response as a router reads it; the backend sends these bytes and keeps the connection."""

    async def run() -> BackendResponse:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await reader.readuntil(b"\r\n\r\n")
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        backend = Backend(Address("127.0.0.1", port, port, port), "127.0.0.1", None, limit)
        try:
            return await backend.fetch(b"GET / HTTP/1.1\r\n\r\n", b"", 10)
        finally:
            await backend.close()
            server.close()
            await server.wait_closed()

    return asyncio.run(run())


def test_grpc_message_of_a_backend_is_limited() -> None:
    async def run() -> None:
        async def answer(request: bytes, context: Any) -> bytes:
            return bytes(2 << 20)

        server = grpc.aio.server()
        handlers = {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = Backend(Address("127.0.0.1", port, port, port), "127.0.0.1", None, 1 << 20)
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="Received message larger than max"):
                await backend.call("/a.Service/Predict", b"", 10, [])
        finally:
            await backend.close()
            await server.stop(None)

    asyncio.run(run())


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("start", "part", "end"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"A: " + b"x" * 1000 + b"\r\n", b"Content-Length: 0\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 1000 + b"\r\na\r\n", b"0\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nA: " + b"x" * 1000 + b"\r\n\r\n", OK),
    ],
    ids=["headers", "chunk extensions", "interim responses"],
)
def test_bytes_of_a_backend_response_are_limited_with_its_head(start: bytes, part: bytes, end: bytes) -> None:
    assert fetched(start, *[part] * 10, end).status == 200
    with pytest.raises(Lost):
        fetched(start, *[part] * 2000, end)


@pytest.mark.parametrize("status", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
def test_interim_response_of_a_backend_is_not_forwarded(status: bytes) -> None:
    answer = fetched(b"HTTP/1.1 %b\r\nA: b\r\n\r\n" % status + OK)
    assert (answer.status, answer.body, answer.headers.get(b"a")) == (200, b"{}", None)


def test_headers_named_in_connection_are_not_forwarded(route: Route) -> None:
    """In either direction, also if there are several `Connection` lines (RFC 9110, 7.6.1)."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nConnection: keep-alive\r\nX-Hop: 1\r\nX-Passed: 2\r\n"
                    b"Content-Length: 2\r\n\r\n{}"
                )

    async def run() -> bytes:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        router = await asyncio.to_thread(route, f"127.0.0.1:{port}/{port}/{port}")
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http)
        writer.write(
            b"GET /v2/models/m HTTP/1.1\r\nHost: localhost\r\nConnection: X-Secret, x-other\r\nX-SECRET: 1\r\n"
            b"X-Other: 2\r\nX-More: 3\r\nX-Passed: 4\r\nConnection: close,\t x-more \r\n\r\n"
        )
        found = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await asyncio.to_thread(router.stop)
        server.close()
        return found

    found = asyncio.run(run()).lower()
    (forwarded,) = (head.lower() for head in seen if b"/v2/models/m" in head)
    assert b"x-passed: 4\r\n" in forwarded
    assert not any(name in forwarded for name in (b"x-secret", b"x-other", b"x-more", b"connection"))
    assert b"x-passed: 2\r\n" in found
    assert b"x-hop" not in found


POST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = b"0\r\n\r\nGET /v2/models/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
AMBIGUOUS = {
    "length and chunks": POST + b"Content-Length: 6\r\n" + CHUNKED + b"\r\n" + SMUGGLED,
    "two encodings": POST + CHUNKED + b"Transfer-Encoding: x\r\n\r\n" + SMUGGLED,
    "space before colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + SMUGGLED,
    "unknown encoding": POST + b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    "control character": POST + b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "signed length": POST + b"Content-Length: +5\r\n\r\n" + SMUGGLED,
    "list of lengths": POST + b"Content-Length: 5, 5\r\n\r\n" + SMUGGLED,
    "line feed in a value": POST + b"X: a\nY: b\r\nContent-Length: 0\r\n\r\n",
    "carriage return in a value": POST + b"X: a\rY: b\r\nContent-Length: 0\r\n\r\n",
    "zero byte in a value": POST + b"X: a\0b\r\nContent-Length: 0\r\n\r\n",
    "folded line": POST + b"X: a\r\n Y: b\r\nContent-Length: 0\r\n\r\n",
    "line feed in a chunk extension": POST + CHUNKED + b"\r\n1;a=\n\r\nx\r\n" + SMUGGLED,
    "chunks by line feeds": POST + CHUNKED + b"\r\n1\nx\n0\n\n" + SMUGGLED,
    "negative chunk": POST + CHUNKED + b"\r\n-1\r\nx\r\n" + SMUGGLED,
    "overflowing chunk": POST + CHUNKED + b"\r\n10000000000000001\r\nx\r\n" + SMUGGLED,
    "chunk longer than its size": POST + CHUNKED + b"\r\n1\r\nxyz\r\n" + SMUGGLED,
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n1\r\nx\r\n0\r\n\r\n",
    "two hosts": b"GET /v2/models/m HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
    "control character in the path": b"GET /v2/mod\x01els HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_ambiguous_requests_are_rejected_and_nothing_is_forwarded(route: Route) -> None:
    """Requests whose end a router and a backend could see in different places (request smuggling)."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return found

    async def run() -> dict[str, bytes]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        router = await asyncio.to_thread(route, f"127.0.0.1:{port}/{port}/{port}")
        found = {name: await ask(router.http, request) for name, request in AMBIGUOUS.items()}
        await asyncio.to_thread(router.stop)
        server.close()
        return found

    found = asyncio.run(run())
    assert {name: answer.count(b"HTTP/1.1 ") for name, answer in found.items()} == dict.fromkeys(AMBIGUOUS, 1)
    assert {name: answer[:12] for name, answer in found.items()} == dict.fromkeys(AMBIGUOUS, b"HTTP/1.1 400")
    assert not [head for head in seen if b"/v2/models" in head]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:8500/8501", "a:99999", "http://a:8500", "a b:1"])
def test_invalid_backend_address_raises_settings_error(text: str) -> None:
    with pytest.raises(SettingsError, match="a backend must be written HOST:PORT"):
        RouteSettings(backends=(text,))


def test_router_on_a_public_address_requires_a_token() -> None:
    with pytest.raises(SettingsError, match="needs a token"):
        Listen(host="0.0.0.0")
    with pytest.raises(SettingsError, match="needs a token"):
        Listen(manage_host="0.0.0.0")
    with pytest.raises(SettingsError, match="a router needs at least one backend"):
        Router(RouteSettings(listen=Listen(http=0, grpc=0, manage=0))).start()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example", "Content-Type": "application/json"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Content-Type": "application/json"}, 403),
        ({"Host": "evil.example", "Content-Type": "application/json"}, 421),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_web_pages_cannot_manage_a_router(route: Route, headers: dict[str, str], status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as refused:
        port = refused.getsockname()[1]
    router = route(f"127.0.0.1:{port}/{port}/{port}")
    path, body = "/manage/backends", b'{"add": "127.0.0.1:1/2/3"}'
    assert httpx.post(router.manage_url + path, content=body, headers=headers).status_code == status
    public = httpx.post(router.url + path, content=body, headers={"Content-Type": "application/json"})
    assert public.status_code == 404
    assert list(backends_of(router)) == [f"127.0.0.1:{port}"]


@pytest.mark.root
def test_sigkill_of_a_server_on_another_host_loses_no_request(adder: Path, tmp_path: Path) -> None:
    publish(adder, tmp_path / "models" / "adder", 2)
    environment = {
        **os.environ,
        "MANYHANDS_TOKEN": "secret",
        "MANYHANDS_MANAGE_TOKEN": "other",
        "PYTHONWARNINGS": "ignore",
    }
    manyhands = [sys.executable, "-m", "manyhands", "serve", "--quiet"]
    rows = np.arange(3, dtype=np.float32).reshape(1, 3)
    programs: dict[int, subprocess.Popen[Any]] = {}
    stop = threading.Event()
    counts = {"http": 0, "grpc": 0}
    wrong: list[str] = []

    with NamespaceHosts(3) as hosts, contextlib.ExitStack() as stack:

        def serve(number: int) -> None:
            here = ["--host", hosts[number].address, "--manage-host", hosts[number].address]
            command = [*manyhands, str(tmp_path / "models"), "--on", "cpu", *here]
            # A container has 64 MB in /dev/shm; we need none of them.
            tiny = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm; exec "$@"', "sh"]
            programs[number] = hosts[number].popen([*tiny, *command], env=environment)
            stack.callback(end, programs[number])

        def load(kind: str, work: Callable[[], Any]) -> None:
            hosts[2].enter()
            while not stop.is_set():
                try:
                    good = work()
                except Exception as error:
                    wrong.append(f"{kind}: {error!r}"[:300])
                else:
                    counts[kind] += 1
                    if not good:
                        wrong.append(f"{kind}: another answer")

        def over_http() -> bool:
            answer = httpx.post(
                f"http://{hosts[2].address}:8501/v1/models/adder:predict",
                json={"instances": rows.tolist()},
                headers={"Authorization": "Bearer secret"},
                timeout=40,
                verify=False,  # reading all authorities of the world takes longer than the answer
            )
            answer.raise_for_status()
            return bool(answer.json() == {"predictions": (rows + 2).tolist()})

        channels: list[Any] = []

        def over_grpc() -> bool:
            if not channels:
                channels.append(grpc.insecure_channel(f"{hosts[2].address}:8500"))
            messages = tensorflow_grpc.MESSAGES
            asked = channels[0].unary_unary(
                "/tensorflow.serving.PredictionService/Predict",
                lambda message: message.SerializeToString(),
                messages["PredictResponse"].FromString,
            )
            request = messages["PredictRequest"](
                model_spec={"name": "adder"}, inputs={"x": tensor(rows, as_bytes=True)}
            )
            answer = asked(request, timeout=40, metadata=[("authorization", "Bearer secret")])
            return list(answer.outputs["output"].float_val) == (rows + 2).ravel().tolist()

        serve(0)
        serve(1)
        backends = ",".join(f"{host.name}:8500" for host in hosts[:2])
        command = [*manyhands, "--router", "--host", hosts[2].address, "--backends", backends]
        router = hosts[2].popen([*command, "--log", str(tmp_path / "log")], env=environment)
        stack.callback(end, router)

        asked: list[dict[str, Any]] = [{}]

        def ask() -> None:
            hosts[2].enter()
            headers = {"Authorization": "Bearer other"}
            while not stop.is_set():
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    told = httpx.get("http://127.0.0.1:8502/manage/models", headers=headers, timeout=10, verify=False)
                    asked[0] = told.json()
                stop.wait(0.1)

        def num_up() -> int:
            return sum(backend["up"] for backend in asked[0].get("backends", []))

        threads = [threading.Thread(target=ask)]
        stack.callback(lambda: [channel.close() for channel in channels])
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        threads[0].start()
        until(lambda: num_up() == 2)
        for kind, work in (("http", over_http), ("grpc", over_grpc)):
            threads.append(threading.Thread(target=load, args=(kind, work)))
            threads[-1].start()
        until(lambda: min(counts.values()) > 20)
        # A backend whose link is down does not answer; its requests are retried on the other one.
        hosts[0].link_down()
        until(lambda: num_up() == 1)
        before = dict(counts)
        until(lambda: all(counts[kind] > before[kind] + 20 for kind in counts))
        # A server that comes takes load.
        hosts[0].link_up()
        until(lambda: num_up() == 2)
        answered = {backend["address"]: backend["answered"] for backend in asked[0]["backends"]}
        until(
            lambda: all(
                backend["answered"] > answered[backend["address"]] + 20 for backend in asked[0].get("backends", [])
            )
        )
        kill(programs[0])
        before = dict(counts)
        until(lambda: all(counts[kind] > before[kind] + 50 for kind in counts))
        until(lambda: num_up() == 1)
        stop.set()
    assert not wrong, wrong[:5]


def kill(program: subprocess.Popen[Any]) -> None:
    """kill -9 of a server and of what it started, as when a host's power fails."""
    import psutil

    for process in [*psutil.Process(program.pid).children(recursive=True), psutil.Process(program.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    program.wait()


def end(program: subprocess.Popen[Any]) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(program.pid).children(recursive=True)
        program.terminate()
        program.wait(120)
        psutil.wait_procs(below, 60)


@contextlib.contextmanager
def managed(body: bytes) -> Iterator[str]:
    """Yield the address of a backend that is ready, and whose management answers this to everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}/{server.server_port}/{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"labels": [], "splits": {}}', b'{"labels": {"m": 1}, "splits": {}}',
     b'{"labels": {}, "splits": {"m": [{"model": 1}]}, "models": [{}]}'],
)  # fmt: skip
def test_malformed_answer_of_a_backend_does_not_affect_the_others(route: Route, body: bytes) -> None:
    usual = b'{"labels": {}, "splits": {}, "models": [], "ready": true}'
    with managed(body) as hostile, managed(usual) as honest:
        router = route(hostile, honest)
        until(lambda: all(one["up"] for one in backends_of(router).values()))
        with httpx.Client(base_url=router.manage_url) as http:
            assert http.get("/manage/models").json()["models"] == []
            with managed(usual) as later:
                assert http.post("/manage/backends", json={"add": later}).status_code == 200
                until(lambda: sum(one["up"] for one in backends_of(router).values()) == 3)
