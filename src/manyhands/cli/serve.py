"""Command `manyhands serve`: serve the models in a folder or a predictor in a Python file, or start a router."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import Predictor, SettingsError, option, options_of, resolve_options
from ..serving import Batching, Listen, Replicas, Rollout, ServingLog
from .generated_options import typed_values, with_options
from .interrupts import until_ended
from .options import add_command, in_options
from .screen import note, stderr
from .serving_view import ServingView
from .target import load_module, split_target

if TYPE_CHECKING:
    from ..serving import Router, Server


@dataclass(frozen=True, kw_only=True)
class ServerPlacement:
    """Devices: where a server runs."""

    on: str | None = option(
        None,
        "Devices: cuda:0,1 or cpu; 'cpu*2' splits the CPU into two. By default the devices of this machine.",
        metavar="DEVICES",
    )
    servers: str = option(
        "1",
        "With --on ray: number of servers in the cluster, or a range that follows the load.",
        metavar="N|N..M",
    )


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Router: the servers to which a router forwards requests."""

    backends: str = option(
        "",
        "Servers behind a router, with their gRPC ports; the next two ports are HTTP and management.",
        metavar="A:8500,B:8500",
    )
    backend_ca: Path | None = option(None, "Certificate authority of the backends (PEM).", metavar="FILE")


SHARED = (Listen, ServingLog)
SERVER = (ServerPlacement, Batching, Rollout, Replicas)
SERVER_ONLY = ("manage_grpc", "traces")
"""Options of the classes in `SHARED` that a router does not have."""

Models = Annotated[
    str | None,
    typer.Argument(metavar="FOLDER|FILE.py:name", help="Folder of models, or a predictor in a Python file."),
]
Routing = Annotated[bool, typer.Option("--router", help="Forward requests to --backends instead of serving models.")]
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


@with_options(*SHARED, *SERVER, Backends)
def serve(
    models: Models = None,
    router: Routing = False,
    config: Config = None,
    quiet: Quiet = False,
    *,
    given: dict[str, Any],
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

    kinds = (*SHARED, Backends) if router else (*SHARED, *SERVER)
    others = {each.name for kind in ((*SERVER,) if router else (Backends,)) for each in options_of(kind)}
    others |= set(SERVER_ONLY) if router else set()
    wrong = {name: value for name, value in given.items() if name in others}
    if router:
        _require_none("a router does not serve models itself", "pass it to the backends", {**wrong, "FOLDER": models})
    else:
        _require_none("only a router has backends", "add --router", wrong)
        if models is None:
            raise SettingsError(
                "a folder of models or a Python file is required", remedy="write for example manyhands serve models/"
            )
    with in_options(*kinds):
        values = typed_values(kinds, {name: value for name, value in given.items() if name not in others})
        options = resolve_options(kinds, values, file=config)
        listen, log = options.of(Listen), options.of(ServingLog)
        with until_ended() as ending:
            if router:
                behind = options.of(Backends)
                with mh.route(behind.backends, backend_ca=behind.backend_ca, listen=listen, log=log) as running:
                    _show(running, ending, quiet)
                return
            placement = options.of(ServerPlacement)
            with mh.serve(
                _target(str(models)),
                on=placement.on,
                servers=placement.servers,
                listen=listen,
                batching=options.of(Batching),
                rollout=options.of(Rollout),
                replicas=options.of(Replicas),
                log=log,
            ) as server:
                _show(server, ending, quiet)


def _require_none(rule: str, remedy: str, options: Mapping[str, Any]) -> None:
    """Raise SettingsError with the given rule and remedy if one of the options, which would have no effect, is set."""
    given = {name: value for name, value in options.items() if value is not None}
    wrong = [str(value) if name == "FOLDER" else f"--{name.replace('_', '-')}" for name, value in given.items()]
    if wrong:
        raise SettingsError(rule, got=", ".join(wrong), remedy=f"omit it, or {remedy}")


def _show(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    if not quiet:
        note(f"serving on {server.url} (gRPC on {server.grpc}), managed on {server.manage_url}")
        server.on_event = _print_event
    _watch(server, ending, quiet)


def _target(text: str) -> Any:
    """Return the folder that a text names, or the predictor for "FILE.py" or "FILE.py:name"; a function is called."""
    from ..serving import is_python_predictor

    path, name = split_target(text)
    if path.suffix != ".py":
        return Path(text)
    found = getattr(load_module(path), name or "predictor", None)
    if is_python_predictor(found):
        return found
    if callable(found) and not isinstance(found, Predictor):
        found = found()
    if not isinstance(found, Predictor) and not is_python_predictor(found):
        raise SettingsError(
            f"{path} must define an mh.Predictor, or a Python predictor with inputs and outputs, of the given name",
            got=repr(name or "predictor"),
            remedy="write predictor = ..., a function that returns one, or decorate a function with "
            "@mh.serving.signature(inputs=..., outputs=...)",
        )
    return found


def _print_event(entry: Mapping[str, Any]) -> None:
    values = {key: value for key, value in entry.items() if key not in ("v", "t", "kind")}
    note(" ".join([str(entry["kind"]).replace("_", " "), *(f"{key}={value}" for key, value in values.items())]))


def _watch(server: Server | Router, ending: threading.Event, quiet: bool) -> None:
    """Wait until the command is ended; in a terminal, display the state of the server every second."""
    if quiet or not sys.stderr.isatty():
        ending.wait()
        return
    from rich.live import Live

    view = ServingView()
    with Live(view.table(server.state()), console=stderr(), auto_refresh=False) as live:
        while not ending.wait(1.0):
            live.update(view.table(server.state()), refresh=True)
