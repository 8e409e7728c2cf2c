"""Double backward: losses that differentiate by themselves, as gradient penalties do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core import StrategyError
from ..graph import calling_line


@contextmanager
def on_gradients(call: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the user's line whenever torch.autograd.grad is called inside."""
    own = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        call(calling_line())
        return own(*args, **kwargs)

    torch.autograd.grad = grad  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.grad = own


def refuse_gradients(line: str) -> None:
    """Refuse a loss that differentiates by itself where no rank has all of the graph that it needs."""
    raise StrategyError(
        "a loss does not call torch.autograd.grad where several ranks compute the network together",
        got=line,
        remedy="use mh.Mirrored() or mh.Sharded()",
    )
