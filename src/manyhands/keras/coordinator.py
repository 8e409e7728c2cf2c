"""Placeholder for tf.distribute.coordinator, with an error that explains the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import SettingsError


def ClusterCoordinator(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise SettingsError: there is no scheduling, since every replica runs the loop."""
    raise SettingsError(
        "every replica runs the loop itself",
        got="a ClusterCoordinator",
        remedy="call model.fit, or strategy.run(step, args) in the loop where schedule was called",
    )
