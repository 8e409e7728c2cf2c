"""A user-defined function as a sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core import Event
from .sink import Sink


class FunctionSink(Sink):
    """Sink that calls a function with every event."""

    def __init__(self, function: Callable[[Event], Any]) -> None:
        self._function = function

    def __str__(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def take(self, entry: Event) -> None:
        self._function(entry)
