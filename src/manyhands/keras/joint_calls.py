"""Calls of a script that all replicas must make together, with the same models, or that one makes alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet, ref
from zlib import crc32

import torch

from ..core import StrategyError
from ..distributed import caller_lines
from ..training import SCRIPT_END, Hand
from .inputs import brought_by_all, next_call_name
from .model_changes import variables_of
from .step import apart

_num_done: dict[str, int] = {}
"""Number of calls of `once` by name and place in the script."""


class JointCalls:
    """Keeps the replicas of a strategy at the same place of the script, with equal models."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self._num_alone = 0
        self._compared: WeakSet[Any] = WeakSet()
        """Optimizers whose variables were verified to be equal on all replicas."""

    @property
    def is_alone(self) -> bool:
        """Whether this replica currently works without the others, as callbacks do on the first one."""
        return self._num_alone > 0 and self.hand.size > 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block on this replica alone, without coordination with others."""
        self._num_alone += 1
        try:
            with apart():
                yield
        finally:
            self._num_alone -= 1

    def require(self, what: str) -> None:
        """Raise if this replica is alone, as in a callback: the others would not take part."""
        if self.is_alone:
            raise StrategyError(
                f"all replicas must take part in {what}",
                got="a call in a callback, which runs on the first replica only",
                remedy="call the model there, or model.evaluate on all rows, or do it between two calls of fit",
            )

    def require_all(self, doing: str) -> None:
        """Raise if only some replicas do this; otherwise they would wait for the others indefinitely."""
        self.require(doing)
        if self.hand.size > 1:
            brought_by_all(self.hand, doing)

    def require_equal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Raise if weights differ between replicas before the first step: summed gradients would not equalize them."""
        if optimizer in self._compared or self.hand.size == 1:
            return
        self._compared.add(optimizer)
        every = self.hand.world.gather_objects([_digest(variable) for variable in variables])
        for variable, digests in zip(variables, zip(*every, strict=True), strict=True):
            if len(set(digests)) > 1:
                raise StrategyError(
                    "weights must be the same on all replicas before training",
                    got=f"different values of {getattr(variable, 'path', 'a parameter')}",
                    remedy="create the model in `with strategy.scope():`, or load its weights on every replica",
                )

    def once(self, name: str, act: Callable[[], Any]) -> Any:
        """Run `act` on the first replica only; the others wait until it is done, so that they can read its files.

        The first replica does not wait, since a script may call this on it alone. The others wait for the call from the
        same place in the script, or until the first replica reaches the next synchronization point or the end.
        """
        place = f"{name} on the first replica at {', '.join(caller_lines())}"
        number = _num_done[place] = _num_done.get(place, 0) + 1
        if not self.hand.is_first:
            return self.hand.world.wait_for(f"{place} ({number})", next_call_name(), SCRIPT_END)
        try:
            return act()
        finally:
            self.hand.world.mark(f"{place} ({number})")

    def begin(self, doing: str, model: Any) -> None:
        """Require all replicas, and broadcast the first one's weights and optimizer state."""
        self.require_all(doing)
        for variable in variables_of(model):
            self.hand.replicas.broadcast(variable._value.data)


class ScopeMetrics:
    """Metrics created in the scope of a strategy, which `run` sums over the replicas."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.metrics: list[Any] = []
        """In creation order, which is the same on all replicas."""

    def drop_unused(self) -> None:
        """Drop metrics without other references.

        All replicas do this at the same point: with separate garbage collection, `run` would sum different metrics.
        """
        held, self.metrics = [ref(metric) for metric in self.metrics], []
        if held:
            gc.collect()
            alive = zip(*self._hand.world.gather_objects([known() is not None for known in held]), strict=True)
            self.metrics = [known() for known, flags in zip(held, alive, strict=True) if all(flags)]


def _digest(variable: Any) -> int:
    """Return a checksum of a variable's first 4096 elements."""
    value = getattr(variable, "value", variable).detach().reshape(-1)[:4096]
    return crc32(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
