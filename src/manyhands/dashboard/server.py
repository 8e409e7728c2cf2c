"""Dashboard: a small read-only web server for one machine."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..core import SettingsError
from .log_source import dump
from .run_library import Library

HOST = "127.0.0.1"
STATIC = files(__package__) / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SINCE = re.compile(r"[0-9]{1,18}")
"""Pattern of a stamp."""
MOST_STREAMS = 64
QUIET_SECONDS = 10.0
"""Seconds without changes after which a stream sends a keep-alive, which detects closed connections."""


class Dashboard:
    """Serve the page for some folders, on this machine only, until it is closed.

    with Dashboard(["runs"]) as dashboard:
        print(dashboard.url)
    """

    def __init__(self, folders: Sequence[str | Path], *, port: int = 0, servers: Sequence[str] = ()) -> None:
        for url in servers:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise SettingsError(
                    "a server is named by its address", got=repr(url), remedy="write http://127.0.0.1:8501"
                )
        self.library = Library([Path(folder) for folder in folders], servers)
        self.closing = threading.Event()
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        try:
            self._http = _Server((HOST, port), self)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(
                "the port must be free", got=f"{HOST}:{port} ({reason})", remedy="pass another, or 0 for any"
            ) from None
        self.port = int(self._http.server_address[1])
        self.url = f"http://{HOST}:{self.port}/"
        self._threads = [
            threading.Thread(target=self.library.run, args=(self.closing,), name="dashboard-library"),
            threading.Thread(target=self._http.serve_forever, args=(0.05,), name="dashboard-http"),
        ]
        if servers:
            watch = threading.Thread(target=self.library.watch_servers, args=(self.closing,), name="dashboard-servers")
            self._threads.append(watch)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        self.closing.set()
        with self.library.has_changed:
            self.library.has_changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- responses ------------------------------------------------------------------------------------------------

    def answer(self, path: str, query: dict[str, str]) -> dict[str, Any] | list[Any] | None:
        """Return the data of an API path; None if there is no such path."""
        library = self.library
        with library.turn():
            if path == "/api/overview":
                since = query.get("since", "0")
                return library.overview(int(since) if SINCE.fullmatch(since) else 0)
            if path in ("/api/run", "/api/study", "/api/log"):
                return library.detail(query.get("id", ""), path.removeprefix("/api/"))
            if path == "/api/plans":
                return library.plans()
            if path == "/api/cluster":
                return library.cluster()
            if path == "/api/servers":
                return [metrics.to_dict() for metrics in library.servers]
        return None

    def stream(self, send: Callable[[bytes], None]) -> None:
        """Send every new stamp to a page until it disconnects or the dashboard closes."""
        library, seen = self.library, -1
        if not self._streams.acquire(blocking=False):
            return
        try:
            while not self.closing.is_set():
                with library.has_changed:
                    if library.stamp == seen:
                        library.has_changed.wait(QUIET_SECONDS)
                    stamp = library.stamp
                send(b": still here\n\n" if stamp == seen else b"data: %d\n\n" % stamp)
                seen = stamp
                self.closing.wait(0.25)
        finally:
            self._streams.release()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        super().__init__(address, _Handler)
        port = self.server_address[1]
        self.names = {f"{name}:{port}" for name in (HOST, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "manyhands", ""
    timeout = 30

    def do_GET(self) -> None:
        # Protects against DNS rebinding: a site whose name resolves to this host must not read the data.
        if self.headers.get("Host", "") not in self.server.names:
            self._send(403, b"open it as http://127.0.0.1", "text/plain")
            return
        url = urlsplit(self.path)
        if url.path == "/api/live":
            self._stream()
        elif url.path.startswith("/api/"):
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            found = self.server.dashboard.answer(url.path, query)
            if found is None:
                self._send(404, b'{"error": "not found"}', "application/json")
            else:
                self._send(200, dump(found), "application/json")
        else:
            self._static(url.path)

    def _static(self, path: str) -> None:
        known = _static_files()
        name = path.removeprefix("/") or "index.html"
        if name in known:
            self._send(200, known[name], KINDS.get(Path(name).suffix, "text/plain"))
        else:
            self._send(404, b"not found", "text/plain")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.server.dashboard.stream(self._write)

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _static_files() -> dict[str, bytes]:
    """Return the page's static files by name; no other file can be requested."""
    if not _STATIC:
        base = Path(str(STATIC))
        _STATIC.update({str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()})
    return _STATIC


_STATIC: dict[str, bytes] = {}
