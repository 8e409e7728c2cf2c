"""Detect losses that call autograd themselves, such as gradient penalties, and custom backward code of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..core import StrategyError
from ..distributed import calling_line


@contextmanager
def on_gradients(call: Callable[[str], None], *, backward: bool = True) -> Iterator[None]:
    """Call a function with the user's line whenever torch.autograd.grad, or a tensor's `backward`, is called inside."""
    own_grad, own_backward = torch.autograd.grad, torch.autograd.backward

    def grad(*args: Any, **kwargs: Any) -> Any:
        call(calling_line())
        return own_grad(*args, **kwargs)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        call(calling_line())
        return own_backward(*args, **kwargs)

    torch.autograd.grad = grad
    if backward:
        torch.autograd.backward = run_backward
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = own_grad, own_backward


def refuse_gradients(line: str) -> None:
    """Raise for a loss that calls autograd itself, because no rank has the whole graph."""
    raise StrategyError(
        "a loss must not call torch.autograd.grad or backward if several ranks compute the network together",
        got=line,
        remedy="use mh.Mirrored() or mh.Sharded()",
    )


@contextmanager
def untraceable() -> Iterator[None]:
    """Raise inside this context for what a trace of forward does not contain: tensor hooks and autograd.Functions."""
    own_apply, own_hook = Function.__dict__["apply"], Tensor.register_hook

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not kind.__module__.startswith("torch."):
            _refuse_own_backward(f"{kind.__name__}, in {calling_line()}")
        return own_apply.__get__(None, kind)(*args, **kwargs)

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        _refuse_own_backward(f"a hook, in {calling_line()}")

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        Function.apply, Tensor.register_hook = own_apply, own_hook  # type: ignore[method-assign]


def _refuse_own_backward(got: str) -> None:
    raise StrategyError(
        "a partitioned network is traced, and the trace does not contain a backward written by the user",
        got=got,
        remedy="use mh.Mirrored() or mh.Sharded()",
    )
