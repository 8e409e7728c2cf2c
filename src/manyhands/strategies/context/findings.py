"""Findings of a trial: which operations need whole tensors, and whether the sequence reaches an attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...distributed import calling_line

_current = threading.local()
MAX_SHOWN = 3
"""Maximum number of places that a note names."""


class Findings:
    """What a trial of a network under context parallelism found."""

    def __init__(self) -> None:
        self.num_attentions = 0
        self._gathered: dict[tuple[str, str], list[str]] = {}
        self._modules: list[str] = []

    def gathered(self, operation: str) -> None:
        """Record an operation that is computed on whole tensors."""
        place = self._modules[-1] if self._modules else "the loss"
        places = self._gathered.setdefault((operation, calling_line()), [])
        if place not in places:
            places.append(place)

    @property
    def notes(self) -> list[str]:
        """Messages for the user, one for each line of code."""
        found = []
        for (operation, line), places in self._gathered.items():
            more = f" and {len(places) - MAX_SHOWN} more" if len(places) > MAX_SHOWN else ""
            shown = ", ".join(place or "the network itself" for place in places[:MAX_SHOWN]) + more
            found.append(f"{operation} in {shown} is computed on whole sequences on every rank ({line})")
        return found

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[Findings]:
        """Record what the network does inside this context, in this thread."""
        names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, *_: Any) -> None:
            if module in names:
                self._modules.append(names[module])

        def leave(module: nn.Module, *_: Any) -> None:
            if module in names:
                self._modules.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        _current.findings = self
        try:
            yield self
        finally:
            del _current.findings
            self._modules.clear()
            for handle in handles:
                handle.remove()


def count_attention() -> None:
    """Record an attention over a split sequence, if a trial runs."""
    found = getattr(_current, "findings", None)
    if found is not None:
        found.num_attentions += 1


def note_gathered(operation: str) -> None:
    """Record an operation on whole tensors, if a trial runs."""
    found = getattr(_current, "findings", None)
    if found is not None:
        found.gathered(operation)
