"""Command `manyhands models`: list, load, label, split and roll back the models of a server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import RequestRefused, SettingsError
from .options import Json, add_command
from .screen import print_json, stdout
from .serving_view import ServingView

if TYPE_CHECKING:
    from ..serving import Client

    Ask = Callable[[Client], Any]

Act = Annotated[str, typer.Argument(metavar="list|load|unload|label|split|rollback", help="Action.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL] [...]", help="Name of the model, and arguments of the action; see the examples."),
]
Server = Annotated[
    str | None,
    typer.Option(help="Management address of the server; http://127.0.0.1:8502 by default.", show_default=False),
]
Ca = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate authority of the server (PEM).")]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="Client certificate (PEM), if the server requires one.")]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="Key of the client certificate (PEM).")]

REACH_SECONDS, ACT_SECONDS = 2.0, 60.0
"""Seconds within which a server must be reachable, and those within which it must complete a request."""
LOOK_SECONDS = 1.0
"""Seconds between two queries of a server's counters, from which the rate of requests is computed."""
_REMEDIES = {
    "UNAVAILABLE": "start it with manyhands serve, or name another one with --server; under TLS it is https://",
    "UNAUTHENTICATED": "set MANYHANDS_MANAGE_TOKEN to the management token of the server",
    "NOT_FOUND": "pass the address of the management port with --server (8502 by default), not that for requests",
}
"""Remedies by the code of a refusal, if a server does not report its models."""

EXAMPLES = (
    "manyhands models list",
    "manyhands models load digits 3",
    "manyhands models label digits stable=2",
    "manyhands models split digits 2=90 3=10",
    "manyhands models split digits small/1=1 big/4=1",
    "manyhands models rollback digits",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, models, EXAMPLES)


def models(
    act: Act = "list",
    words: Words = None,
    server: Server = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """List and manage the models of a running server, or of all servers behind a router.

    A label names a version for clients (label digits stable= removes it). A split distributes requests by weight over
    versions or models. A rollback returns to the previous version. The token is read from MANYHANDS_MANAGE_TOKEN.
    """
    from ..serving import Client

    if act not in _ACTS:
        raise SettingsError(
            f"the action must be one of {', '.join(_ACTS)}",
            got=repr(act),
            remedy="write for example manyhands models list",
        )
    address = server or "http://127.0.0.1:8502"
    token = os.environ.get("MANYHANDS_MANAGE_TOKEN")
    ask = _ACTS[act](words or [])
    reach = partial(Client, address, manage=address, manage_token=token, ca=ca, cert=cert, key=key)
    before = _reached(reach(timeout=REACH_SECONDS))
    client = reach(timeout=ACT_SECONDS)
    if act != "list" or json:
        print_json(ask(client))
    else:
        view = ServingView()
        view.rows(before)
        time.sleep(LOOK_SECONDS)
        stdout().print(view.table(client.models()))


def _reached(client: Client) -> Any:
    """Return the models of a server; if it refuses or is unreachable, raise RequestRefused with a remedy."""
    try:
        return client.models()
    except RequestRefused as refusal:
        if (remedy := _REMEDIES.get(refusal.code)) is None:
            raise
        raise RequestRefused(refusal.code, f"{refusal.reason}; {remedy}") from None


def _list(words: list[str]) -> Ask:
    return lambda client: client.models()


def _load(words: list[str]) -> Ask:
    model, *rest = _need(words, "load digits 3")
    version = _number(rest[0]) if rest else None
    return lambda client: client.load(model, version)


def _unload(words: list[str]) -> Ask:
    model = _need(words, "unload digits")[0]
    return lambda client: client.unload(model)


def _label(words: list[str]) -> Ask:
    model, *rest = _need(words, "label digits stable=2")
    pairs = [word.partition("=") for word in rest]
    labels = {label: _number(version) if version or not equals else None for label, equals, version in pairs}

    def ask(client: Client) -> Any:
        answer: Any = {}
        for label, version in labels.items():
            answer = client.label(model, label, version)
        return answer

    return ask


def _split(words: list[str]) -> Ask:
    model, *rest = _need(words, "split digits 2=90 3=10")
    shares = [_share(word) for word in rest]
    return lambda client: client.split(model, shares)


def _rollback(words: list[str]) -> Ask:
    model = _need(words, "rollback digits")[0]
    return lambda client: client.rollback(model)


_ACTS: Mapping[str, Callable[[list[str]], Ask]] = {
    "list": _list,
    "load": _load,
    "unload": _unload,
    "label": _label,
    "split": _split,
    "rollback": _rollback,
}


def _need(words: list[str], example: str) -> list[str]:
    if not words:
        raise SettingsError("a model name is required", remedy=f"write for example manyhands models {example}")
    return words


def _number(text: str) -> int:
    if not text.isdecimal():
        raise SettingsError(
            "a version must be a number", got=repr(text), remedy="see manyhands models list for the loaded versions"
        )
    return int(text)


def _share(word: str) -> dict[str, Any]:
    """Return one share of a traffic split, from VERSION=WEIGHT, MODEL=WEIGHT or MODEL/VERSION=WEIGHT."""
    target, _, weight = word.partition("=")
    model, _, version = target.rpartition("/")
    try:
        share: dict[str, Any] = {"weight": float(weight)}
    except ValueError:
        raise SettingsError(
            "a traffic share must be written VERSION=WEIGHT", got=repr(word), remedy="write for example 2=90"
        ) from None
    if not model and not version.isdecimal():
        return {**share, "model": version}
    return {**share, "version": _number(version), **({"model": model} if model else {})}
