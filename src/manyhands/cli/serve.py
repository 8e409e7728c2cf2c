"""Command `manyhands serve`: serve the models of a folder, or a predictor of a Python file."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import Predictor, SettingsError, resolve_settings
from .interrupts import until_ended
from .options import On, add_command, in_options
from .screen import note, stderr
from .serving_view import ServingView
from .target import load_module, split_target

if TYPE_CHECKING:
    from ..serving import Router, Server


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Options of servers and routers that a configuration file and the environment can set."""

    host: str = "127.0.0.1"
    http: int = 8501
    grpc: int = 8500
    manage: int = 8502
    manage_host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    manage_token: str | None = field(default=None, repr=False)
    allow: str = ""
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    timeout: float = 30.0
    queue_mib: int = 1024
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ListenOptions):
    """Options of a server."""

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
    """Options of a router."""

    backends: str = ""
    backend_ca: str | None = None


Models = Annotated[
    str | None,
    typer.Argument(metavar="FOLDER|FILE.py:name", help="Folder of exported models, or a Predictor in a Python file."),
]
Routing = Annotated[bool, typer.Option("--router", help="Forward requests to --backends instead of serving models.")]
Backends = Annotated[
    str | None,
    typer.Option(
        metavar="A:8500,B:8500",
        help="Servers behind a router, with their gRPC ports; the next two ports are HTTP and management.",
    ),
]
BackendCa = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate authority of the backends (PEM).")]
Servers = Annotated[
    str | None,
    typer.Option(
        metavar="N|N..M", help="With --on ray: number of servers in the cluster, or a range that follows the load."
    ),
]
Host = Annotated[
    str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default. Other addresses need a token.")
]
Http = Annotated[int | None, typer.Option(help="HTTP port for requests; 8501 by default, 0 for any free port.")]
Grpc = Annotated[int | None, typer.Option(help="Port for gRPC; 8500 by default, 0 for any free port.")]
Manage = Annotated[int | None, typer.Option(help="Port for management; 8502 by default.")]
ManageHost = Annotated[
    str | None,
    typer.Option(help="Address for management; 127.0.0.1 by default. A router needs an address that it can reach."),
]
ManageGrpc = Annotated[int | None, typer.Option(help="Port for management over gRPC; by default none.")]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,URL",
        help="Additional host names of this server, and origins of web pages that may send requests, such as "
        "https://a.example.",
    ),
]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate (PEM) for TLS on all ports.")]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="Key of the certificate (PEM).")]
ClientCa = Annotated[
    str | None, typer.Option(metavar="FILE", help="Require client certificates of this certificate authority (PEM).")
]
Versions = Annotated[
    str | None, typer.Option(help="Versions to serve: latest (default), latest:2, all, or numbers such as 1,3.")
]
MaxRows = Annotated[int | None, typer.Option(help="Maximum rows of a batch; 64 by default.")]
Sizes = Annotated[str | None, typer.Option(metavar="N,N", help="Batch sizes to pad to, such as 1,8,64.")]
QueueRows = Annotated[
    int | None, typer.Option(help="Rows that may wait before requests are rejected; 1024 by default.")
]
QueueMib = Annotated[
    int | None, typer.Option(help="MiB of request bodies that may wait before requests are rejected; 1024 by default.")
]
Timeout = Annotated[float | None, typer.Option(help="Timeout of a request in seconds; 30 by default.")]
ProbationSeconds = Annotated[
    float | None,
    typer.Option(
        "--probation", help="Seconds in which a new version that fails or is slow is rolled back; 30 by default."
    ),
]
Precision = Annotated[str | None, typer.Option(help="fp32, or bf16 to compute in bfloat16 where that is safe.")]
Compile = Annotated[
    bool | None, typer.Option("--compile", help="Compile networks when they are loaded, if that makes them faster.")
]
WarmupFolder = Annotated[
    str | None,
    typer.Option(
        "--warmup", metavar="FOLDER", help="Folder with requests (NAME.jsonl) for the warm-up of every new version."
    ),
]
Record = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Write the first requests of each model to this folder, for a later warm-up."),
]
UnloadFirst = Annotated[
    bool | None,
    typer.Option(
        "--unload-first", help="Unload the old version before the new one is loaded, if both do not fit into memory."
    ),
]
Traces = Annotated[bool | None, typer.Option("--traces", help="Emit an OpenTelemetry span for every request.")]
Log = Annotated[str | None, typer.Option(metavar="FOLDER", help="Write events.jsonl and access.jsonl to this folder.")]
Config = Annotated[Path | None, typer.Option(help="TOML file with these options as keys.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]

EXAMPLES = (
    "manyhands serve models/",
    "manyhands serve models/ --on 'cpu*2' --versions latest:2",
    "manyhands serve digits.py:predictor --http 9000",
    "manyhands serve --router --backends a:8500,b:8500",
    "manyhands serve models/ --on ray://head:10001 --servers 1..4",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, serve, EXAMPLES)


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
    """Serve models over HTTP and gRPC, with the protocols of TensorFlow Serving, Triton and KServe.

    New versions in the folder are loaded in the background and replace old ones without a failed request. Ctrl-C or a
    SIGTERM stops the server after its in-flight requests. With --router the command forwards requests to other servers:
    to the less loaded of two, and to another one if a server fails; manyhands models then manages all of them together.
    With --on ray the servers run in a Ray cluster, behind a router in this process. Options can also be set in the file
    of --config or in the environment (MANYHANDS_HTTP, ...). Tokens can only be set there: MANYHANDS_TOKEN for requests,
    and MANYHANDS_MANAGE_TOKEN for management.
    """
    import manyhands as mh

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
        _require_none("a router does not serve models itself", "pass it to the backends", {**served, "FOLDER": models})
        options = resolve_settings(RouteOptions, {**shared, **routed}, file=config).values
        with until_ended() as ending, in_options(RouteOptions), mh.route(**_listening(options)) as running:
            _show(running, ending, quiet)
        return
    _require_none("only a router has backends", "add --router", routed)
    if models is None:
        raise SettingsError(
            "a folder of models or a Python file is required", remedy="write for example manyhands serve models/"
        )
    settings = resolve_settings(ServeOptions, {**shared, **served}, file=config).values
    target = _target(models)
    with until_ended() as ending, in_options(ServeOptions), mh.serve(target, **_arguments(settings)) as server:
        _show(server, ending, quiet)


def _require_none(rule: str, remedy: str, options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options that would have no effect."""
    given = {name: value for name, value in options.items() if value is not None}
    wrong = [str(value) if name == "FOLDER" else f"--{name.replace('_', '-')}" for name, value in given.items()]
    if wrong:
        raise SettingsError(rule, got=", ".join(wrong), remedy=f"omit it, or {remedy}")


def _show(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    if not quiet:
        note(f"serving on {server.url} (gRPC on {server.grpc}), managed on {server.manage_url}")
        server.on_event = _print_event
    _watch(server, ending, quiet)


def _target(text: str) -> Path | Predictor:
    """Return a folder, or the predictor of a Python file."""
    path, name = split_target(text)
    if path.suffix != ".py":
        return Path(text)
    found = getattr(load_module(path), name or "predictor", None)
    if callable(found) and not isinstance(found, Predictor):
        found = found()
    if not isinstance(found, Predictor):
        raise SettingsError(
            f"{path} must define an mh.Predictor of the given name",
            got=repr(name or "predictor"),
            remedy="write predictor = ..., or a function that returns one",
        )
    return found


def _arguments(settings: ServeOptions) -> dict[str, Any]:
    """Return the settings as arguments of `mh.serve`."""
    sizes = [part.strip() for part in settings.sizes.split(",") if part.strip()]
    if not all(part.isdecimal() for part in sizes):
        raise SettingsError(
            "--sizes must be numbers separated by commas",
            got=repr(settings.sizes),
            remedy="write for example --sizes 1,8,64",
        )
    return {**_listening(settings), "sizes": tuple(map(int, sizes))}


def _listening(options: ListenOptions) -> dict[str, Any]:
    """Return the options as arguments of `mh.serve` and `mh.route`."""
    allow = tuple(part.strip() for part in options.allow.split(",") if part.strip())
    return {**dataclasses.asdict(options), "allow": allow}


def _print_event(entry: Mapping[str, Any]) -> None:
    values = {key: value for key, value in entry.items() if key not in ("v", "t", "kind")}
    note(" ".join([str(entry["kind"]).replace("_", " "), *(f"{key}={value}" for key, value in values.items())]))


def _watch(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    """Display the state of the server in a terminal, until it is stopped."""
    if quiet or not sys.stderr.isatty():
        ending.wait()
        return
    from rich.live import Live

    view = ServingView()
    with Live(view.table(server.state()), console=stderr(), auto_refresh=False) as live:
        while not ending.wait(1.0):
            live.update(view.table(server.state()), refresh=True)
