"""Base of servers and routers, which run on an event loop in a background thread until they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from ..core import SettingsError, event
from .app import Access
from .grpc_process import GrpcProcess
from .heap import Heap, keep_memory
from .http_listener import HttpListener
from .limits import Bodies
from .logs import Logs
from .options import Listen, ServingLog
from .protocols import GrpcListener
from .scheduling import shorten_slice
from .security import AccessToken, Sites

SWITCH_SECONDS = 0.0005
"""Seconds that another thread may hold the GIL while the event loop waits for it; a tenth of Python's default."""
FLUSH_SECONDS = 1.0
"""Maximum delay in seconds of the access log."""


CLOSED = (
    "management is closed: this server has a token for requests and none for management; set MANYHANDS_MANAGE_TOKEN"
)


def access_of(listen: Listen) -> Access:
    """Return the access rules for requests."""
    return Access(AccessToken(listen.token), Sites(listen.host, listen.allow, checks_host=not listen.token))


def manage_access_of(listen: Listen) -> Access:
    """Return the access rules for management, which is closed if there is a token for requests only."""
    sites = Sites(listen.manage_host, listen.allow, takes_pages=False)
    return Access(AccessToken(listen.manage_token, "management token"), sites, why_closed(listen))


def why_closed(listen: Listen) -> str:
    """Return the reason why management is closed, or "" if it is open."""
    return CLOSED if listen.token and not listen.manage_token else ""


class _Terminated(BaseException):
    """Raised by a SIGTERM, to interrupt a wait."""


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Raise `_Terminated` on SIGTERM, in the main thread of a program that does not handle it itself."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Background(ABC):
    """Run `serve` on an event loop in a background thread, with methods to start, wait and stop."""

    def __init__(self, listen: Listen, log: ServingLog) -> None:
        self.http = self.grpc = self.manage = 0
        """The ports in use."""
        self.listen = listen
        """How it listens."""
        self.on_event: Callable[[dict[str, Any]], None] = lambda entry: None
        self._log = Logs(log.log)
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
        return f"{self._scheme}://{self.listen.host}:{self.http}"

    @property
    def manage_url(self) -> str:
        """Base URL of the management interface."""
        return f"{self._scheme}://{self.listen.manage_host}:{self.manage}"

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
        """Wait until the server has ended and return whether it has; Ctrl-C and SIGTERM stop it as `stop` does.

        A program that handles SIGTERM itself must call `stop`.
        """
        try:
            with _raising_on_sigterm():
                return self._over.wait(seconds)
        except (KeyboardInterrupt, _Terminated):
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
        listen = self.listen
        public.bodies = private.bodies = remote.bodies = Bodies(listen.limits.bodies)
        if self._log.is_kept:
            public.on_answer, remote.on_answer = self._log.access, partial(self._log.call, "gRPC")
        self.http = await opened(public, listen.host, listen.http)
        self.grpc = await opened(remote, listen.host, listen.grpc)
        self.manage = await opened(private, listen.manage_host, listen.manage)

    async def _drain(self, public: HttpListener, remote: GrpcListener | GrpcProcess) -> None:
        """Let the requests in flight finish, then close all connections."""
        until = time.monotonic() + self.listen.drain
        await asyncio.gather(remote.close(self.listen.drain), public.drain(self.listen.grace, until))

    @property
    def _scheme(self) -> str:
        return "http" if self.listen.tls is None else "https"


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
