"""Command-line options that are generated from the fields of options classes, grouped in the help by class."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..core import convert, options_of
from .options import TAKES_VALUE

GIVEN = "given"
"""The parameter of a command that receives the values of generated options by name; None for options not given."""


def with_options(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that every field of the options classes `kinds` becomes one of its command-line options.

    The command receives their values in its parameter `given`. The help groups options by class; the heading of a group
    is the text of the class's docstring before the first colon. Secret fields get no option, because other users of the
    machine can see command lines.
    """
    generated = [parameter for kind in kinds for parameter in _parameters(kind)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != GIVEN
        ]
        names = [parameter.name for parameter in generated]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            command(**values, **{GIVEN: given})

        parameters = [*own, *generated]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        return run

    return decorate


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Return a keyword parameter for every field of an options class that may be given on the command line."""
    heading = (kind.__doc__ or kind.__name__).partition(":")[0]
    hints = typing.get_type_hints(kind)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(each.name, hints[each.name], each.metadata, heading),
        )
        for each in options_of(kind)
        if not each.metadata["secret"]
    ]


def _annotation(name: str, hint: Any, metadata: typing.Mapping[str, Any], heading: str) -> Any:
    """Return the annotation from which typer creates an option; a sequence is given as text separated by commas."""
    kinds = [one for one in typing.get_args(hint) if one is not type(None)] or [hint]
    is_flag = kinds in ([bool], [bool, int])
    kind = bool if is_flag else str if typing.get_origin(hint) is tuple or len(kinds) > 1 else kinds[0]
    details = typer.Option(
        f"{_flag(name)}/--no-{_flag(name)[2:]}" if is_flag else _flag(name),
        help=metadata["help"],
        metavar=metadata["metavar"] or None,
        rich_help_panel=heading,
        show_default=False,
    )
    return Annotated[kind | None, details]


def typed_values(kinds: Sequence[type], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were given, converted to the types of their fields; texts are split into sequences."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    return {name: convert(_flag(name), value, hints[name]) for name, value in given.items() if value is not None}


def as_words(name: str, value: Any) -> list[str]:
    """Return the words of a command line that set the option of a field to a value.

    >>> as_words("save_every", 5), as_words("verify", False), as_words("resume", True)
    (['--save-every', '5'], ['--no-verify'], ['--resume', 'true'])
    """
    if isinstance(value, bool) and name not in TAKES_VALUE:
        return [_flag(name) if value else f"--no-{_flag(name)[2:]}"]
    return [_flag(name), str(value).lower() if isinstance(value, bool) else str(value)]


def _flag(name: str) -> str:
    """Return the name of a field as a command-line option: `--save-every` for "save_every"."""
    return f"--{name.replace('_', '-')}"
