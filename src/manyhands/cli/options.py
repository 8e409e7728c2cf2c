"""How a verb is registered, and the arguments and options that several share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Annotated, Any

import typer

from .failures import guarded

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


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How and where, for every verb that splits."""

    strategy: str | None = None
    on: str | None = None


def add_verb(app: typer.Typer, verb: Callable[..., None], examples: Sequence[str], **context: Any) -> None:
    """Registers a verb: its docstring is the help, examples end it, and its errors become exit codes."""
    paragraphs = cleandoc(verb.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    epilog = "\n\n".join(["[bold]Examples[/]", *examples])
    app.command(help=text, epilog=epilog, context_settings=context)(guarded(verb))
