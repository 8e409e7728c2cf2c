"""`manyhands models`: what a server serves, and loading, labels, splits and rollback."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from .options import Json, add_verb
from .screen import print_json, stdout
from .serving_view import ServingView

if TYPE_CHECKING:
    from ..serving import Client

Act = Annotated[str, typer.Argument(metavar="list|load|unload|label|split|rollback", help="What to do.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL] [...]", help="The model, and what the act needs; see the examples."),
]
Server = Annotated[
    str | None, typer.Option(help="Where the server is managed; http://127.0.0.1:8502 by default.", show_default=False)
]
Ca = Annotated[str | None, typer.Option(metavar="FILE", help="Who signed the server's certificate (PEM).")]
Cert = Annotated[
    str | None, typer.Option(metavar="FILE", help="One's own certificate (PEM), where the server wants one.")
]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="That certificate's key (PEM).")]

EXAMPLES = (
    "manyhands models list",
    "manyhands models load digits 3",
    "manyhands models label digits stable=2",
    "manyhands models split digits 2=90 3=10",
    "manyhands models split digits small/1=1 big/4=1",
    "manyhands models rollback digits",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, models, EXAMPLES)


def models(
    act: Act = "list",
    words: Words = None,
    server: Server = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Look at the models of a running server, or of all behind a router, and change what they answer with.

    A label names a version for clients; a split shares requests out by weight, between versions or between models;
    rollback lets the version before answer again. A token is taken from MANYHANDS_TOKEN.
    """
    from ..serving import Client

    if act not in _ACTS:
        raise SettingsError(f"models can {', '.join(_ACTS)}", got=repr(act), remedy="write for instance models list")
    address = server or "http://127.0.0.1:8502"
    token = os.environ.get("MANYHANDS_TOKEN")
    client = Client(address, manage=address, token=token, timeout=60.0, ca=ca, cert=cert, key=key)
    answer = _ACTS[act](client, words or [])
    if json or act != "list":
        print_json(answer)
    else:
        stdout().print(ServingView().table(answer))


def _list(client: Client, words: list[str]) -> Any:
    return client.models()


def _load(client: Client, words: list[str]) -> Any:
    model, *rest = _need(words, "load digits 3")
    return client.load(model, _number(rest[0]) if rest else None)


def _unload(client: Client, words: list[str]) -> Any:
    return client.unload(_need(words, "unload digits")[0])


def _label(client: Client, words: list[str]) -> Any:
    model, *rest = _need(words, "label digits stable=2")
    answer: Any = {}
    for word in rest:
        label, _, version = word.partition("=")
        answer = client.label(model, label, _number(version))
    return answer


def _split(client: Client, words: list[str]) -> Any:
    model, *rest = _need(words, "split digits 2=90 3=10")
    return client.split(model, [_share(word) for word in rest])


def _rollback(client: Client, words: list[str]) -> Any:
    return client.rollback(_need(words, "rollback digits")[0])


_ACTS: Mapping[str, Callable[[Client, list[str]], Any]] = {
    "list": _list,
    "load": _load,
    "unload": _unload,
    "label": _label,
    "split": _split,
    "rollback": _rollback,
}


def _need(words: list[str], example: str) -> list[str]:
    if not words:
        raise SettingsError("a model must be named", got="none", remedy=f"write manyhands models {example}")
    return words


def _number(text: str) -> int:
    if not text.isdecimal():
        raise SettingsError("a version is a number", got=repr(text), remedy="see manyhands models list")
    return int(text)


def _share(word: str) -> dict[str, Any]:
    """A part of a split: VERSION=WEIGHT, MODEL=WEIGHT or MODEL/VERSION=WEIGHT."""
    target, _, weight = word.partition("=")
    model, _, version = target.rpartition("/")
    try:
        share: dict[str, Any] = {"weight": float(weight)}
    except ValueError:
        raise SettingsError("a share is VERSION=WEIGHT", got=repr(word), remedy="write for instance 2=90") from None
    if not model and not version.isdecimal():
        return {**share, "model": version}
    return {**share, "version": _number(version), **({"model": model} if model else {})}
