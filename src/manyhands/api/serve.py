"""Public function `serve`: serve exported models and predictors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import SettingsError
from ..distributed import Device
from ..launcher import Engine
from ..serving import Batching, Listen, Replicas, Rollout, ServingLog
from .runtime import On, runtime

if TYPE_CHECKING:
    from ..serving import Router, Scaling, Server, ServeSettings

Options = TypeVar("Options")
NAME = "model"
"""The name under which a single predictor is served."""


def serve(
    models: Any,
    *,
    on: On = None,
    servers: int | str = 1,
    listen: Listen | None = None,
    batching: Batching | None = None,
    rollout: Rollout | None = None,
    replicas: Replicas | None = None,
    log: ServingLog | str | Path | None = None,
) -> Server | Router:
    """Serve a folder of models, or predictors, on every device; return when the server is ready.

    Args:
        models: A folder that is watched for new versions, a dict of predictors by name, or one predictor, which is
            served as "model". A predictor is an `mh.Predictor`, or a function or an object with `predict(inputs)` that
            declares its inputs and outputs by `mh.serving.signature`; it runs in its own process.
        on: Devices, such as "cuda:0,1" or "cpu*2". Each has at least one replica of every version. With "ray" or
            "ray://head:10001", servers with one device each run on the hosts of the cluster, behind a router in this
            process; the folder must have the same path on all hosts.
        servers: Number of servers in a Ray cluster, or a range such as "1..4" that follows the load.
        listen: Addresses, ports, tokens, TLS and limits: `mh.serving.Listen(http=9000, token=...)`. Addresses other
            than loopback need a token.
        batching: How requests are joined: `mh.serving.Batching(max_rows=256)`.
        rollout: Which versions are served, and how a new one takes over: `mh.serving.Rollout(versions="latest:2")`.
        replicas: How networks are computed: `mh.serving.Replicas(precision="bf16", compile=True)`. `trust_python=True`
            executes the `predictor.py` of versions in the folder.
        log: Folder for the event log and the access log, or `mh.serving.ServingLog(log=..., traces=True)`.

    Returns:
        The running server, or the router in front of the servers of a Ray cluster.

    Example:
        server = mh.serve("models")
        server.wait()            # until Ctrl-C; server.stop() finishes the in-flight requests
    """
    from ..serving import Scaling, Server, ServeSettings

    settings = ServeSettings(
        listen=as_options(Listen, listen),
        batching=as_options(Batching, batching),
        rollout=as_options(Rollout, rollout),
        replicas=as_options(Replicas, replicas),
        log=as_log(log),
    )
    scaling = Scaling.parse(servers, busy=settings.batching.max_rows)
    served = Path(models) if isinstance(models, str) else models
    if not isinstance(served, Path | Mapping):
        served = {NAME: served}
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


def as_log(log: ServingLog | str | Path | None) -> ServingLog:
    """Return logging options; a string or a path is the folder of the logs, None selects the defaults."""
    return as_options(ServingLog, ServingLog(log=Path(log)) if isinstance(log, str | Path) else log)


def as_options(kind: type[Options], given: Options | None) -> Options:
    """Return `given`, or the defaults of its class for None; raise SettingsError for an object of another class."""
    if given is not None and not isinstance(given, kind):
        name = f"mh.serving.{kind.__name__}"
        raise SettingsError(f"this argument must be an object of {name}", got=repr(given), remedy=f"pass {name}(...)")
    return kind() if given is None else given


def _serve_placed(
    engine: Engine, models: Path | Mapping[str, Any], kind: str, settings: ServeSettings, scaling: Scaling
) -> Router:
    """Start servers on devices that the engine chooses, and a router in this process that listens as `settings` say."""
    from ..serving import PlacedServer, RouteSettings, ScaledRouter

    listen = settings.listen
    if listen.manage_grpc is not None:
        raise SettingsError(
            "a router can only be managed over HTTP",
            got=f"manage_grpc={listen.manage_grpc}",
            remedy="omit manage_grpc; manyhands models manages all servers together",
        )
    models = models.absolute() if isinstance(models, Path) else models
    inside = dataclasses.replace(listen, cert=None, key=None, client_ca=None)
    log = dataclasses.replace(settings.log, log=None)
    make = functools.partial(
        PlacedServer, models=models, settings=dataclasses.replace(settings, listen=inside, log=log)
    )
    return ScaledRouter(RouteSettings(listen=listen, log=settings.log), engine, make, Device(kind), scaling).start()
