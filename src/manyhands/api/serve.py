"""Public function `serve`: serve exported models and predictors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import Predictor, SettingsError
from ..distributed import Device
from ..launcher import Engine
from .runtime import On, runtime

if TYPE_CHECKING:
    from ..serving import Router, Scaling, Server, ServeSettings


def serve(
    models: str | Path | Predictor | Mapping[str, Predictor],
    *,
    on: On = None,
    servers: int | str = 1,
    name: str = "model",
    host: str = "127.0.0.1",
    http: int = 8501,
    grpc: int = 8500,
    manage: int = 8502,
    manage_host: str = "127.0.0.1",
    manage_grpc: int | None = None,
    token: str | None = None,
    manage_token: str | None = None,
    allow: Sequence[str] = (),
    cert: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    versions: str = "latest",
    max_rows: int = 64,
    sizes: Sequence[int] = (),
    queue_rows: int = 1024,
    queue_mib: int = 1024,
    timeout: float = 30.0,
    probation: float = 30.0,
    precision: str = "fp32",
    compile: bool = False,
    warmup: str | Path | None = None,
    record: str | Path | None = None,
    unload_first: bool = False,
    traces: bool = False,
    log: str | Path | None = None,
) -> Server | Router:
    """Serve a folder of exported models, or predictors, on every device; return when the server is ready.

    Args:
        models: A folder that is watched for new versions, a Predictor (served as `name`), or a dict of Predictors.
        on: Devices, such as "cuda:0,1" or "cpu*2", each with a replica of every version. On "ray" or
            "ray://head:10001" servers of one device each run on the hosts of the cluster, behind a router in this
            process; the folder and the token must be the same on all hosts.
        servers: Number of servers in a Ray cluster, or a range such as "1..4" that follows the load.
        name: Name of a single Predictor.
        host: Address to listen on; addresses other than loopback need a `token`.
        http: HTTP port; 0 for any free port.
        grpc: gRPC port; 0 for any free port.
        manage: Port for management.
        manage_host: Address for management, for example for a router on another host.
        manage_grpc: Port for loading and unloading models over gRPC.
        token: Access token for requests.
        manage_token: Access token for management, which must differ from `token`.
        allow: Additional host names of this server, and origins of web pages that may use it, such as
            "https://app.example". Requests with other names or origins are rejected.
        cert: Certificate (PEM) for TLS on all ports.
        key: Key of the certificate (PEM).
        client_ca: Certificate authority (PEM); clients then need a certificate that it signed.
        versions: "latest", "latest:2", "all" or numbers such as "1,3".
        max_rows: Maximum rows of a batch.
        sizes: Batch sizes to pad to.
        queue_rows: Rows that may wait before requests are rejected.
        queue_mib: MiB of request bodies that may wait before requests are rejected.
        timeout: Timeout of a request in seconds.
        probation: Seconds in which a new version that fails or is slow is rolled back.
        precision: "bf16" computes in bfloat16 where autocast considers that safe.
        compile: Compile exported networks when they are loaded, if that makes them faster.
        warmup: Folder with files NAME.jsonl of requests that every version of NAME computes before it takes over.
        record: Folder to which such files are written.
        unload_first: Unload the old version before the new one is loaded, if a device cannot hold both; requests are
            rejected during that time.
        traces: Emit an OpenTelemetry span for every request.
        log: Folder for the event log and the access log.

    Example:
        server = mh.serve("models")
        server.wait()            # until Ctrl-C; server.stop() lets every request finish
    """
    from ..serving import BatchSettings, Limits, RolloutGuard, Scaling, Server, ServeSettings, ServingTls

    scaling = Scaling.parse(servers, busy=max_rows)
    settings = ServeSettings(
        host=host,
        http=http,
        grpc=grpc,
        manage=manage,
        manage_host=manage_host,
        manage_grpc=manage_grpc,
        token=token,
        manage_token=manage_token,
        allow=tuple(allow),
        tls=ServingTls.of(cert, key, client_ca),
        versions=versions,
        timeout=timeout,
        limits=Limits.holding(queue_mib),
        batch=BatchSettings(max_rows=max_rows, sizes=tuple(sizes), queue_rows=queue_rows),
        probation=RolloutGuard(seconds=probation),
        precision=precision,
        compiles=compile,
        warmup=Path(warmup) if warmup is not None else None,
        record=Path(record) if record is not None else None,
        unload_first=unload_first,
        traces=traces,
        log=Path(log) if log is not None else None,
    )
    served = {name: models} if isinstance(models, Predictor) else models
    served = Path(served) if isinstance(served, str) else served
    engine, devices, _ = runtime.find_devices(on)
    if engine is not runtime.engine:
        return _serve_placed(engine, served, devices[0].kind if devices else "cpu", settings, scaling)
    if scaling.most > 1:
        raise SettingsError(
            "servers= needs a cluster",
            got=f"servers={servers!r} on this machine",
            remedy='pass on="ray", or start the servers and use mh.route',
        )
    return Server(served, runtime.engine, devices, settings).start()


def _serve_placed(
    engine: Engine, models: Path | Mapping[str, Predictor], kind: str, settings: ServeSettings, scaling: Scaling
) -> Router:
    """Start servers where the engine has capacity, and a router here with the settings' listening options."""
    from ..serving import ListenSettings, PlacedServer, RouteSettings, ScaledRouter

    if settings.manage_grpc is not None:
        raise SettingsError(
            "a router can only be managed over HTTP",
            got=f"manage_grpc={settings.manage_grpc}",
            remedy="omit manage_grpc; manyhands models manages all servers together",
        )
    listening = {each.name: getattr(settings, each.name) for each in dataclasses.fields(ListenSettings)}
    models = models.absolute() if isinstance(models, Path) else models
    make = functools.partial(PlacedServer, models=models, settings=dataclasses.replace(settings, tls=None, log=None))
    return ScaledRouter(RouteSettings(**listening), engine, make, Device(kind), scaling).start()
