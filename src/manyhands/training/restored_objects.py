"""Restore the state that a loss function holds outside of the network after a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..core import Contents, remember_state

Number = int | float
FUNCTIONS = (FunctionType, MethodType, functools.partial)
UNASSIGNED = object()
"""The content of a cell whose variable has no value yet."""


@contextmanager
def left_alone(function: Callable[..., Any] | None) -> Iterator[None]:
    """On exit, restore numbers, containers and buffers that a function holds in its closure, object or arguments.

    >>> def counting(count=[0]):
    ...     count[0] += 1
    >>> with left_alone(counting):
    ...     counting()
    >>> counting.__defaults__
    ([0],)
    """
    put_back = remember_held(function)
    try:
        yield
    finally:
        put_back()


def remember_held(function: Callable[..., Any] | None) -> Callable[[], None]:
    """Return a function that restores what a function holds in its closure, object or arguments."""
    undos = [undo for held in _held(function) for undo in _remembered(held)]

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

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self._put_own = remember_held(function)
        self._put_back: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._put_back = remember_held(self._function)
        self._put_own()

    def __exit__(self, *_: object) -> None:
        self._put_own = remember_held(self._function)
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


def _held(function: Any, depth: int = 2) -> Iterator[Any]:
    """Yield what a function holds; closure cells are yielded themselves, because their contents may be replaced."""
    if isinstance(function, functools.partial):
        yield from (function.args, *function.args, *function.keywords.values())
        yield from _held(function.func, depth)
    elif isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, FunctionType):
        used = global_state(function)
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield GlobalNumbers(function.__globals__, [name for name, value in used.items() if isinstance(value, Number)])
        yield from (value for value in used.values() if not isinstance(value, FUNCTIONS))
        for value in (*used.values(), *map(_content, function.__closure__ or ())) if depth else ():
            if isinstance(value, FUNCTIONS):
                yield from _held(value, depth - 1)
    elif function is not None:
        yield function


@dataclass(frozen=True)
class GlobalNumbers:
    """The numbers in some variables of a module."""

    variables: dict[str, Any]
    names: list[str]

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the numbers."""
        before = {name: self.variables[name] for name in self.names}
        return functools.partial(self.variables.update, before)


def _content(cell: CellType) -> Any:
    """Return what a closure's cell contains."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED


def _remembered(held: Any) -> Iterator[Callable[[], None]]:
    if isinstance(held, CellType):
        content = _content(held)
        if content is UNASSIGNED:
            return
        yield functools.partial(setattr, held, "cell_contents", content)
        held = content
    if isinstance(held, GlobalNumbers):
        yield held.remember()
    elif isinstance(held, nn.Module):
        yield remember_state(held)
    else:
        yield Contents([held]).put_back
