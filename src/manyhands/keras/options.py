"""Options of tf.distribute that are accepted for compatibility and ignored."""

from __future__ import annotations

from enum import Enum
from typing import Any


class KerasOption:
    """Base class of tf.distribute's options: accepts any arguments and ignores them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class NcclAllReduce(KerasOption):
    """Ignored: NCCL is used if every replica has its own GPU."""


class HierarchicalCopyAllReduce(KerasOption):
    """Ignored: NCCL and Gloo detect how devices are connected."""


class ReductionToOneDevice(KerasOption):
    """Ignored: gradients are summed on all devices by all-reduce."""


class CommunicationOptions(KerasOption):
    """Ignored: manyhands chooses the size of the messages that replicas exchange."""


class RunOptions(KerasOption):
    """Ignored: `Strategy.run` calls its function eagerly."""


class InputOptions(KerasOption):
    """Ignored: batches are copied to a replica's device when they are read."""


class CommunicationImplementation(Enum):
    """Ignored: NCCL or Gloo is chosen by the devices."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class InputReplicationMode(Enum):
    """Ignored: every replica is a process with its own input."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"
