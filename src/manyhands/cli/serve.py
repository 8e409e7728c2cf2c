"""`manyhands serve`: answers requests with every model of a folder, or with a predictor of one's own."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import Predictor, SettingsError, resolve_settings
from .interrupts import until_ended
from .options import On, add_verb
from .screen import note, stderr
from .serving_view import ServingView
from .target import load_module, split_target
from .wording import in_options

if TYPE_CHECKING:
    from ..serving import Router, Server


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """What a configuration file and the environment may set of whatever listens."""

    host: str = "127.0.0.1"
    http: int = 8501
    grpc: int = 8500
    manage: int = 8502
    manage_host: str = "127.0.0.1"
    token: str | None = None
    manage_token: str | None = None
    allow: str = ""
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    timeout: float = 30.0
    queue_mib: int = 1024
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ListenOptions):
    """And of a server."""

    manage_grpc: int | None = None
    on: str | None = None
    servers: str = "1"
    versions: str = "latest"
    max_rows: int = 64
    sizes: str = ""
    queue_rows: int = 1024
    probation: float = 30.0
    precision: str = "fp32"
    compile: bool = False
    warmup: str | None = None
    record: str | None = None
    unload_first: bool = False
    traces: bool = False


@dataclass(frozen=True, kw_only=True)
class RouteOptions(ListenOptions):
    """And of a router."""

    backends: str = ""
    backend_ca: str | None = None


Models = Annotated[
    str | None,
    typer.Argument(metavar="FOLDER|FILE.py:name", help="A folder of exported models, or a Predictor in a Python file."),
]
Routing = Annotated[bool, typer.Option("--router", help="Serve nothing here: hand requests on to --backends.")]
Backends = Annotated[
    str | None,
    typer.Option(
        metavar="A:8500,B:8500", help="Servers behind a router, by gRPC's port; the next two are HTTP and management."
    ),
]
BackendCa = Annotated[str | None, typer.Option(metavar="FILE", help="Who signed the backends' certificates (PEM).")]
Servers = Annotated[
    str | None,
    typer.Option(
        metavar="N|N..M", help="With --on ray: servers in the cluster, or a range: as many as the load wants."
    ),
]
Host = Annotated[str | None, typer.Option(help="The address to listen on; 127.0.0.1 by default. Others need a token.")]
Http = Annotated[int | None, typer.Option(help="The port for requests; 8501 by default, 0 takes any.")]
Grpc = Annotated[int | None, typer.Option(help="The port for gRPC; 8500 by default, 0 takes any.")]
Manage = Annotated[int | None, typer.Option(help="The port for management; 8502 by default.")]
ManageHost = Annotated[
    str | None, typer.Option(help="The address for management: this machine only, unless a router is to reach it.")
]
ManageGrpc = Annotated[int | None, typer.Option(help="A port for management over gRPC too; by default there is none.")]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,URL",
        help="Further names of this server in URLs, and origins of web pages that may use it, such as https://a.example.",
    ),
]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="A certificate (PEM) for TLS on all ports.")]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's key (PEM).")]
ClientCa = Annotated[
    str | None, typer.Option(metavar="FILE", help="Clients must show a certificate that this one (PEM) signed.")
]
Versions = Annotated[
    str | None, typer.Option(help="Which versions: latest (the default), latest:2, all, or numbers such as 1,3.")
]
MaxRows = Annotated[int | None, typer.Option(help="Rows of a batch at most; 64 by default.")]
Sizes = Annotated[str | None, typer.Option(metavar="N,N", help="Batch sizes to pad to, such as 1,8,64.")]
QueueRows = Annotated[int | None, typer.Option(help="Rows that may wait before requests are refused; 1024 by default.")]
QueueMib = Annotated[
    int | None, typer.Option(help="MiB of requests' bodies that may wait before more are refused; 1024 by default.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds for a request at most; 30 by default.")]
ProbationSeconds = Annotated[
    float | None,
    typer.Option("--probation", help="Seconds in which a new version that fails or is slow is sent back; 30."),
]
Precision = Annotated[str | None, typer.Option(help="fp32, or bf16 to compute in bfloat16 where that is safe.")]
Compile = Annotated[
    bool | None, typer.Option("--compile", help="Compile networks when they are loaded, where that is faster.")
]
WarmupFolder = Annotated[
    str | None,
    typer.Option("--warmup", metavar="FOLDER", help="Requests (NAME.jsonl) to compute before a version takes over."),
]
Record = Annotated[str | None, typer.Option(metavar="FOLDER", help="Write the first requests of each model there.")]
UnloadFirst = Annotated[
    bool | None,
    typer.Option("--unload-first", help="End an old version before the new one is loaded, where both do not fit."),
]
Traces = Annotated[bool | None, typer.Option("--traces", help="A span of OpenTelemetry for every request.")]
Log = Annotated[str | None, typer.Option(metavar="FOLDER", help="Write events.jsonl and access.jsonl there.")]
Config = Annotated[Path | None, typer.Option(help="A TOML file with these options as keys.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors.")]

EXAMPLES = (
    "manyhands serve models/",
    "manyhands serve models/ --on 'cpu*2' --versions latest:2",
    "manyhands serve digits.py:predictor --http 9000",
    "manyhands serve --router --backends a:8500,b:8500",
    "manyhands serve models/ --on ray://head:10001 --servers 1..4",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, serve, EXAMPLES)


def serve(
    models: Models = None,
    router: Routing = False,
    backends: Backends = None,
    on: On = None,
    servers: Servers = None,
    host: Host = None,
    http: Http = None,
    grpc: Grpc = None,
    manage: Manage = None,
    manage_host: ManageHost = None,
    manage_grpc: ManageGrpc = None,
    allow: Allow = None,
    cert: Cert = None,
    key: Key = None,
    client_ca: ClientCa = None,
    backend_ca: BackendCa = None,
    versions: Versions = None,
    max_rows: MaxRows = None,
    sizes: Sizes = None,
    queue_rows: QueueRows = None,
    queue_mib: QueueMib = None,
    timeout: Timeout = None,
    probation: ProbationSeconds = None,
    precision: Precision = None,
    compile: Compile = None,
    warmup: WarmupFolder = None,
    record: Record = None,
    unload_first: UnloadFirst = None,
    traces: Traces = None,
    log: Log = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Serve models: clients of TensorFlow Serving, Triton and KServe ask over HTTP or gRPC and stay as they are.

    New versions in the folder are loaded aside and take over without a lost request. Ctrl-C or a SIGTERM ends the
    server after the requests that it has. With --router it stands before other servers: the less loaded of two is
    asked, another one where one is lost, and manyhands models changes all of them together. With --on ray servers are
    placed in a Ray cluster and a router here stands before them. Every option can also
    stand in the file of --config or in the environment (MANYHANDS_HTTP, ...); tokens only there: MANYHANDS_TOKEN for
    requests, MANYHANDS_MANAGE_TOKEN for management.
    """
    from .. import verbs

    shared = {
        "host": host, "http": http, "grpc": grpc, "manage": manage, "manage_host": manage_host, "timeout": timeout,
        "allow": allow,
        "queue_mib": queue_mib, "cert": cert, "key": key, "client_ca": client_ca, "log": log,
    }  # fmt: skip
    routed = {"backends": backends, "backend_ca": backend_ca}
    served = {
        "manage_grpc": manage_grpc, "on": on, "servers": servers, "versions": versions, "max_rows": max_rows,
        "sizes": sizes, "queue_rows": queue_rows, "probation": probation, "precision": precision, "compile": compile,
        "warmup": warmup, "record": record, "unload_first": unload_first, "traces": traces,
    }  # fmt: skip
    if router:
        _require_none("a router serves nothing itself", "give it to the backends", {**served, "FOLDER": models})
        options = resolve_settings(RouteOptions, {**shared, **routed}, file=config).values
        with until_ended() as ending, in_options(RouteOptions), verbs.route(**_listening(options)) as running:
            _show(running, ending, quiet)
        return
    _require_none("only a router has backends", "add --router", routed)
    if models is None:
        raise SettingsError("there must be something to serve", got="none", remedy="write manyhands serve models/")
    settings = resolve_settings(ServeOptions, {**shared, **served}, file=config).values
    target = _target(models)
    with until_ended() as ending, in_options(ServeOptions), verbs.serve(target, **_arguments(settings)) as server:
        _show(server, ending, quiet)


def _require_none(rule: str, remedy: str, options: Mapping[str, Any]) -> None:
    """Refuses what would say nothing here."""
    given = {name: value for name, value in options.items() if value is not None}
    wrong = [str(value) if name == "FOLDER" else f"--{name.replace('_', '-')}" for name, value in given.items()]
    if wrong:
        raise SettingsError(rule, got=", ".join(wrong), remedy=f"leave it out, or {remedy}")


def _show(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    if not quiet:
        note(f"serving on {server.url} (gRPC on {server.grpc}), managed on {server.manage_url}")
        server.on_event = _tell
    _watch(server, ending, quiet)


def _target(text: str) -> Path | Predictor:
    """A folder, or the predictor that a file names."""
    path, name = split_target(text)
    if path.suffix != ".py":
        return Path(text)
    found = getattr(load_module(path), name or "predictor", None)
    if callable(found) and not isinstance(found, Predictor):
        found = found()
    if not isinstance(found, Predictor):
        raise SettingsError(
            f"{path} must have an mh.Predictor of that name",
            got=repr(name or "predictor"),
            remedy="write predictor = ..., or a function that returns one",
        )
    return found


def _arguments(settings: ServeOptions) -> dict[str, Any]:
    """The settings as `mh.serve` takes them."""
    sizes = [part.strip() for part in settings.sizes.split(",") if part.strip()]
    if not all(part.isdecimal() for part in sizes):
        raise SettingsError("sizes are numbers", got=repr(settings.sizes), remedy="write --sizes 1,8,64")
    return {**_listening(settings), "sizes": tuple(map(int, sizes))}


def _listening(options: ListenOptions) -> dict[str, Any]:
    """The options as `mh.serve` and `mh.route` take them."""
    allow = tuple(part.strip() for part in options.allow.split(",") if part.strip())
    return {**dataclasses.asdict(options), "allow": allow}


def _tell(entry: Mapping[str, Any]) -> None:
    values = {key: value for key, value in entry.items() if key not in ("v", "t", "kind")}
    note(" ".join([str(entry["kind"]).replace("_", " "), *(f"{key}={value}" for key, value in values.items())]))


def _watch(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    """Shows what happens where somebody looks, until it is time to end."""
    if quiet or not sys.stderr.isatty():
        ending.wait()
        return
    from rich.live import Live

    view = ServingView()
    with Live(view.table(server.state()), console=stderr(), auto_refresh=False) as live:
        while not ending.wait(1.0):
            live.update(view.table(server.state()), refresh=True)
