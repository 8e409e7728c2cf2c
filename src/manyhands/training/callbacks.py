"""Callbacks: a few moments of a run at which a person's own code may look in. They run on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hand import Hand


class Callback:
    """Subclass and override; `hand.stop()` ends the run after a step that all replicas agree on."""

    def on_start(self, hand: Hand) -> None:
        """The network is in place, nothing was trained yet."""

    def on_step(self, hand: Hand) -> None:
        """A step was taken; `hand.num_steps` counts it, `hand.loss` waits for its loss."""

    def on_epoch(self, hand: Hand, metrics: Mapping[str, float]) -> None:
        """A pass over the data is done and validated."""

    def on_end(self, hand: Hand) -> None:
        """The run is over, also when it was stopped."""
