"""Many networks: whether to stack them into one program, pack processes on a device, or give each a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core import SettingsError
from .clusters import Cluster
from .estimate import waiting

CONTEXT = 0.5e9
"""Bytes of a device that each process takes for itself."""
PROCESSES = 8
"""Processes for which a host has cores beside one device."""


@dataclass(frozen=True, kw_only=True)
class One:
    """A step of one of the networks: t = start + each · samples, and what it holds."""

    start: float
    each: float
    batch_size: int
    memory: float

    @property
    def seconds(self) -> float:
        """A step of it alone."""
        return self.start + self.each * self.batch_size


@dataclass(frozen=True, kw_only=True)
class ManyNetworksEstimate:
    """How many networks are trained together, and the seconds in which each of them takes one step."""

    name: str
    seconds: float
    together: int
    """Networks on one device at a time."""
    gain: float
    """Over one after another on one device."""


def stacking_gain(one: One, count: int) -> float:
    """How many times faster `count` networks are as one program than one after another: k(a+βB)/(a+kβB).

    >>> round(stacking_gain(One(start=1.1e-3, each=0.1e-3 / 128, batch_size=128, memory=1), 100), 1)
    10.8
    """
    return count * one.seconds / (one.start + count * one.each * one.batch_size)


def many(one: One, count: int, cluster: Cluster) -> list[ManyNetworksEstimate]:
    """Every way of training so many networks on a cluster, the fastest first."""
    if count < 1:
        raise SettingsError("there is at least one network", got=count, remedy="pass 1 or more")
    fitting = int(0.92 * cluster.chip.memory // one.memory)
    if fitting < 1:
        raise SettingsError(
            "one network must fit on a device",
            got=f"{one.memory / 2**30:.1f} GiB for {cluster.chip.memory / 2**30:.1f} GiB",
            remedy="split it: mh.Sharded()",
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
        # Processes start their operations side by side and take turns on the device, each with a context of its own.
        "packed": (math.ceil(share / packed) * max(one.seconds, packed * computing) * late, packed),
        "one per device": (share * one.seconds * late, 1),
    }
    ways = [
        ManyNetworksEstimate(name=name, seconds=time, together=together, gain=alone / time)
        for name, (time, together) in seconds.items()
    ]
    return sorted(ways, key=lambda way: way.seconds)
