"""What tf.distribute.coordinator has, in words."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import SettingsError


def ClusterCoordinator(*args: Any, **kwargs: Any) -> NoReturn:
    """Not there: nothing is scheduled, every replica runs the loop."""
    raise SettingsError(
        "every replica runs the loop itself",
        got="a ClusterCoordinator",
        remedy="call model.fit, or strategy.run(step, args) in the loop where schedule was called",
    )
