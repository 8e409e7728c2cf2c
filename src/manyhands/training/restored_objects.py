"""Restore the state that a loss function holds outside of the network after a trial."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..core import Contents, remember_state

Number = int | float
FUNCTIONS = (FunctionType, MethodType, functools.partial)
MOST_SEEN = 300
"""Maximum number of functions and classes that are inspected."""
_OURS = __name__.partition(".")[0]
UNASSIGNED = object()
"""The content of a cell whose variable has no value yet."""


@contextmanager
def left_alone(*functions: Callable[..., Any] | None) -> Iterator[None]:
    """On exit, restore numbers, containers and buffers that functions hold in closures, objects, arguments and classes.

    >>> def counting(count=[0]):
    ...     count[0] += 1
    >>> with left_alone(counting):
    ...     counting()
    >>> counting.__defaults__
    ([0],)
    """
    put_back = remember_held(*functions)
    try:
        yield
    finally:
        put_back()


def remember_held(*functions: Callable[..., Any] | None) -> Callable[[], None]:
    """Return a function that restores what functions hold in closures, objects, arguments and classes."""
    undos = [undo for held in held_by(*functions) for undo in _remembered(held)]

    def put_back() -> None:
        for undo in undos:
            undo()

    return put_back


class HeldState:
    """The state that a function holds for one of several users, each of which sees only its own changes.

    >>> count = [0]
    >>> def counting(): count[0] += 1
    >>> first, second = HeldState(counting), HeldState(counting)
    >>> for state in (first, first, second):
    ...     with state:
    ...         counting()
    ...         print(count[0])
    1
    2
    1
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self._functions = functions
        self._put_own = remember_held(*functions)
        self._put_back: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._put_back = remember_held(*self._functions)
        self._put_own()

    def __exit__(self, *_: object) -> None:
        self._put_own = remember_held(*self._functions)
        self._put_back()


def global_state(function: FunctionType) -> dict[str, Any]:
    """Return the module-level variables that a function uses and that may hold state, by name.

    >>> calls = 0
    >>> def counting():
    ...     global calls
    ...     calls += 1
    >>> global_state(counting)
    {'calls': 0}
    """
    found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    return {name: value for name, value in found.items() if _may_change(value, function.__module__)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _may_change(value: Any, module: str) -> bool:
    """Return whether a variable of a module may be state of the user's, not of a library."""
    if isinstance(value, (FunctionType, type)):
        return isinstance(value, FunctionType) and value.__module__ == module
    return isinstance(value, (int, float, list, dict, set, nn.Module)) or type(value).__module__ == module


def held_by(*roots: Any) -> Iterator[Any]:
    """Yield what functions and classes hold, and what those that they use hold.

    Closure cells are yielded themselves, because their contents may be replaced.
    """
    waiting, seen = deque(roots), set(map(id, roots))
    while waiting:
        value = waiting.popleft()
        used: list[Any] = []
        if isinstance(value, functools.partial):
            yield from (value.args, *value.args, *value.keywords.values())
            used = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            # A wrapper of this project around a user's function refers to the run itself.
            if type(value.__self__).__module__.partition(".")[0] != _OURS:
                yield value.__self__
        elif isinstance(value, FunctionType):
            found = global_state(value)
            yield from value.__closure__ or ()
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
            yield GlobalNumbers(value.__globals__, [name for name, held in found.items() if isinstance(held, Number)])
            yield from (held for held in found.values() if not isinstance(held, FUNCTIONS))
            used = [*found.values(), *map(content_of, value.__closure__ or ()), *classes_in(value)]
        elif isinstance(value, type):
            yield ClassNumbers(value)
            yield from (held for held in vars(value).values() if isinstance(held, list | dict | set | deque))
            used = [*functions_of(value), *value.__mro__]
        elif value is not None:
            yield value
        for one in used:
            if (isinstance(one, FUNCTIONS) or is_users_class(one)) and id(one) not in seen and len(seen) < MOST_SEEN:
                seen.add(id(one))
                waiting.append(one)


def classes_in(function: FunctionType) -> list[type]:
    """Return the classes that a function uses by their module-level names."""
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    return [value for value in named if isinstance(value, type)]


def functions_of(kind: type) -> list[FunctionType]:
    """Return the functions in the body of a class, also those of properties, static and class methods."""
    found = []
    for value in vars(kind).values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        found += [part for part in parts if isinstance(part, FunctionType)]
    return found


def is_users_class(value: Any) -> bool:
    """Return whether a value is a class that is part of neither manyhands nor an installed package.

    >>> is_users_class(nn.Linear), is_users_class(int)
    (False, False)
    """
    return isinstance(value, type) and _is_users(value.__module__)


@functools.cache
def _is_users(module: str) -> bool:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names - {"__main__"} or top == _OURS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


@dataclass(frozen=True)
class ClassNumbers:
    """The numbers among the attributes of a class, such as a count of all calls of its objects."""

    kind: type

    def names(self) -> list[str]:
        """Return the names of the attributes that are numbers."""
        return [name for name, value in vars(self.kind).items() if isinstance(value, Number) and name[:2] != "__"]

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the numbers."""
        before = {name: vars(self.kind)[name] for name in self.names()}

        def put_back() -> None:
            for name, value in before.items():
                if vars(self.kind).get(name) is not value:
                    setattr(self.kind, name, value)

        return put_back


@dataclass(frozen=True)
class GlobalNumbers:
    """The numbers in some variables of a module."""

    variables: dict[str, Any]
    names: list[str]

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the numbers."""
        before = {name: self.variables[name] for name in self.names}
        return functools.partial(self.variables.update, before)


def content_of(cell: CellType) -> Any:
    """Return what a closure's cell contains."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED


def _remembered(held: Any) -> Iterator[Callable[[], None]]:
    if isinstance(held, CellType):
        content = content_of(held)
        if content is UNASSIGNED:
            return
        yield functools.partial(setattr, held, "cell_contents", content)
        held = content
    if isinstance(held, GlobalNumbers | ClassNumbers):
        yield held.remember()
    elif isinstance(held, nn.Module):
        yield remember_state(held)
    else:
        yield Contents([held]).put_back
