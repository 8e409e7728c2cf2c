"""Access control of listeners: origins, hosts and DNS rebinding."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from manyhands.serving import Listen
from manyhands.serving.app import Access
from manyhands.serving.security import AccessToken, Sites

from .conftest import Start, publish


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {}, None),
        ("127.0.0.1", {"host": "localhost:8502"}, None),
        ("127.0.0.1", {"host": "127.0.0.1:1"}, None),
        ("127.0.0.1", {"host": "[::1]:8502"}, None),
        ("127.0.0.1", {"host": "LOCALHOST"}, None),
        ("127.0.0.1", {"host": "evil.example"}, 421),
        ("127.0.0.1", {"host": "localhost.evil.example:8502"}, 421),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}, 421),
        ("127.0.0.1", {"host": ""}, 421),
        ("127.0.0.1", {"host": "[localhost].evil.example"}, 421),
        ("127.0.0.1", {"host": "[::1].evil.example"}, 421),
        ("127.0.0.1", {"host": "[fe80::1%evil.example]"}, 421),
        ("127.0.0.1", {"host": "localhost."}, 421),
        ("0.0.0.0", {"host": "[2001:db8::1]:8502"}, None),
        ("0.0.0.0", {"host": "10.0.0.5:8502"}, None),
        ("0.0.0.0", {"host": "evil.example"}, 421),
        ("a.example", {"host": "a.example:8502"}, None),
        ("127.0.0.1", {"host": "models.example"}, None),
        ("127.0.0.1", {"host": "localhost:1", "origin": "http://localhost:1"}, None),
        ("127.0.0.1", {"host": "localhost:1", "origin": "http://localhost:2"}, 403),
        ("127.0.0.1", {"host": "localhost:1", "origin": "https://app.example"}, None),
        ("127.0.0.1", {"host": "localhost:1", "origin": "https://evil.example"}, 403),
        ("127.0.0.1", {"host": "localhost:1", "origin": "null"}, 403),
        ("127.0.0.1", {"host": "evil.example", "origin": "http://evil.example"}, 421),
        ("127.0.0.1", {"host": "localhost:1", "sec-fetch-site": "none"}, None),
        ("127.0.0.1", {"host": "localhost:1", "sec-fetch-site": "same-origin"}, None),
        ("127.0.0.1", {"host": "localhost:1", "sec-fetch-site": "same-site"}, 403),
        ("127.0.0.1", {"host": "localhost:1", "sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_host_and_origin_headers_are_checked(host: str, headers: dict[str, str], status: int | None) -> None:
    sites = Sites(host, ("models.example", "https://app.example/"))
    refusal = sites.refusal({name.encode(): value.encode() for name, value in headers.items()})
    assert (refusal and refusal[0]) == status
    assert refusal is None or "--allow" in refusal[1] or "Sec-Fetch-Site" in refusal[1]


def test_listener_with_token_accepts_any_host_but_checks_origin() -> None:
    sites = Sites("0.0.0.0", checks_host=False)
    assert sites.refusal({b"host": b"models.example"}) is None
    refusal = sites.refusal({b"host": b"models.example", b"origin": b"https://evil.example"})
    assert refusal is not None


def test_web_pages_read_neither_models_nor_routing(start: Start, adder: Path, tmp_path: Path) -> None:
    publish(adder, tmp_path / "adder", 1)
    server = start(tmp_path)
    pages = [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ]
    for path in ("/manage/models", "/manage/routing"):
        assert httpx.get(server.manage_url + path).status_code == 200
        assert httpx.get(server.url + path).status_code == 404
        for headers, status in pages:
            assert httpx.get(server.manage_url + path, headers=headers).status_code == status


def test_health_endpoint_needs_no_token_and_management_does() -> None:
    access = Access(AccessToken("a"), Sites("127.0.0.1"), "closed for now")
    assert access("/v2/health/live", {b"host": b"evil.example"}) is None
    assert access("/manage/models", {b"authorization": b"Bearer a"}) == (403, "closed for now")
    access = Access(AccessToken("a", "management token"), Sites("127.0.0.1"))
    assert access("/manage/models", {b"authorization": b"Bearer a"}) is None
    for said in (b"", b"Bearer", b"Bearer b", b"bearer a", b"Bearer a "):
        refusal = access("/manage/models", {b"authorization": said})
        assert refusal is not None
        assert refusal[0] == 401
        assert "management token" in refusal[1]


def test_tokens_are_in_no_log_argument_environment_or_error(start: Start, adder: Path, tmp_path: Path) -> None:
    tokens = ["a-token-for-requests-4711", "a-token-for-management-4712"]
    publish(adder, tmp_path / "models" / "adder", 1)
    log = tmp_path / "log"
    server = start(tmp_path / "models", token=tokens[0], manage_token=tokens[1], log=log)
    texts = []
    for url, right in ((server.url, tokens[0]), (server.manage_url, tokens[1])):
        for token in (right, right[:-1], f"{right}x"):
            path = "/v2/models/adder" if right is tokens[0] else "/manage/models"
            answer = httpx.get(f"{url}{path}?token={token}", headers={"Authorization": f"Bearer {token}"})
            assert (answer.status_code == 200) == (token == right)
            texts.append(answer.text)
    for child in psutil.Process().children(recursive=True):
        texts += [" ".join(child.cmdline()), *child.environ().values()]
    server.stop()
    logged = "".join(path.read_text() for path in log.iterdir())
    assert "/v2/models/adder" in logged
    assert not [token for token in tokens if token[:-1] in logged + "".join(texts)]
    assert not [token for token in tokens if token in repr(Listen(token=tokens[0], manage_token=tokens[1]))]
