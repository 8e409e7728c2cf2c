"""Restore the state that a loss function holds outside of the network after a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..core import remember_state

PLAIN = (int, float, str, bytes, bool, type(None))


@contextmanager
def left_alone(function: Callable[..., Any] | None) -> Iterator[None]:
    """Restore what a function holds in its closure, object or arguments afterwards: numbers, containers, buffers.

    >>> def counting(count=[0]):
    ...     count[0] += 1
    >>> with left_alone(counting):
    ...     counting()
    >>> counting.__defaults__
    ([0],)
    """
    put_back = [undo for held in _held(function) for undo in _remembered(held)]
    try:
        yield
    finally:
        for undo in put_back:
            undo()


def _held(function: Any) -> Iterator[Any]:
    """Yield what a function holds; closure cells are yielded themselves, because their contents may be replaced."""
    if isinstance(function, functools.partial):
        yield from (function.args, *function.args, *function.keywords.values())
        yield from _held(function.func)
    elif isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, FunctionType):
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
    elif function is not None:
        yield function


def _remembered(held: Any) -> Iterator[Callable[[], None]]:
    if isinstance(held, CellType):
        try:
            content = held.cell_contents
        except ValueError:
            return
        yield functools.partial(setattr, held, "cell_contents", content)
        held = content
    if isinstance(held, nn.Module):
        yield remember_state(held)
    elif isinstance(held, list | dict | set):
        yield _container(held)
    elif not isinstance(held, (*PLAIN, type, FunctionType, Tensor)) and hasattr(held, "__dict__"):
        yield _attributes(held)


def _container(held: Any) -> Callable[[], None]:
    before = held.copy()

    def put_back() -> None:
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(before)

    return put_back


def _attributes(held: Any) -> Callable[[], None]:
    """Return a function that restores the plain attributes and tensors of an object."""
    kept: dict[str, Any] = {name: value for name, value in vars(held).items() if isinstance(value, PLAIN)}
    tensors = {name: (value, value.detach().clone()) for name, value in vars(held).items() if isinstance(value, Tensor)}

    def put_back() -> None:
        with torch.no_grad():
            for name, (tensor, before) in tensors.items():
                tensor.copy_(before)
                kept[name] = tensor
        for name, value in kept.items():
            setattr(held, name, value)

    return put_back
