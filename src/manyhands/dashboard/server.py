"""The dashboard's web server, which is read-only and reachable from this machine only."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
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
"""Pattern of a stamp in a request."""
MOST_STREAMS = 64
"""Maximum number of pages that receive live updates."""
MOST_CONNECTIONS = 2 * MOST_STREAMS
"""Maximum number of connections, each of which has a thread."""
REQUEST_SECONDS = 30.0
"""Maximum seconds until a connection has sent the head of a request, and for each read and write."""
END_SECONDS = 1.0
"""Maximum seconds that an evicted connection's thread may take to end."""
QUIET_SECONDS = 10.0
"""Seconds without changes after which a stream sends a comment, by which it detects a closed connection."""


class Dashboard:
    """Serve the dashboard of some folders in background threads, on 127.0.0.1 only, until it is closed.

    Args:
        folders: Folders with runs, studies and logs; their subfolders are searched too.
        port: Port; 0 for any free port.
        servers: URLs of running servers or routers, whose metrics are shown.

    Raises:
        SettingsError: The port is in use, or the address of a server is not a URL.

    Example:
        with Dashboard(["runs"]) as dashboard:
            print(dashboard.url)
    """

    def __init__(self, folders: Sequence[str | Path], *, port: int = 0, servers: Sequence[str] = ()) -> None:
        for url in servers:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise SettingsError(
                    "the address of a server must be a URL",
                    got=repr(url),
                    remedy="write for example http://127.0.0.1:8501",
                )
        self.library = Library([Path(folder) for folder in folders], servers)
        self.closing = threading.Event()
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        try:
            self._http = _DashboardServer((HOST, port), self)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(
                "the port must be free",
                got=f"{HOST}:{port} ({reason})",
                remedy="pass another port, or 0 for any free port",
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
        """Close the listening socket and end the threads of the dashboard."""
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
        """Return the data of an API path as JSON-ready values; None if there is no such path or source."""
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
        """Send every new stamp to a page with `send`, until that raises or the dashboard closes.

        If `MOST_STREAMS` pages receive updates already, this returns at once.
        """
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


FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _DashboardServer(ThreadingHTTPServer):
    """HTTP server with a thread per connection and at most `MOST_CONNECTIONS` connections."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._waiting: dict[socket.socket, float] = {}
        """Connections without a complete request, each with the time at which it began to wait; the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)
        port = self.server_address[1]
        self.names = {f"{name}:{port}" for name in (HOST, "localhost")}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a new connection.

        If there are too many connections, the one that has waited longest for a complete request is closed first; if
        there is none, the new connection gets a 503.
        """
        has_room = self._free.acquire(blocking=False)
        if not has_room and self._end_waiting(before=float("inf")):
            has_room = self._free.acquire(timeout=END_SECONDS)
        if not has_room:
            with contextlib.suppress(OSError):
                request.send(FULL)
            self.shutdown_request(request)
            return
        self.start_waiting(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            # The thread could not be started.
            self._end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def service_actions(self) -> None:
        """Close connections that have waited too long for a complete request; called periodically."""
        while self._end_waiting(before=time.monotonic() - REQUEST_SECONDS):
            pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error of the dashboard, but nothing if a client has closed its connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def start_waiting(self, connection: socket.socket) -> None:
        """Record that a connection has no complete request now, so that it may be closed for another one."""
        with self._lock:
            self._waiting.setdefault(connection, time.monotonic())

    def stop_waiting(self, connection: socket.socket) -> None:
        """Record that a request of a connection is being answered, so that the connection is not closed."""
        with self._lock:
            self._waiting.pop(connection, None)

    def _end_waiting(self, before: float) -> bool:
        """Close the connection that has waited longest, if it has waited since before a time; return whether one was.

        `before` is a time of `time.monotonic`.
        """
        with self._lock:
            connection, since = next(iter(self._waiting.items()), (None, before))
            if connection is None or since >= before:
                return False
            del self._waiting[connection]
            # The connection's thread then reads the end of the input and closes the socket.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return True

    def _end(self, connection: socket.socket) -> None:
        """Stop counting a connection whose thread has ended."""
        self.stop_waiting(connection)
        self._free.release()


class _Handler(BaseHTTPRequestHandler):
    """Answer the requests of a connection: static files, data of the API, and live updates."""

    server: _DashboardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "manyhands", ""
    timeout = REQUEST_SECONDS
    disable_nagle_algorithm = True
    """Otherwise a body may wait for the client's delayed acknowledgement of the head."""

    def handle_one_request(self) -> None:
        self.server.start_waiting(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_parsed = super().parse_request()
        self.server.stop_waiting(self.connection)
        return is_parsed

    def do_GET(self) -> None:
        # DNS rebinding: a web page whose host name resolves to this machine must not read the data.
        if self.headers.get("Host", "") not in self.server.names:
            self._send(403, b"open it as http://127.0.0.1", "text/plain")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(400, b"not a URL", "text/plain")
            return
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
        """Answer with one of the static files, or with 404."""
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
        """Send live updates as server-sent events until the client disconnects."""
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
        """Do nothing: requests are not logged."""


def _static_files() -> dict[str, bytes]:
    """Return the contents of the static files by path; they are read once, so that no other file can be requested."""
    if not _STATIC:
        base = Path(str(STATIC))
        _STATIC.update({str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()})
    return _STATIC


_STATIC: dict[str, bytes] = {}
