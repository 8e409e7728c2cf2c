"""TLS on every listener: which clients are accepted, and errors about certificates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from manyhands.core import RequestRefused, SettingsError
from manyhands.serving import Client, Listen, Router, RouteSettings, Server, ServingTls
from manyhands.serving.http_listener import _MAX_HANDSHAKES, HttpListener
from manyhands.serving.limits import Limits
from manyhands.serving.protocols import health_grpc

from .conftest import Start
from .test_versions import Moody

Names = Callable[[str], Path]


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Names:
    """An authority, and certificates that it signed for a server and for a client."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    for name in ("server", "client"):
        names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key"]
        openssl(
            "req",
            "-x509",
            *key,
            *signer,
            *names,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
        )
    return lambda name: folder / name


def health(server: Server | Router, credentials: grpc.ChannelCredentials) -> int:
    messages = health_grpc.MESSAGES
    with grpc.secure_channel(f"localhost:{server.grpc}", credentials) as channel:
        asked = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            lambda message: message.SerializeToString(),
            messages["HealthCheckResponse"].FromString,
        )
        return int(asked(messages["HealthCheckRequest"](), timeout=20).status)


def test_every_listener_uses_tls_and_requires_client_certificates(start: Start, pem: Names) -> None:
    ours = ServingTls(cert=pem("server.pem"), key=pem("server.key"), ca=pem("ca.pem"))
    files = {"cert": pem("server.pem"), "key": pem("server.key"), "client_ca": pem("ca.pem")}
    server = start({"moody": Moody()}, **files)
    ends = {"ca": pem("ca.pem"), "cert": pem("client.pem"), "key": pem("client.key")}
    backend = f"127.0.0.1:{server.grpc}/{server.http}/{server.manage}"
    settings = RouteSettings(backends=(backend,), backend_tls=ours, listen=Listen(http=0, grpc=0, manage=0, **files))
    rows = np.full((1, 1), 3.0, np.float32)
    with Router(settings).start() as router:
        for place in (server, router):
            assert place.url.startswith("https://127.0.0.1:")
            client = Client(place.url, manage=place.manage_url, timeout=5, **ends)
            assert client("moody", rows).tolist() == [[4.0]]
            assert client.models()["ready"]
            client.close()
            shown = ServingTls(**ends).grpc_client()
            assert health(place, shown) == health_grpc.SERVING
            with pytest.raises(grpc.RpcError):
                health(place, ServingTls(ca=pem("ca.pem")).grpc_client())
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                httpx.get(place.url, verify=ServingTls(ca=pem("ca.pem")).for_client)
            with pytest.raises(httpx.HTTPError):
                httpx.get(place.url.replace("https", "http"))
            stranger = Client(place.url, manage=place.manage_url, timeout=1)
            with pytest.raises(SettingsError, match="signed by a known authority"):
                stranger.models()
            nameless = Client(place.url, manage=place.manage_url, timeout=1, ca=pem("ca.pem"))
            with pytest.raises(RequestRefused):
                nameless.models()
            for each in (stranger, nameless):
                each.close()


@pytest.mark.parametrize(
    ("cert", "key", "ca", "error"),
    [
        ("server.pem", None, None, "a certificate and its key must be passed together"),
        (None, "server.key", None, "a certificate and its key must be passed together"),
        ("server.pem", "nowhere.key", None, "key must be a file"),
        ("server.pem", "client.key", None, "matching PEM files"),
        ("server.key", "server.key", None, "matching PEM files"),
        ("server.pem", "server.key", "ca.key", "authority must be a PEM file"),
        (None, None, "ca.pem", "a server with TLS needs a certificate"),
    ],
)
def test_invalid_certificate_files_raise_settings_error(
    pem: Names, cert: str | None, key: str | None, ca: str | None, error: str
) -> None:
    files = [pem(name) if name is not None else None for name in (cert, key, ca)]
    with pytest.raises(SettingsError, match=error):
        Listen(cert=files[0], key=files[1], client_ca=files[2])


def test_password_protected_key_is_rejected_without_prompting(pem: Names, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = [
        "openssl",
        "pkcs8",
        "-topk8",
        "-in",
        str(pem("server.key")),
        "-out",
        str(locked),
        "-passout",
        "pass:word",
    ]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SettingsError, match="the key has a password"):
        Listen(cert=pem("server.pem"), key=locked)


HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The first bytes of a ClientHello, whose rest never comes."""


async def half_open(port: int, num: int, address: str) -> list[socket.socket]:
    """Begin handshakes from an address."""
    loop, sockets = asyncio.get_running_loop(), []
    for _ in range(num):
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((address, 0))
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, HELLO)
        sockets.append(sock)
    return sockets


def is_ended(sock: socket.socket) -> bool:
    """Whether the listener has closed a connection."""
    try:
        return sock.recv(1000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def secured(pem: Names, **limits: int) -> HttpListener:
    tls = ServingTls(cert=pem("server.pem"), key=pem("server.key"))
    return HttpListener(lambda request: request.answer(200, b"done"), Limits(**limits), tls)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.7.1"])
def test_unfinished_handshakes_do_not_block_new_clients(
    pem: Names, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as may be under way, from the network of the client or from another one, and none of them times out."""
    monkeypatch.setattr("manyhands.serving.http_listener._HANDSHAKE_SECONDS", 1000.0)

    async def run() -> bytes:
        listener = secured(pem, receive=1000)
        port = await listener.open("127.0.0.1", 0)
        flood = await half_open(port, _MAX_HANDSHAKES, address)
        while listener.num_busy < _MAX_HANDSHAKES:
            await asyncio.sleep(0.001)
        context = ServingTls(ca=pem("ca.pem")).for_client
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await reader.readuntil(b"done")
        writer.close()
        assert sum(map(is_ended, flood)) == 1
        for sock in flood:
            sock.close()
        listener.close()
        return answer

    assert asyncio.run(asyncio.wait_for(run(), 60)).startswith(b"HTTP/1.1 200")


def test_handshakes_count_toward_the_per_network_connection_limit(pem: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.serving.http_listener._HANDSHAKE_SECONDS", 1000.0)

    async def run() -> list[bool]:
        listener = secured(pem, receive=1000, connections_per_address=8)
        port = await listener.open("127.0.0.1", 0)
        flood = await half_open(port, 20, "127.0.7.1")
        while sum(map(is_ended, flood)) < 12:
            await asyncio.sleep(0.001)
        ended = [is_ended(sock) for sock in flood]
        for sock in flood:
            sock.close()
        listener.close()
        return ended

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [True] * 12 + [False] * 8


def test_unfinished_handshake_times_out(pem: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other limit would end it."""
    monkeypatch.setattr("manyhands.serving.http_listener._HANDSHAKE_SECONDS", 0.2)

    async def run() -> int:
        listener = secured(pem, receive=1000, idle=1000)
        port = await listener.open("127.0.0.1", 0)
        (sock,) = await half_open(port, 1, "127.0.0.1")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1000) == b""
        sock.close()
        while listener.num_busy:
            await asyncio.sleep(0.001)
        listener.close()
        return len(listener.budget)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 0
