"""MirroredStrategy, MultiWorkerMirroredStrategy and OneDeviceStrategy, under their names in TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import StrategySpec
from ..distributed import NullWorld, resolve
from ..training import Hand
from .cluster_resolver import TFConfigClusterResolver
from .process_setup import hand_of_all, named, settled
from .strategy import Strategy


class MirroredStrategy(Strategy):
    """Train with one replica on every device of this host.

    If the script was started with plain `python script.py` and there are several devices, the constructor replaces the
    process by `manyhands launch`, which runs the script once per device.

    Args:
        devices: Names as in TensorFlow or manyhands, such as ["gpu:0", "gpu:1"] or "cpu*2"; by default all devices.
        cross_device_ops: Accepted and ignored; Gloo or NCCL is chosen by the devices.
        **chosen: `accumulate`, `precision` and `recompute`, as in `mh.Mirrored`.
    """

    def __init__(self, devices: Sequence[str] | str | None = None, cross_device_ops: Any = None, **chosen: Any) -> None:
        super().__init__(hand_of_all(devices, type(self).__name__), **chosen)


class MultiWorkerMirroredStrategy(Strategy):
    """Train with one replica on every device of every worker in a cluster.

    The cluster is that of TF_CONFIG, of a scheduler, or of `manyhands launch`.

    Args:
        cluster_resolver: Only stored as an attribute; by default a TFConfigClusterResolver.
        communication_options: Accepted and ignored; manyhands chooses the size of messages.
        **chosen: `accumulate`, `precision` and `recompute`, as in `mh.Mirrored`.
    """

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None, **chosen: Any) -> None:
        super().__init__(hand_of_all(None, type(self).__name__), **chosen)
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()


class OneDeviceStrategy(Strategy):
    """Train with one replica on one device.

    Args:
        device: Name as in TensorFlow or manyhands, such as "/gpu:0", "cuda:0" or "cpu".
        **chosen: `accumulate`, `precision` and `recompute`, as in `mh.Mirrored`.

    >>> OneDeviceStrategy("/cpu:0").num_replicas_in_sync
    1
    """

    def __init__(self, device: str = "cpu", **chosen: Any) -> None:
        found, _ = resolve(named([device]), 1)
        super().__init__(settled(Hand(NullWorld(found[0]), StrategySpec())), **chosen)
