"""TLS on every listener: who is let in, and what a mistake with certificates says."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from manyhands.core import RequestRefused, SettingsError
from manyhands.serving import Client, Router, RouteSettings, Server, ServeSettings, ServingTls
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


def test_every_listener_is_encrypted_and_clients_need_certificates(start: Start, pem: Names) -> None:
    ours = ServingTls(cert=pem("server.pem"), key=pem("server.key"), ca=pem("ca.pem"))
    server = start({"moody": Moody()}, tls=ours)
    ends = {"ca": pem("ca.pem"), "cert": pem("client.pem"), "key": pem("client.key")}
    backend = f"127.0.0.1:{server.grpc}/{server.http}/{server.manage}"
    settings = RouteSettings(backends=(backend,), backend_tls=ours, tls=ours, http=0, grpc=0, manage=0)
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
            with pytest.raises(SettingsError, match="signed by somebody who is known"):
                stranger.models()
            nameless = Client(place.url, manage=place.manage_url, timeout=1, ca=pem("ca.pem"))
            with pytest.raises(RequestRefused):
                nameless.models()
            for each in (stranger, nameless):
                each.close()


@pytest.mark.parametrize(
    ("cert", "key", "ca", "error"),
    [
        ("server.pem", None, None, "a certificate and its key belong together"),
        (None, "server.key", None, "a certificate and its key belong together"),
        ("server.pem", "nowhere.key", None, "key is a file"),
        ("server.pem", "client.key", None, "PEM files that belong together"),
        ("server.key", "server.key", None, "PEM files that belong together"),
        ("server.pem", "server.key", "ca.key", "an authority is a PEM file"),
        (None, None, "ca.pem", "a server with TLS needs a certificate"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    pem: Names, cert: str | None, key: str | None, ca: str | None, error: str
) -> None:
    files = [pem(name) if name is not None else None for name in (cert, key, ca)]
    with pytest.raises(SettingsError, match=error):
        ServeSettings(tls=ServingTls.of(*files))


def test_a_key_with_a_password_does_not_ask_for_it(pem: Names, tmp_path: Path) -> None:
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
    with pytest.raises(SettingsError, match="without a password"):
        ServeSettings(tls=ServingTls.of(pem("server.pem"), locked, None))
