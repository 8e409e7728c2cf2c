"""Plan the training of many networks: stacked into one program, as processes that share a device, or one per device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core import SettingsError, format_bytes
from .clusters import Cluster
from .estimate import waiting

CONTEXT = 0.5e9
"""Bytes of device memory that the CUDA context of each process needs."""
PROCESSES = 8
"""Assumed maximum number of processes per device, because every process needs CPU cores of the host."""


@dataclass(frozen=True, kw_only=True)
class One:
    """The cost of training one network: a step takes `start + each * batch_size` seconds and `memory` bytes."""

    start: float
    each: float
    batch_size: int
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of a step if the network is trained alone on a device."""
        return self.start + self.each * self.batch_size


@dataclass(frozen=True, kw_only=True)
class ManyNetworksEstimate:
    """Predicted time of one way to train many networks."""

    name: str
    """The way: "stacked" (one program), "packed" (processes that share a device) or "one per device"."""
    seconds: float
    """Seconds in which every network takes one step."""
    together: int
    """Number of networks on one device at a time."""
    gain: float
    """Speed-up over training the networks one after another on one device."""


def stacking_gain(one: One, count: int) -> float:
    """Return the speed-up of training `count` networks as one program over one after another: k(a+βB)/(a+kβB).

    k is `count`, B the batch size, and a+βB the seconds of a step of one network.

    >>> round(stacking_gain(One(start=1.1e-3, each=0.1e-3 / 128, batch_size=128, memory=1), 100), 1)
    10.8
    """
    return count * one.seconds / (one.start + count * one.each * one.batch_size)


def many(one: One, count: int, cluster: Cluster) -> list[ManyNetworksEstimate]:
    """Return the predicted times of all ways to train `count` networks on a cluster, fastest first.

    Raises:
        SettingsError: `count` is below 1, or one network does not fit on a device.
    """
    if count < 1:
        raise SettingsError("the number of networks must be at least 1", got=count, remedy="pass 1 or more")
    fitting = int(0.92 * cluster.chip.memory // one.memory)
    if fitting < 1:
        raise SettingsError(
            "one network must fit on a device",
            got=f"{format_bytes(one.memory)} for a device of {format_bytes(cluster.chip.memory)}",
            remedy="shard the network with mh.Sharded()",
        )
    devices = min(cluster.num_devices, count)
    share = math.ceil(count / devices)
    late = 1 + cluster.spread * waiting(devices)
    alone = count * one.seconds
    stacked = min(share, fitting)
    packed = max(1, min(share, PROCESSES, int(0.92 * cluster.chip.memory // (one.memory + CONTEXT))))
    if cluster.chip.name == "CPU":
        packed = 1  # on a CPU, the cores that launch operations also compute them
    computing = one.each * one.batch_size
    seconds = {
        "stacked": (math.ceil(share / stacked) * (one.start + stacked * computing) * late, stacked),
        # Processes launch operations in parallel, but the device computes for one process at a time.
        "packed": (math.ceil(share / packed) * max(one.seconds, packed * computing) * late, packed),
        "one per device": (share * one.seconds * late, 1),
    }
    ways = [
        ManyNetworksEstimate(name=name, seconds=time, together=together, gain=alone / time)
        for name, (time, together) in seconds.items()
    ]
    return sorted(ways, key=lambda way: way.seconds)
