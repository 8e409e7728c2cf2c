"""Registration of commands, options that several commands share, and errors reworded for the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, UsageError, option
from .failures import guarded

if TYPE_CHECKING:
    from ..launcher import Join

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py[:name]",
        help="A Python file with a function [bold]task[/] that returns an mh.Task; for another name append :name.",
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
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with these options as keys, and the parameters of the task under \\[task]."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, no progress.")]


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices: where the work runs."""

    on: str | None = option(
        None,
        "Devices: cuda:0,1 or cpu; 'cpu*2' splits the CPU into two (quoted because of the shell). By default the "
        "devices of this machine.",
        metavar="DEVICES",
    )


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Distribution: how the work is split."""

    strategy: str | None = option(
        None,
        "How to distribute: [bold]single[/], [bold]mirrored[/], or settings such as replicas=4,accumulate=2. By "
        "default one replica on every device.",
        metavar="TEXT",
    )


@dataclass(frozen=True, kw_only=True)
class SeveralHosts:
    """Several hosts: run the same command on each of them."""

    hosts: int | None = option(None, "Number of hosts.", metavar="N")
    join: str | None = option(
        None,
        "Address of the first host, where the others join; 127.0.0.1:PORT to try several on one machine.",
        metavar="HOST:PORT",
    )
    token_file: str | None = option(
        None,
        "File with the token of the job, from manyhands token FILE; by default MANYHANDS_TOKEN.",
        metavar="FILE",
    )
    tls: str | None = option(
        None, "Use TLS with the files tls.crt, tls.key and ca.crt of this folder.", metavar="FOLDER"
    )
    coordination: str | None = option(
        None,
        "etcd that elects another coordinator if the first host fails; several members are separated by commas.",
        metavar="etcd://HOST:PORT",
    )

    def place(self, on: str | None, file: Path, *work: str) -> str | Join | None:
        """Return the value of `on=` for `mh.fit`: `mh.Join` if options for several hosts were given, else `on`.

        Args:
            on: The devices of this host.
            file: The Python file of the command, which must be the same on every host.
            *work: Other parts of the command that must be the same on every host.

        Raises:
            SettingsError: Some of the options are missing.
        """
        from ..launcher import TLS_VARIABLE, TOKEN_VARIABLE, Join

        given = {"--hosts": self.hosts, "--join": self.join, "--token-file": self.token_file}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            if self.tls and self.tls != os.environ.get(TLS_VARIABLE):
                raise SettingsError(
                    "--tls must be used together with --hosts and --join",
                    got=f"--tls {self.tls} alone",
                    remedy=f"pass --hosts and --join too; under a scheduler set {TLS_VARIABLE} instead",
                )
            if self.coordination:
                raise SettingsError(
                    "--coordination must be used together with --hosts and --join",
                    got=f"--coordination {self.coordination} alone",
                    remedy="pass --hosts and --join too",
                )
            return on
        if set(missing) - ({"--token-file"} if os.environ.get(TOKEN_VARIABLE) else set()):
            raise SettingsError(
                f"a job on several hosts needs {', '.join(given)}",
                got=f"no {' and no '.join(missing)}",
                remedy="pass all three",
            )
        assert self.hosts is not None
        assert self.join is not None
        work_key = " ".join([hashlib.sha256(file.read_bytes()).hexdigest(), *work])
        return Join(
            address=self.join,
            hosts=self.hosts,
            token_file=self.token_file or "",
            tls=self.tls or "",
            coordination=self.coordination or "",
            on=on,
            work=work_key,
        )


def add_command(app: typer.Typer, function: Callable[..., None], examples: Sequence[str], **context: Any) -> None:
    """Add a function as a command, whose help is its docstring followed by examples; errors become exit codes."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    epilog = "\n\n".join(["[bold]Examples[/]", *examples])
    app.command(help=text, epilog=epilog, context_settings=context)(guarded(function))


def require_places(**files: Path | None) -> None:
    """Raise SettingsError for a file that cannot be written; the keyword is the name of its option.

    Commands call this before they start long work.
    """
    for name, path in files.items():
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise SettingsError(
                f"--{name} must be a file in a folder that can be written",
                got=str(path),
                remedy="choose another path, or create its folder",
            )


TAKES_VALUE = ("resume",)
"""Options for which True is written as the value "true", because they also accept other values than true and false."""


@contextlib.contextmanager
def in_options(*settings: type[Any]) -> Iterator[None]:
    """Context that rewords errors: names of fields of the options classes become command-line options, as --epochs."""
    names = [field.name for kind in settings for field in dataclasses.fields(kind)]
    try:
        yield
    except UsageError as error:
        reworded_error = UsageError(reworded(error.rule, names), got=error.got, remedy=reworded(error.remedy, names))
        error.args = reworded_error.args
        raise


def reworded(text: str, names: list[str]) -> str:
    """Return a text in which Python arguments are replaced by command-line options; words that may mean both are kept.

    >>> reworded('pass profile=True, or name="..."', ["profile", "name"])
    'pass --profile, or --name ...'
    >>> reworded('pass resume=True or resume="auto"', ["resume"])
    'pass --resume true or --resume auto'
    >>> reworded("save_every must be a whole number of at least 1", ["save_every"])
    '--save-every must be a whole number of at least 1'
    """
    for name in names:
        option = f"--{name.replace('_', '-')}"
        flag = f"{option} true" if name in TAKES_VALUE else option
        text = re.sub(rf"(?<![\w.-]){name}=True\b", flag, text)
        text = re.sub(rf'(?<![\w.-]){name}="auto"', f"{option} auto", text)
        text = re.sub(rf'(?<![\w.-]){name}="\.\.\."', f"{option} ...", text)
        text = re.sub(rf"(?<![\w.-]){name}=(?=[\d\"'])", f"{option} ", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.-]){name}\b(?!=)", option, text)
    return text
