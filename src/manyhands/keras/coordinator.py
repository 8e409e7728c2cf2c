"""Placeholder for tf.distribute.coordinator, with an error that explains the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import SettingsError


def ClusterCoordinator(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise SettingsError: no process schedules functions on workers, since every replica runs the training loop."""
    raise SettingsError(
        "a ClusterCoordinator is not supported, because every replica runs the training loop itself",
        remedy="call model.fit, or strategy.run(step, args) in the loop where schedule was called",
    )
