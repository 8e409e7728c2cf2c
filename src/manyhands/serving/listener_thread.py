"""Base of servers and routers, which run on an event loop in a background thread until they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..core import SettingsError, event
from .app import Access
from .grpc_process import GrpcProcess
from .heap import Heap, keep_memory
from .http import HttpListener
from .limits import Bodies, Limits
from .logs import Logs
from .protocols import GrpcListener
from .scheduling import shorten_slice
from .security import AccessToken, ServingTls, Sites, is_loopback

SWITCH_SECONDS = 0.0005
"""Seconds that another thread may hold the GIL while the event loop waits for it; a tenth of Python's default."""
FLUSH_SECONDS = 1.0
"""Maximum delay in seconds of the access log."""


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Addresses, ports and access control of a server or router."""

    host: str = "127.0.0.1"
    http: int = 8501
    """The port of both REST protocols; 0 for any free port."""
    grpc: int = 8500
    """The port of both gRPC protocols."""
    manage: int = 8502
    """The port of the management interface."""
    manage_host: str = "127.0.0.1"
    """Address of the management interface; local by default. A router on another host needs another one."""
    token: str | None = field(default=None, repr=False)
    """Token that clients must send as `Authorization: Bearer ...`; required if other hosts can reach the server."""
    manage_token: str | None = field(default=None, repr=False)
    """Token of the management interface, which does not accept `token`."""
    allow: tuple[str, ...] = ()
    """Further names of this server in URLs, and origins (`https://...`) of web pages that may ask its models.

    No web page of another origin may use the management interface."""
    tls: ServingTls | None = None
    """TLS certificate of all listeners."""
    timeout: float = 30.0
    """Maximum seconds per request."""
    patience: float = 25.0
    """Seconds for in-flight requests to finish when a version is unloaded or the server stops."""
    limits: Limits = field(default_factory=Limits)
    log: Path | None = None
    """Folder for events.jsonl and access.jsonl."""

    def __post_init__(self) -> None:
        self._require_tokens()
        if self.tls is not None:
            self.tls.for_server  # noqa: B018 - an unreadable certificate raises at once
        for name, port in (("http", self.http), ("grpc", self.grpc), ("manage", self.manage)):
            if not 0 <= port < 65536:
                raise SettingsError(f"{name} must be a port number", got=port, remedy=f"pass for example {name}=8501")
        if self.timeout <= 0:
            raise SettingsError("timeout must be above 0", got=self.timeout, remedy="pass a number of seconds")

    def _require_tokens(self) -> None:
        needed = (
            ("a server", self.host, self.token, "MANYHANDS_TOKEN"),
            ("management", self.manage_host, self.manage_token, "MANYHANDS_MANAGE_TOKEN"),
        )
        for what, host, token, variable in needed:
            if not is_loopback(host) and not token:
                raise SettingsError(
                    f"{what} that is reachable from other hosts needs a token",
                    got=f"host={host}",
                    remedy=f"set {variable}, or listen on 127.0.0.1",
                )
        if self.token and self.token == self.manage_token:
            raise SettingsError(
                "the tokens for requests and for management must differ",
                got="the same value for both",
                remedy="set MANYHANDS_MANAGE_TOKEN to another value",
            )

    @property
    def access(self) -> Access:
        """Access rules of the inference interface."""
        return Access(AccessToken(self.token), Sites(self.host, self.allow, checks_host=not self.token))

    @property
    def manage_access(self) -> Access:
        """Access rules of the management interface; it is closed if `token` is set but `manage_token` is not."""
        sites = Sites(self.manage_host, self.allow, takes_pages=False)
        return Access(AccessToken(self.manage_token, "management token"), sites, self.closed)

    @property
    def closed(self) -> str:
        """The reason why management is closed, or "" if it is open."""
        return CLOSED if self.token and not self.manage_token else ""


CLOSED = (
    "management is closed: this server has a token for requests and none for management; set MANYHANDS_MANAGE_TOKEN"
)


class Background(ABC):
    """Run `serve` on an event loop in a background thread, with methods to start, wait and stop."""

    def __init__(self, settings: ListenSettings) -> None:
        self.http = self.grpc = self.manage = 0
        """The ports in use."""
        self._listening = settings
        self.on_event: Callable[[dict[str, Any]], None] = lambda entry: None
        self._log = Logs(settings.log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._over = threading.Event()

    @abstractmethod
    async def serve(self, stopping: asyncio.Event, is_up: Callable[[], None]) -> None:
        """Serve until `stopping` is set; call `is_up` once requests are answered."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of everything that is served, with metrics."""

    @property
    def url(self) -> str:
        """Base URL of the inference interface."""
        return f"{self._scheme}://{self._listening.host}:{self.http}"

    @property
    def manage_url(self) -> str:
        """Base URL of the management interface."""
        return f"{self._scheme}://{self._listening.manage_host}:{self.manage}"

    def start(self) -> Self:
        """Start the thread and return once requests are answered; raises the error that prevented it."""
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="manyhands-server", daemon=True).start()
        started.result()
        return self

    def stop(self) -> None:
        """Stop gracefully: become unready, drain in-flight requests, then unload the models."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._over.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the server has ended and return whether it has; Ctrl-C stops it as `stop` does."""
        try:
            return self._over.wait(seconds)
        except KeyboardInterrupt:
            self.stop()
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, started: Future[None]) -> None:
        import uvloop

        shorten_slice()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._work(started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
        finally:
            self._log.close()
            self._over.set()

    async def _work(self, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        # Exclude everything loaded so far, such as torch, from garbage collection, which would delay requests.
        gc.collect()
        gc.freeze()
        keep_memory()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        flushing = asyncio.create_task(self._tidy_up())
        try:
            await self.serve(self._stopping, lambda: started.set_result(None))
        finally:
            flushing.cancel()
            sys.setswitchinterval(interval)
            gc.unfreeze()

    async def _tidy_up(self) -> None:
        """Write the access log and return free memory to the system, again and again."""
        heap = Heap()
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self._log.flush()
            await heap.trim()

    def _emit(self, kind: str, **values: Any) -> None:
        entry = event(kind, **values)
        self._log.event(entry)
        self.on_event(entry)

    async def _listen(self, public: HttpListener, remote: GrpcListener | GrpcProcess, private: HttpListener) -> None:
        settings = self._listening
        public.bodies = private.bodies = remote.bodies = Bodies(settings.limits.bodies)
        if settings.log is not None:
            public.on_answer, remote.on_answer = self._log.access, partial(self._log.call, "gRPC")
        self.http = await opened(public, settings.host, settings.http)
        self.grpc = await opened(remote, settings.host, settings.grpc)
        self.manage = await opened(private, settings.manage_host, settings.manage)

    async def _drain(self, public: HttpListener, remote: GrpcListener | GrpcProcess) -> None:
        """Stop accepting requests and let those in flight finish."""
        public.stop_listening()
        until = time.monotonic() + self._listening.patience
        await remote.close(self._listening.patience)
        while public.num_busy and time.monotonic() < until:
            await asyncio.sleep(0.005)

    @property
    def _scheme(self) -> str:
        return "http" if self._listening.tls is None else "https"


async def opened(listener: HttpListener | GrpcListener | GrpcProcess, host: str, port: int) -> int:
    """Open a listener and return its port; raises SettingsError if the port is in use."""
    try:
        return await listener.open(host, port)
    except OSError as error:
        raise SettingsError(
            "the port must be free",
            got=f"{host}:{port} ({error.strerror or error})",
            remedy="pass another port, or 0 for any free port",
        ) from None
