"""Settings that scripts for tf.distribute pass: taken, and not needed here."""

from __future__ import annotations

from enum import Enum
from typing import Any


class KerasOption:
    """A setting under the name that scripts know it by."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class NcclAllReduce(KerasOption):
    """Nccl is taken where every replica has a GPU of its own."""


class HierarchicalCopyAllReduce(KerasOption):
    """Nccl and gloo know how devices are connected."""


class ReductionToOneDevice(KerasOption):
    """Sums are taken on all devices at once."""


class CommunicationOptions(KerasOption):
    """Messages are cut by what travels."""


class RunOptions(KerasOption):
    """Nothing is compiled."""


class InputOptions(KerasOption):
    """Batches are copied to a replica's device as they come."""


class CommunicationImplementation(Enum):
    """Nccl or gloo is chosen by what the devices are."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class InputReplicationMode(Enum):
    """Every replica is a process with its own input."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"
