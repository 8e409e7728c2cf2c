"""A world without other ranks, with which one process can show how a network would be sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..core import UsageError
from .control_channel import DirectChannel
from .world import Pending, RankInfo, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FakeWorld(World):
    """Rank 0 of a world of `size` ranks, the others of which do not exist.

    Collectives send nothing, so only the shapes and layouts of their results are meaningful.
    """

    def __init__(self, size: int) -> None:
        super().__init__(RankInfo(size=size), DirectChannel())
        if dist.is_initialized():
            raise UsageError(
                "a process can be part of only one world at a time",
                got="a second world",
                remedy="close the first one with world.close()",
            )
        # Importing this module registers torch's "fake" backend.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        return Pending()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).expand(self.size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def mark(self, name: str) -> None:
        pass

    def wait_for(self, *names: str) -> None:
        pass

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

    def _part(self, groups: Sequence[Sequence[int]]) -> World:
        return self

    def close(self) -> None:
        dist.destroy_process_group()
