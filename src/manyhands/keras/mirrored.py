"""Strategies under TensorFlow's names."""

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
    """A replica on every device. Under plain `python script.py` the script is started again on all of them.

    - `devices`: names as in TensorFlow or manyhands: ["gpu:0", "gpu:1"], "cpu*2"; by default all;
    - `cross_device_ops`: accepted and ignored: Gloo or NCCL is chosen by the devices;
    - `accumulate`, `precision`, `recompute`: as in `mh.Mirrored`.
    """

    def __init__(self, devices: Sequence[str] | str | None = None, cross_device_ops: Any = None, **chosen: Any) -> None:
        super().__init__(hand_of_all(devices, type(self).__name__), **chosen)


class MultiWorkerMirroredStrategy(Strategy):
    """A replica on every device of every worker in the cluster of TF_CONFIG, a scheduler or `manyhands launch`."""

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None, **chosen: Any) -> None:
        super().__init__(hand_of_all(None, type(self).__name__), **chosen)
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()


class OneDeviceStrategy(Strategy):
    """One replica on one device.

    >>> OneDeviceStrategy("/cpu:0").num_replicas_in_sync
    1
    """

    def __init__(self, device: str = "cpu", **chosen: Any) -> None:
        found, _ = resolve(named([device]), 1)
        super().__init__(settled(Hand(NullWorld(found[0]), StrategySpec())), **chosen)
