"""Callbacks: a few moments of a run at which a person's own code may look in. They run on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core import TaskError

if TYPE_CHECKING:
    from .hand import Hand


class Callback:
    """Subclass and override; `hand.stop()` ends the run after a step that all replicas agree on.

    With several devices every replica has a copy of its own in its own process, and what a copy keeps on itself stays
    there: report with `hand.log(...)`, write files, or read `run.history` afterwards.
    """

    def on_start(self, hand: Hand) -> None:
        """The network is in place, nothing was trained yet."""

    def on_step(self, hand: Hand) -> None:
        """A step was taken; `hand.num_steps` counts it, `hand.loss` waits for its loss."""

    def on_epoch(self, hand: Hand, metrics: Mapping[str, float]) -> None:
        """A pass over the data is done and validated."""

    def on_end(self, hand: Hand) -> None:
        """The run is over, also when it was stopped."""


def check_callbacks(callbacks: object) -> None:
    """Refuses what would never be called."""
    if not isinstance(callbacks, (list, tuple)):
        raise TaskError("callbacks is a list", got=type(callbacks).__name__, remedy="pass callbacks=[...]")
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            got = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
            raise TaskError(
                "a callback is an instance of a subclass of mh.Callback", got=got, remedy="make one: Mine()"
            )
        strange = [name for name in dir(callback) if name.startswith("on_") and name not in known]
        if strange:
            raise TaskError(f"a callback has {', '.join(known)}", got=", ".join(strange), remedy="rename it")
