"""World: the ranks of a job, and the collectives between them."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import PeerLost, UsageError
from .control_channel import ControlChannel, DirectChannel
from .devices import Device, require_usable, this_host
from .hangs import CollectiveLog
from .network import LOOPBACK, gloo_on_loopback
from .user_lines import innermost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank, device and host of a process: plain data that the engine passes to the process at its start."""

    rank: int = 0
    size: int = 1
    device: Device = field(default_factory=lambda: Device("cpu"))
    host: str = field(default_factory=this_host)
    address: str = LOOPBACK
    """The address at which other hosts of the cluster reach this one."""
    generation: int = 0
    """The number of the rendezvous at which these ranks joined; it grows when ranks are replaced, added or removed."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that a healthy operation may take; every other time limit is derived from it."""
    reported_step: int = 0
    """The last step whose loss the coordinator had received when the ranks joined (the rendezvous)."""
    term: int = 0
    """The term of the elected coordinator, whose ranks may write where those of earlier terms no longer can."""

    @property
    def patience(self) -> float:
        """Return the seconds to wait for messages that should arrive without delay."""
        return min(5.0, self.timeout / 10)


class Pending:
    """A collective, send or receive in flight."""

    def wait(self) -> None:
        """Wait until the result is available."""


class World(ABC):
    """The ranks that train together, and the collectives between them."""

    def __init__(self, rank_info: RankInfo, channel: ControlChannel) -> None:
        require_usable(rank_info.device)
        self.rank_info, self.channel = rank_info, channel
        self.rank, self.size = rank_info.rank, rank_info.size
        self.device = rank_info.device.torch
        self.collective_log = CollectiveLog()
        self.waited = 0.0
        """Seconds that this rank was blocked in collectives, waiting for other ranks or for the network."""

    @property
    def is_capturable(self) -> bool:
        """Return whether collectives on this device can be captured in a CUDA graph."""
        return False

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which reports for all ranks."""
        return self.rank == 0

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Start to reduce a tensor over the ranks, in place; `op` is sum, avg, max or min."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""

    def start_all_gather(self, tensor: Tensor, into: Tensor) -> Pending:
        """Start to stack the tensors of all ranks in `into`, concurrently with other collectives."""
        into.copy_(self.all_gather(tensor))
        return Pending()

    def start_all_to_all(self, tensor: Tensor, into: Tensor) -> Pending:
        """Start to send row r of a tensor to every rank r, and to receive row r of `into` from every rank r."""
        into.copy_(self.all_gather(tensor)[:, self.rank])
        return Pending()

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy a tensor from one rank to all, in place."""

    def start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start to send a tensor to one rank, which must receive it with the same tag.

        The tensor must not change while it is in flight.
        """
        raise UsageError("a world of one rank cannot send", got=f"destination rank {to}", remedy="use several devices")

    def start_receive(self, into: Tensor, source: int, tag: int) -> Pending:
        """Start to receive a tensor from one rank, which sends it with the same tag, shape and dtype, into `into`."""
        raise UsageError(
            "a world of one rank cannot receive", got=f"source rank {source}", remedy="use several devices"
        )

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; all ranks must call this.

        Values are plain data: numbers, strings, lists, tuples, dicts, sets, tensors, arrays, and instances of classes
        that were registered with `distributed.messages.message`. Wrap any other object in
        `distributed.messages.Opaque`.
        """

    @abstractmethod
    def mark(self, name: str) -> None:
        """Set a named flag, and wake the ranks that wait for it in `wait_for`; does not block. A name is used once."""

    @abstractmethod
    def wait_for(self, *names: str) -> None:
        """Wait until any rank has set one of the named flags with `mark`."""

    @abstractmethod
    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """Return a device mesh over all ranks, one dimension per axis, for torch's own parallel modules."""

    def along(self, axes: Mapping[str, int], *names: str) -> World:
        """Return the world of the ranks that differ from this rank only along the axes `names` of the mesh `axes`.

        >>> NullWorld().along({"replicas": 1, "tensor": 1}, "tensor").size
        1
        """
        return self._of(groups_along(axes, *names))

    def by_hosts(self) -> tuple[World, World]:
        """Return the world of the ranks on this host, and that of the ranks with the same position on every host.

        >>> [world.size for world in NullWorld().by_hosts()]
        [1, 1]
        """
        hosts = self.gather_objects(self.rank_info.host)
        inside = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        if len(set(map(len, inside))) > 1:
            raise UsageError(
                "every host must have the same number of ranks",
                got=", ".join(f"{len(ranks)} on {hosts[ranks[0]]}" for ranks in inside),
                remedy="start the same number on each, or synchronize all replicas directly",
            )
        return self._of(inside), self._of([list(ranks) for ranks in zip(*inside, strict=True)])

    def _of(self, groups: Sequence[Sequence[int]]) -> World:
        """Return the world of this rank's group, given all groups, which have the same size."""
        if len(groups[0]) == self.size:
            return self
        return NullWorld(self.rank_info.device, self.channel) if len(groups[0]) == 1 else self._part(groups)

    def _part(self, groups: Sequence[Sequence[int]]) -> World:
        """Return the world of this rank's group, given all groups; each has at least two ranks, but not all of them."""
        raise UsageError(
            "this world cannot be split into groups", got=type(self).__name__, remedy="use a world of several processes"
        )

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce a tensor over the ranks, in place."""
        self.start_all_reduce(tensor, op).wait()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.gather_objects(None)

    def require_current(self) -> None:
        """Raise PeerLost if this world has ended, which a rank that runs no collectives would not notice otherwise."""
        if self.channel.has_lost(self.rank_info.generation):
            raise PeerLost("a step", caller_line(), self.channel.lost)

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an error only reports that this world has ended, for example because a rank failed."""
        return isinstance(error, PeerLost)

    @abstractmethod
    def close(self) -> None:
        """Leave the world, and close its process groups."""


def groups_along(axes: Mapping[str, int], *names: str) -> list[list[int]]:
    """Return groups of ranks that differ only along the axes `names` of the mesh `axes`, whose last axis is innermost.

    >>> groups_along({"replicas": 2, "tensor": 2}, "replicas")
    [[0, 2], [1, 3]]
    """
    grid = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
    others = [dim for dim, name in enumerate(axes) if name not in names]
    inner = [dim for dim, name in enumerate(axes) if name in names]
    size = math.prod(grid.shape[dim] for dim in inner)
    groups: list[list[int]] = grid.permute(others + inner).reshape(-1, size).tolist()
    return groups


class NullWorld(World):
    """A world of one replica: every collective is the identity."""

    def __init__(
        self, device: Device | None = None, channel: ControlChannel | None = None, rank_info: RankInfo | None = None
    ) -> None:
        super().__init__(rank_info or RankInfo(device=device or Device("cpu")), channel or DirectChannel())
        self._owns_group = False

    @property
    def is_capturable(self) -> bool:
        return True

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        return Pending()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).clone()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def mark(self, name: str) -> None:
        pass

    def wait_for(self, *names: str) -> None:
        pass

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """Return a mesh of one rank. Its process group is created if there is none; gloo listens on loopback only."""
        import torch.distributed as dist

        with gloo_on_loopback():
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                self._owns_group = True
            return dist.init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def close(self) -> None:
        if self._owns_group:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._owns_group = False


_current: list[World] = []


def enter_world(world: World) -> None:
    """Set the world to which this process belongs."""
    _current[:] = [world]


def current_world() -> World | None:
    """Return the world to which this process belongs; None in a program that no launcher started."""
    return _current[0] if _current else None


def caller_line() -> str:
    """Return the innermost line of user code in the current stack, as `path:number`; without one, that of any code."""
    last = innermost(traceback.extract_stack()[:-1])
    return f"{last.filename}:{last.lineno}"
