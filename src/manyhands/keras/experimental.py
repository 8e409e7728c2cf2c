"""The names of tf.distribute.experimental, so that scripts need only change the import."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import StrategyError
from . import coordinator, partitioners
from .cluster_resolver import TPUStrategy
from .coordinator import ClusterCoordinator
from .mirrored import MultiWorkerMirroredStrategy
from .options import CommunicationImplementation, CommunicationOptions
from .servers import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "coordinator",
    "partitioners",
]


def CentralStorageStrategy(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise StrategyError: central storage is not supported, since every replica has all variables."""
    raise StrategyError(
        "CentralStorageStrategy is not supported, because every replica holds all variables",
        remedy="use MirroredStrategy instead",
    )
