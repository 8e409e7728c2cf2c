"""Callbacks: hooks for user code at a few points of a run. They run on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core import TaskError
from .patience import Patience

if TYPE_CHECKING:
    from .hand import Hand


class Callback:
    """Base class of callbacks: override methods; `hand.stop()` ends the run after the same step on all replicas.

    With several devices every replica has its own copy in its own process, and attributes set on a copy stay there:
    report with `hand.log(...)`, write files, or read `run.history` afterwards.
    """

    def on_start(self, hand: Hand) -> None:
        """Called when the network is built, before the first step."""

    def on_step(self, hand: Hand) -> None:
        """Called after a step; `hand.num_steps` includes it, and reading `hand.loss` waits for the device."""

    def on_epoch(self, hand: Hand, metrics: Mapping[str, float]) -> None:
        """Called after an epoch and its validation."""

    def on_end(self, hand: Hand) -> None:
        """Called at the end of the run, also when it was stopped."""


def check_callbacks(callbacks: object) -> None:
    """Raise for callbacks that would never be called; a list may also contain `Patience`."""
    if not isinstance(callbacks, (list, tuple)):
        raise TaskError("callbacks must be a list", got=type(callbacks).__name__, remedy="pass callbacks=[...]")
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if isinstance(callback, Patience):
            continue
        if not isinstance(callback, Callback):
            got = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
            raise TaskError(
                "a callback must be an mh.Patience, or an instance of a subclass of mh.Callback",
                got=got,
                remedy="pass an instance, such as MyCallback()",
            )
        strange = [name for name in dir(callback) if name.startswith("on_") and name not in known]
        if strange:
            raise TaskError(
                f"methods of a callback that start with on_ must be among {', '.join(known)}",
                got=", ".join(strange),
                remedy="rename the method",
            )
