"""Server: combines catalogue, protocols and listeners on one event loop, in a background thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import Predictor, SettingsError
from ..distributed import Device, this_host
from ..launcher import Engine
from .app import App
from .catalogue import Catalogue, CatalogueSettings
from .exposition import exposition
from .folder import VersionPolicy, is_one_model, require_name
from .grpc_process import GrpcProcess
from .http import Request
from .http_listener import HttpListener
from .listener_thread import Background, access_of, manage_access_of, opened, why_closed
from .options import Batching, Listen, Replicas, Rollout, ServingLog
from .parsing import Parsing
from .protocols import (
    GRPC,
    REST,
    GrpcService,
    InferenceGateway,
    Management,
    OpenInferenceRest,
    RestProtocol,
    TensorflowRest,
)
from .python_model import signature_of
from .replica_rendezvous import ReplicaRendezvous
from .security import AccessToken
from .tracing import Tracing
from .version import ReplicaPlacement
from .warmup import Warmup, WarmupRecorder


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """All options of a server, by concern."""

    listen: Listen = field(default_factory=Listen)
    batching: Batching = field(default_factory=Batching)
    rollout: Rollout = field(default_factory=Rollout)
    replicas: Replicas = field(default_factory=Replicas)
    log: ServingLog = field(default_factory=ServingLog)

    def __post_init__(self) -> None:
        VersionPolicy.parse(self.rollout.versions)


class Repository(OpenInferenceRest):
    """The v2 protocol on the management listener, which can also load and unload models."""

    extensions = (*OpenInferenceRest.extensions, "model_repository")

    def __init__(self, gateway: InferenceGateway, management: Management) -> None:
        super().__init__(gateway)
        self._management = management

    def handle(self, request: Request) -> None:
        if request.path.startswith("/v2/repository/models/"):
            self._management.handle(request)
        else:
            super().handle(request)


class Server(Background):
    """A running server. `stop()` drains all requests; a `with` block does so at its end."""

    def __init__(
        self,
        models: Path | Mapping[str, Any],
        engine: Engine,
        devices: Sequence[Device],
        settings: ServeSettings | None = None,
    ) -> None:
        self.settings = settings = settings or ServeSettings()
        super().__init__(settings.listen, settings.log)
        self.manage_grpc = 0
        """The management gRPC port in use."""
        root = models if isinstance(models, Path) else None
        if root is not None and not root.is_dir():
            raise SettingsError(
                "the first argument must be a folder of models",
                got=f"{str(root)!r}, which is not a folder",
                remedy='export a model first: run.export("models/digits")',
            )
        if root is not None and is_one_model(root):
            raise SettingsError(
                "the first argument must be a folder of models",
                got=f"{str(root)!r}, which is a single model",
                remedy=f"pass the folder that contains it: {root.absolute().parent}",
            )
        given = None if isinstance(models, Path) else _predictors(models)
        self._engine, self._devices = engine, list(devices)
        self._catalogue = CatalogueSettings(
            root=root,
            given=given,
            rollout=settings.rollout,
            batching=settings.batching,
            replicas=settings.replicas,
            drain=settings.listen.drain,
        )
        self._management: Management | None = None
        rollout = settings.rollout
        self._warmup = Warmup(rollout.warmup, self._emit) if rollout.warmup is not None else None
        self._recorder = WarmupRecorder(rollout.record) if rollout.record is not None else None
        self._tracing = Tracing() if settings.log.traces else None

    def state(self) -> dict[str, Any]:
        assert self._management is not None
        return self._management.state()

    def _grpc_listeners(
        self, services: Sequence[GrpcService], rendezvous: ReplicaRendezvous
    ) -> tuple[GrpcProcess, GrpcProcess]:
        """Return the gRPC listeners for requests and for management."""
        listen = self.listen
        token, manage_token = AccessToken(listen.token), AccessToken(listen.manage_token, "management token")
        remote = GrpcProcess(services, token, listen.limits, listen.tls)
        managing = GrpcProcess(
            services, manage_token, listen.limits, listen.tls, manages=True, closed=why_closed(listen)
        )
        for listener in (remote, managing):
            listener.engine, listener.rendezvous = self._engine, rendezvous
        return remote, managing

    async def serve(self, stopping: asyncio.Event, is_up: Callable[[], None]) -> None:
        listen = self.listen
        rendezvous = ReplicaRendezvous()
        catalogue = Catalogue(self._catalogue, ReplicaPlacement(self._engine, rendezvous, self._devices), self._emit)
        parsing = Parsing(self._engine)
        gateway = InferenceGateway(catalogue, listen.limits, listen.timeout, parsing)
        catalogue.loader.warm_up = self._warmup or catalogue.loader.warm_up
        gateway.record, gateway.trace = self._recorder, self._tracing.over if self._tracing is not None else None
        self._management = Management(gateway)
        rest = [protocol(gateway) for protocol in REST]
        full: list[RestProtocol] = [TensorflowRest(gateway), Repository(gateway, self._management), self._management]
        remote, managing = self._grpc_listeners([service(gateway) for service in GRPC], rendezvous)
        public, private = (
            HttpListener(
                App({one.prefix: one for one in protocols}, lambda: exposition(catalogue), listen.limits, parsing),
                listen.limits,
                listen.tls,
                access,
            )
            for protocols, access in ((rest, access_of(listen)), (full, manage_access_of(listen)))
        )
        try:
            await self._listen(public, remote, private)
            managing.bodies = gateway.bodies = remote.bodies
            if listen.manage_grpc is not None:
                self.manage_grpc = await opened(managing, listen.manage_host, listen.manage_grpc)
            self._emit("starting")
            await catalogue.start()
            gateway.is_ready = True
            devices = list(map(str, self._devices))
            ports = {"http": self.http, "grpc": self.grpc, "manage": self.manage}
            self._emit("serving", host=this_host(), **ports, devices=devices)
            is_up()
            await stopping.wait()
            self._emit("stopping")
            gateway.is_ready = False
            await self._drain(public, remote)
        finally:
            await remote.close(0)
            await managing.close(0)
            await parsing.close()
            gateway.compressing.shutdown(wait=False, cancel_futures=True)
            await catalogue.stop()
            public.close()
            private.close()
            rendezvous.close()
            if self._tracing is not None:
                self._tracing.close()
            await asyncio.sleep(0)
            self._emit("stopped")


def _predictors(models: Any) -> dict[str, Any]:
    """Return predictors by name: `mh.Predictor`s and Python predictors; raises an error for other objects."""
    whole = dict(models) if isinstance(models, Mapping) else {"model": models}
    for name, predictor in whole.items():
        require_name(name)
        if isinstance(predictor, Predictor):
            continue
        is_python = callable(predictor) or hasattr(predictor, "predict")
        if not is_python or hasattr(predictor, "state_dict"):
            raise SettingsError(
                "models must be a folder, a Predictor, a Python predictor, or a dict of them by name",
                got=f"{type(predictor).__name__} as {name!r}",
                remedy="pass run.predictor(), mh.load(folder), a subclass of mh.Predictor, an object with "
                "predict(inputs), or a folder that mh.export or run.export wrote to",
            )
        signature_of(predictor)
    return whole
