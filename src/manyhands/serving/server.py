"""The server: joins catalogue, protocols and listeners on one loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from ..cluster import Device, Engine
from ..core import EventLog, Predictor, RequestRefused, SettingsError, event
from .batcher import BatchSettings
from .catalogue import Catalogue, CatalogueSettings
from .exposition import KIND, exposition
from .folder import Policy, require_name
from .http import BadRequest, Listener, Request
from .limits import Limits
from .meeting import Meeting
from .model import Probation
from .protocols import GRPC, REST, Desk, GrpcListener, Management, OpenInferenceRest, RestProtocol, TensorflowRest
from .protocols.protocol import answer_refusal
from .version import Place

METRICS = ("/metrics", "/monitoring/prometheus/metrics")
HEALTH = ("/v2/health/live", "/v2/health/ready")
"""What a probe may ask without a token."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server listens, batches and changes."""

    host: str = "127.0.0.1"
    http: int = 8501
    """The port of both REST protocols; 0 takes any."""
    grpc: int = 8500
    """The port of both gRPC protocols."""
    manage: int = 8502
    """The port for management, always on this machine only."""
    token: str | None = None
    """What clients must send as `Authorization: Bearer ...`; needed where others can reach the server."""
    timeout: float = 30.0
    """Seconds for a request at most."""
    versions: str = "latest"
    poll: float = 1.0
    patience: float = 25.0
    """Seconds for requests to finish when a version, or the server, goes."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    limits: Limits = field(default_factory=Limits)
    probation: Probation = field(default_factory=Probation)
    log: Path | None = None
    """A folder for events.jsonl and access.jsonl."""

    def __post_init__(self) -> None:
        Policy.parse(self.versions)
        if not is_loopback(self.host) and not self.token:
            raise SettingsError(
                "a server that others can reach needs a token",
                got=f"host={self.host}",
                remedy="set MANYHANDS_TOKEN, or listen on 127.0.0.1",
            )
        for name, port in (("http", self.http), ("grpc", self.grpc), ("manage", self.manage)):
            if not 0 <= port < 65536:
                raise SettingsError(f"{name} must be a port", got=port, remedy=f"pass {name}=8501")
        for name in ("timeout", "poll"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be above 0", got=getattr(self, name), remedy="pass seconds")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class App:
    """One listener's requests: the token, the protocol, and what becomes of errors."""

    def __init__(self, protocols: Sequence[RestProtocol], catalogue: Catalogue, token: str | None) -> None:
        self._protocols = {protocol.prefix: protocol for protocol in protocols}
        self._catalogue = catalogue
        self._bearer = f"Bearer {token}".encode() if token else b""

    def __call__(self, request: Request) -> None:
        path = request.path
        try:
            if self._bearer and path not in HEALTH:
                self._require_token(request)
            protocol = self._protocols.get(path[: path.find("/", 1)] if path.find("/", 1) > 0 else path)
            if protocol is not None:
                self._handle(protocol, request)
            elif path in METRICS:
                request.answer(200, exposition(self._catalogue), KIND)
            else:
                raise BadRequest(404, "Not Found")
        except BadRequest as error:
            answer_refusal(request, error.status, error.reason)
        except Exception as error:
            # What went wrong here is ours to know; a stranger learns that it did.
            asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})
            answer_refusal(request, 500, "internal error")

    def _handle(self, protocol: RestProtocol, request: Request) -> None:
        try:
            protocol.handle(request)
        except RequestRefused as refusal:
            protocol.refuse(request, refusal)

    def _require_token(self, request: Request) -> None:
        if not hmac.compare_digest(request.headers.get(b"authorization", b""), self._bearer):
            raise BadRequest(401, "this server wants a token")


class Repository(OpenInferenceRest):
    """The v2 protocol where models may be managed too: it also loads and unloads."""

    def __init__(self, desk: Desk, management: Management) -> None:
        super().__init__(desk)
        self._management = management

    def handle(self, request: Request) -> None:
        if request.path.startswith("/v2/repository/models/"):
            self._management.handle(request)
        else:
            super().handle(request)


class Server:
    """A running server. `stop()` lets every request finish; a `with` block does so at its end."""

    def __init__(
        self,
        models: Path | Mapping[str, Predictor],
        engine: Engine,
        devices: Sequence[Device],
        settings: ServeSettings | None = None,
    ) -> None:
        self.settings = settings or ServeSettings()
        root = models if isinstance(models, Path) else None
        if root is not None and not root.is_dir():
            raise SettingsError(
                "the first argument is a folder of models",
                got=f"{str(root)!r}, which is none",
                remedy='export one first: run.export("models/digits")',
            )
        given = None if isinstance(models, Path) else dict(models)
        for name in given or {}:
            require_name(name)
        self.http = self.grpc = self.manage = 0
        """The ports that it got."""
        self._engine, self._devices = engine, list(devices)
        self._catalogue = CatalogueSettings(
            root=root,
            given=given,
            policy=Policy.parse(self.settings.versions),
            probation=self.settings.probation,
            batch=self.settings.batch,
            poll=self.settings.poll,
            patience=self.settings.patience,
        )
        self._log = Logs(self.settings.log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._over = threading.Event()
        self._management: Management | None = None
        self.on_event: Callable[[dict[str, Any]], None] = lambda entry: None

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"http://{self.settings.host}:{self.http}"

    @property
    def manage_url(self) -> str:
        """Where management goes."""
        return f"http://127.0.0.1:{self.manage}"

    def start(self) -> Self:
        """Listens and loads; returns when what could be loaded answers, raises where nothing can be served."""
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="manyhands-server", daemon=True).start()
        started.result()
        return self

    def stop(self) -> None:
        """Not ready, finish, unload: no request in flight is lost."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._over.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the server has ended; whether it has. Ctrl-C stops it as `stop` does."""
        try:
            return self._over.wait(seconds)
        except KeyboardInterrupt:
            self.stop()
            return True

    def state(self) -> dict[str, Any]:
        """Everything that is served, with figures."""
        assert self._management is not None
        return self._management.state()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, started: Future[None]) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
        finally:
            self._log.close()
            self._over.set()

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        meeting = Meeting()
        catalogue = Catalogue(self._catalogue, Place(self._engine, meeting, self._devices), self._say)
        desk = Desk(catalogue, self.settings.limits, self.settings.timeout)
        self._management = Management(desk)
        rest = [protocol(desk) for protocol in REST]
        full: list[RestProtocol] = [TensorflowRest(desk), Repository(desk, self._management), self._management]
        remote = GrpcListener([service(desk) for service in GRPC], self.settings.token, self.settings.limits.body)
        public = Listener(App(rest, catalogue, self.settings.token), self.settings.limits)
        private = Listener(App(full, catalogue, self.settings.token), self.settings.limits)
        public.on_answer = self._log.access if self.settings.log is not None else None
        try:
            self.http = await _open(public, self.settings.host, self.settings.http)
            self.grpc = await _open(remote, self.settings.host, self.settings.grpc)
            self.manage = await _open(private, "127.0.0.1", self.settings.manage)
            await catalogue.start()
            desk.is_ready = True
            devices = list(map(str, self._devices))
            self._say("serving", http=self.http, grpc=self.grpc, manage=self.manage, devices=devices)
            started.set_result(None)
            await self._stopping.wait()
            self._say("stopping")
            desk.is_ready = False
            public.stop_listening()
            await remote.close(self.settings.patience)
            until = time.monotonic() + self.settings.patience
            while public.num_busy and time.monotonic() < until:
                await asyncio.sleep(0.005)
        finally:
            await remote.close(0)
            await catalogue.stop()
            public.close()
            private.close()
            meeting.close()
            await asyncio.sleep(0)
            self._say("stopped")

    def _say(self, kind: str, **values: Any) -> None:
        entry = event(kind, **values)
        self._log.event(entry)
        self.on_event(entry)


class Logs:
    """The event log and the access log, where they are wished for."""

    def __init__(self, folder: Path | None) -> None:
        self._events = EventLog(folder / "events.jsonl") if folder is not None else None
        self._access = (folder / "access.jsonl").open("ab", buffering=1 << 16) if folder is not None else None

    def event(self, entry: dict[str, Any]) -> None:
        """Writes an event."""
        if self._events is not None:
            self._events.write(entry)

    def access(self, request: Request, status: int, size: int) -> None:
        """Writes a line about an answered request; lines are gathered, so a crash may cost the last ones."""
        if self._access is not None:
            line = {
                "t": round(time.time(), 6),
                "method": request.method,
                "path": request.path[:200],
                "status": status,
                "in": len(request.body),
                "out": size,
                "ms": round(1000 * (time.perf_counter() - request.arrived), 3),
            }
            self._access.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Writes what was gathered."""
        if self._events is not None:
            self._events.close()
        if self._access is not None:
            self._access.close()


async def _open(listener: Listener | GrpcListener, host: str, port: int) -> int:
    try:
        return await listener.open(host, port)
    except OSError as error:
        raise SettingsError(
            "the port must be free",
            got=f"{host}:{port} ({error.strerror or error})",
            remedy="pass another, or 0 for any",
        ) from None
