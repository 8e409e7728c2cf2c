"""Coordination of a script's calls: those that all replicas must make together, and those that one makes alone."""

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
"""Number of calls of `JointCalls.once`, by name and place in the script."""


class JointCalls:
    """Checks that the replicas of a strategy make the same calls with equal models."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self._num_alone = 0
        self._compared: WeakSet[Any] = WeakSet()
        """Optimizers whose model variables were verified to be equal on all replicas."""

    @property
    def is_alone(self) -> bool:
        """Whether this replica currently works without the others, as callbacks do on the first one."""
        return self._num_alone > 0 and self.hand.size > 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context whose block runs on this replica alone, without coordination with the others."""
        self._num_alone += 1
        try:
            with apart():
                yield
        finally:
            self._num_alone -= 1

    def require(self, what: str) -> None:
        """Raise StrategyError if this replica works alone, as in a callback: the others would not take part.

        `what` names the caller's function in the error.
        """
        if self.is_alone:
            raise StrategyError(
                f"all replicas must take part in {what}",
                got="a call in a callback, which runs on the first replica only",
                remedy="in a callback, call the model or model.evaluate, which use all rows on one replica; make other "
                "calls before or after fit",
            )

    def require_all(self, doing: str) -> None:
        """Raise StrategyError if only some replicas make the call that `doing` names.

        Without this check, those replicas would wait for the others indefinitely.
        """
        self.require(doing)
        if self.hand.size > 1:
            brought_by_all(self.hand, doing)

    def require_equal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Raise StrategyError if weights differ between replicas before the first update of `optimizer`.

        They would remain different, because updates by summed gradients are the same on all replicas.
        """
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
        """Run `act` on the first replica only; the others wait until it has returned, so that they can read its files.

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
        """Check that all replicas make the call `doing`, and broadcast the first one's weights and optimizer state."""
        self.require_all(doing)
        for variable in variables_of(model):
            self.hand.replicas.broadcast(variable._value.data)


class ScopeMetrics:
    """The metrics that were created in the scope of a strategy, which `Strategy.run` sums over the replicas."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.metrics: list[Any] = []
        """The metrics in the order of their creation, which is the same on all replicas."""

    def drop_unused(self) -> None:
        """Drop metrics that the script has deleted on some replica; all replicas must call this.

        If each replica relied on its own garbage collection, `Strategy.run` would sum different metrics.
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
