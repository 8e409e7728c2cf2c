"""How a verb is registered, and the arguments and options that several share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from .failures import guarded

if TYPE_CHECKING:
    from ..launcher import Join

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py[:name]",
        help="A Python file with a function [bold]task[/] that returns an mh.Task; another name follows a colon.",
        show_default=False,
    ),
]
Params = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Parameters of the task function, converted to the types in its signature.",
        show_default=False,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="How to split: [bold]single[/], [bold]mirrored[/], or settings such as replicas=4,accumulate=2. "
        "By default a replica on every device.",
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DEVICES",
        help="Where to run: cuda:0,1 or cpu; 'cpu*2' cuts the CPU into two (with quotes, because of the shell). "
        "By default what this machine has.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


Hosts = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="On how many hosts: the same command is started on each of them.", show_default=False
    ),
]
JoinAt = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="HOST:PORT",
        help="Where hosts join: an address of the first one; 127.0.0.1:PORT to try several on one machine.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The token of the job, from manyhands token FILE; else MANYHANDS_TOKEN.",
        show_default=False,
    ),
]
TlsFolder = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="FOLDER",
        help="Join under TLS: a folder with tls.crt, tls.key and ca.crt.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How and where, for every verb that splits."""

    strategy: str | None = None
    on: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostsSettings(SplitSettings):
    """How and where, for a verb that many hosts can do together."""

    hosts: int | None = None
    join: str | None = None
    token_file: str | None = None
    tls: str | None = None

    def place(self, file: Path, *work: str) -> str | Join | None:
        """What the verb takes as `on`; `work` and the file must be the same on every host."""
        from ..launcher import TLS_VARIABLE, TOKEN_VARIABLE, Join

        given = {"--hosts": self.hosts, "--join": self.join, "--token-file": self.token_file}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            if self.tls and self.tls != os.environ.get(TLS_VARIABLE):
                raise SettingsError(
                    "--tls is for hosts that join",
                    got=f"--tls {self.tls} without --join",
                    remedy=f"give --hosts and --join too; under a scheduler set {TLS_VARIABLE} instead",
                )
            return self.on
        if set(missing) - ({"--token-file"} if os.environ.get(TOKEN_VARIABLE) else set()):
            raise SettingsError(
                f"many hosts need {', '.join(given)}", got=f"no {' and no '.join(missing)}", remedy="give all three"
            )
        assert self.hosts is not None
        assert self.join is not None
        said = " ".join([hashlib.sha256(file.read_bytes()).hexdigest(), str(self.strategy), *work])
        token, tls = self.token_file or "", self.tls or ""
        return Join(address=self.join, hosts=self.hosts, token_file=token, tls=tls, on=self.on, work=said)


def add_verb(app: typer.Typer, verb: Callable[..., None], examples: Sequence[str], **context: Any) -> None:
    """Registers a verb: its docstring is the help, examples end it, and its errors become exit codes."""
    paragraphs = cleandoc(verb.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    epilog = "\n\n".join(["[bold]Examples[/]", *examples])
    app.command(help=text, epilog=epilog, context_settings=context)(guarded(verb))


def require_places(**files: Path | None) -> None:
    """Refuses options with files that cannot be written, before the work whose result they are for."""
    for option, path in files.items():
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise SettingsError(
                f"--{option} is a file in a folder that can be written",
                got=str(path),
                remedy="name another one, or make its folder",
            )
