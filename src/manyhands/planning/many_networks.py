"""Plan many networks: stack them into one program, pack processes on a device, or give each a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core import SettingsError, format_bytes
from .clusters import Cluster
from .estimate import waiting

CONTEXT = 0.5e9
"""Bytes of device memory that each process needs for its context."""
PROCESSES = 8
"""Number of processes per device for which a host has cores."""


@dataclass(frozen=True, kw_only=True)
class One:
    """A step of one network: t = start + each · samples, and its memory."""

    start: float
    each: float
    batch_size: int
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of a step alone."""
        return self.start + self.each * self.batch_size


@dataclass(frozen=True, kw_only=True)
class ManyNetworksEstimate:
    """Number of networks trained together, and the seconds in which each of them takes one step."""

    name: str
    seconds: float
    together: int
    """Networks on one device at a time."""
    gain: float
    """Speedup over training one after another on one device."""


def stacking_gain(one: One, count: int) -> float:
    """Return the speedup of `count` networks as one program over one after another: k(a+βB)/(a+kβB).

    >>> round(stacking_gain(One(start=1.1e-3, each=0.1e-3 / 128, batch_size=128, memory=1), 100), 1)
    10.8
    """
    return count * one.seconds / (one.start + count * one.each * one.batch_size)


def many(one: One, count: int, cluster: Cluster) -> list[ManyNetworksEstimate]:
    """Return all ways of training this many networks on a cluster, fastest first."""
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
        packed = 1  # what starts operations there is what computes them
    computing = one.each * one.batch_size
    seconds = {
        "stacked": (math.ceil(share / stacked) * (one.start + stacked * computing) * late, stacked),
        # Processes launch operations in parallel and take turns on the device, each with its own context.
        "packed": (math.ceil(share / packed) * max(one.seconds, packed * computing) * late, packed),
        "one per device": (share * one.seconds * late, 1),
    }
    ways = [
        ManyNetworksEstimate(name=name, seconds=time, together=together, gain=alone / time)
        for name, (time, together) in seconds.items()
    ]
    return sorted(ways, key=lambda way: way.seconds)
