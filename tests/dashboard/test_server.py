"""The dashboard's server: for this machine only, read-only, and nothing beyond its own files."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.core import SettingsError
from manyhands.dashboard import Dashboard

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


def test_only_this_machine_is_answered(dashboard: Dashboard) -> None:
    assert dashboard.url == f"http://127.0.0.1:{dashboard.port}/"
    assert dashboard._http.socket.getsockname()[0] == "127.0.0.1"
    status, _, body = ask(dashboard, "/api/overview", Host="evil.example")
    assert status == 403
    assert b"runs" not in body
    assert ask(dashboard, "/api/overview", Host=f"localhost:{dashboard.port}")[0] == 200


def test_nothing_can_be_loaded_from_elsewhere(dashboard: Dashboard) -> None:
    for path in ("/", "/app.js", "/api/overview", "/nothing"):
        _, headers, body = ask(dashboard, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        if path == "/":
            assert b"http" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(dashboard: Dashboard, method: str) -> None:
    assert ask(dashboard, "/api/run?id=runs/first", method)[0] == 501


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py", "/static/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/vendor/../../server.py",
        "/api/run", "/api/run?id=runs/none", "/api/run?id=../runs/first", "/api/study?id=runs/first", "/api/secrets",
    ],
)  # fmt: skip
def test_what_is_not_there_is_not_found(dashboard: Dashboard, path: str) -> None:
    assert ask(dashboard, path)[0] == 404


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    a_run(tmp_path / "elsewhere" / "secret")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    with Dashboard([tmp_path / "runs"]) as dashboard:
        assert json.loads(ask(dashboard, "/api/overview")[2])["ids"] == []


def test_news_arrive_while_somebody_listens(dashboard: Dashboard, tmp_path: Path) -> None:
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


def test_mistakes_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingsError, match="the port must be free"):
        Dashboard([], port=taken.getsockname()[1])
    with pytest.raises(SettingsError, match="the port must be free, but got 127.0.0.1:99999"):
        Dashboard([], port=99999)
    with pytest.raises(SettingsError, match="a server is named by its address"):
        Dashboard([], servers=["file:///etc/passwd"])


def test_the_command_line_serves_and_ends(tmp_path: Path) -> None:
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
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from manyhands.cli.app import app

    done = CliRunner().invoke(app, ["dashboard", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "the dashboard shows folders" in done.output
