"""The dashboard's server: loopback only, read-only, and no access beyond its folders."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.core import SettingsError
from manyhands.dashboard import Dashboard
from manyhands.dashboard.server import STATIC

from .logs import Written, a_run


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    a_run(tmp_path / "runs" / "first")
    with Dashboard([tmp_path / "runs"]) as dashboard:
        yield dashboard


def ask(dashboard: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_dashboard_listens_on_loopback_and_rejects_other_hosts(dashboard: Dashboard) -> None:
    assert dashboard.url == f"http://127.0.0.1:{dashboard.port}/"
    assert dashboard._http.socket.getsockname()[0] == "127.0.0.1"
    status, _, body = ask(dashboard, "/api/overview", Host="evil.example")
    assert status == 403
    assert b"runs" not in body
    assert ask(dashboard, "/api/overview", Host=f"localhost:{dashboard.port}")[0] == 200


def test_content_security_policy_forbids_external_resources(dashboard: Dashboard) -> None:
    for path in ("/", "/app.js", "/api/overview", "/nothing"):
        _, headers, body = ask(dashboard, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        if path == "/":
            assert b"http" not in body


def test_scripts_never_turn_text_into_markup_or_code() -> None:
    """Names and notices in logs come from others, so the page builds elements and sets their text."""
    scripts = [path for path in Path(str(STATIC)).rglob("*.js") if "vendor" not in path.parts]
    assert len(scripts) > 5
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|document\.write|createContextualFragment|DOMParser"
        r"|\beval\(|new Function|srcdoc|javascript:"
    )
    assert {path.name: forbidden.findall(path.read_text()) for path in scripts} == {path.name: [] for path in scripts}


def test_index_preloads_every_module() -> None:
    """Otherwise the browser finds modules level by level, with a round trip for each."""
    base = Path(str(STATIC))
    modules = {path.relative_to(base).as_posix() for path in base.rglob("*.js") if "vendor" not in path.parts}
    page = (base / "index.html").read_text()
    preloaded = re.findall(r'<link rel="modulepreload" href="([^"]+)">', page)
    assert sorted(preloaded) == sorted(modules - {"app.js"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_write_methods_are_not_implemented(dashboard: Dashboard, method: str) -> None:
    assert ask(dashboard, "/api/run?id=runs/first", method)[0] == 501


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py", "/static/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/vendor/../../server.py",
        "/api/run", "/api/run?id=runs/none", "/api/run?id=../runs/first", "/api/study?id=runs/first", "/api/secrets",
    ],
)  # fmt: skip
def test_unknown_and_traversal_paths_return_404(dashboard: Dashboard, path: str) -> None:
    assert ask(dashboard, path)[0] == 404


@pytest.mark.parametrize("target", ["http://[", "//\u2100"])
def test_a_malformed_url_is_refused_and_prints_nothing(
    dashboard: Dashboard, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any user of the machine could otherwise fill the terminal with tracebacks."""
    with socket.create_connection(("127.0.0.1", dashboard.port), 10) as client:
        head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{dashboard.port}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode())
        assert client.makefile("rb").read().split()[1] in (b"400", b"404")
    assert capfd.readouterr().err == ""


def test_symbolic_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    a_run(tmp_path / "elsewhere" / "secret")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    with Dashboard([tmp_path / "runs"]) as dashboard:
        assert json.loads(ask(dashboard, "/api/overview")[2])["ids"] == []


def test_live_stream_sends_updates(dashboard: Dashboard, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{dashboard.url}api/live", timeout=30) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        first = int(_next(stream).removeprefix(b"data: "))
        live = Written(tmp_path / "runs" / "live")
        live.start()
        while int(_next(stream).removeprefix(b"data: ")) <= first:
            pass
        while "runs/live" not in json.loads(ask(dashboard, f"/api/overview?since={first}")[2])["ids"]:
            _next(stream)
        live.close()


def _next(stream: http.client.HTTPResponse) -> bytes:
    while True:
        line = stream.readline()
        if line.startswith(b"data: "):
            return line


def num_threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_number_of_threads_is_bounded_under_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say nothing, and such that never end a request, give way to one that is complete."""
    monkeypatch.setattr("manyhands.dashboard.server.MOST_CONNECTIONS", 8)
    with Dashboard([tmp_path]) as dashboard, contextlib.ExitStack() as stack:
        for number in range(50):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", dashboard.port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: " if number % 2 else b"")
        assert ask(dashboard, "/")[0] == 200
        assert num_threads() <= 8


def test_active_connections_are_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.dashboard.server.MOST_CONNECTIONS", 2)
    with Dashboard([tmp_path]) as dashboard:
        streams = [urllib.request.urlopen(f"{dashboard.url}api/live", timeout=30) for _ in range(2)]
        for stream in streams:
            _next(stream)
        status, headers, _ = ask(dashboard, "/")
        assert (status, headers["Retry-After"]) == (503, "1")
        # Threads of refused connections, also of an earlier test, end a moment after their answers.
        deadline = time.monotonic() + 30
        while num_threads() != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for stream in streams:
            stream.close()


def test_slow_request_is_closed_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes long before a read would time out."""
    monkeypatch.setattr("manyhands.dashboard.server.REQUEST_SECONDS", 0.3)

    def drip(client: socket.socket) -> None:
        for byte in b"GET / HTTP/1.1\r\nHost: " + bytes(500):
            client.sendall(bytes([byte]))
            time.sleep(0.01)

    with Dashboard([tmp_path]) as dashboard:
        client = socket.create_connection(("127.0.0.1", dashboard.port))
        with client, pytest.raises(OSError, match="Broken pipe|reset"):
            drip(client)


def test_invalid_port_or_server_url_raises_settings_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingsError, match="the port must be free"):
        Dashboard([], port=taken.getsockname()[1])
    with pytest.raises(SettingsError, match="the port must be free, but got 127.0.0.1:99999"):
        Dashboard([], port=99999)
    with pytest.raises(SettingsError, match="the address of a server must be a URL"):
        Dashboard([], servers=["file:///etc/passwd"])


def test_dashboard_command_serves_and_exits_on_sigterm(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "first")
    words = [sys.executable, "-m", "manyhands", "dashboard", "--port", "0", "--no-open"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        while True:
            with urllib.request.urlopen(f"{url}api/overview", timeout=30) as answer:
                if json.load(answer)["ids"] == ["runs/first"]:
                    break
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


def test_missing_folder_exits_with_code_2(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from manyhands.cli.app import app

    done = CliRunner().invoke(app, ["dashboard", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "the dashboard needs existing folders of runs or studies" in done.output
