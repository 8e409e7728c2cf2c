"""The `options=` argument of public functions, and errors that name the options class of an unknown argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from ..core import SettingsError

P = ParamSpec("P")
R = TypeVar("R")


def takes_options(*kinds: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: its TypeError for an unknown argument names the options class that has the name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in names:
                    home = _home(kinds, name)
                    remedy = (
                        f"pass options={_written(home, {name: value})}" if home else f"known are {', '.join(names)}"
                    )
                    raise TypeError(f"mh.{function.__name__} has no argument {name!r}; {remedy}")
            return function(*args, **kwargs)

        return call

    return decorate


def collect(function: str, kinds: Sequence[type], options: Any) -> list[Any]:
    """Return an object of each options class: the one in `options`, or one with the defaults.

    Args:
        function: Name of the public function, for errors.
        kinds: The options classes of the function.
        options: An object of one of the classes, a list of several objects, or None.
    """
    given = list(options) if isinstance(options, list | tuple) else [] if options is None else [options]
    for one in given:
        if type(one) not in kinds:
            raise SettingsError(
                f"options of mh.{function} must be objects of {', '.join(kind.__name__ for kind in kinds)}",
                got=f"the class {one.__name__}" if isinstance(one, type) else repr(one),
                remedy=f"pass {_meant(kinds, one)}",
            )
    twice = [kind.__name__ for kind in kinds if sum(type(one) is kind for one in given) > 1]
    if twice:
        raise SettingsError(
            "options must contain one object of a class", got=f"{twice[0]} twice", remedy="join them in one object"
        )
    by_kind = {type(one): one for one in given}
    return [by_kind.get(kind) or kind() for kind in kinds]


def _meant(kinds: Sequence[type], given: Any) -> str:
    """Return the expression that the user probably meant instead of the argument `given`, for an error."""
    if isinstance(given, type) and given in kinds:
        return f"an object: mh.options.{given.__name__}(...)"
    for name in given if isinstance(given, Mapping) else ():
        home = _home(kinds, str(name))
        if home is not None:
            return f"options={_written(home, {str(name): given[name]})}"
    return f"for example options=mh.options.{kinds[0].__name__}(...)"


def _home(kinds: Sequence[type], name: str) -> type | None:
    return next((kind for kind in kinds if name in [each.name for each in fields(kind)]), None)


def _written(kind: type, values: Mapping[str, Any]) -> str:
    """Return the expression that creates an object of an options class; long values are abbreviated."""
    shown = ", ".join(f"{name}={text if len(text := repr(value)) < 40 else '...'}" for name, value in values.items())
    return f"mh.options.{kind.__name__}({shown})"
