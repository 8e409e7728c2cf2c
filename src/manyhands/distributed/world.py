"""World: the replicas that work together, and the collectives between them. Rank and size come from here alone."""

from __future__ import annotations

import math
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import PeerLost, UsageError
from .control_channel import ControlChannel, DirectChannel
from .devices import Device, require_usable, this_host
from .hangs import Diary
from .network import LOOPBACK, gloo_on_loopback

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    str(Path(torch.__file__).parents[1] / "keras"),
    sysconfig.get_path("stdlib"),
    "<",
)
DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where one rank sits: plain data that an engine gives to a process."""

    rank: int = 0
    size: int = 1
    device: Device = field(default_factory=lambda: Device("cpu"))
    host: str = field(default_factory=this_host)
    address: str = LOOPBACK
    """Where other hosts of the cluster reach this one."""
    generation: int = 0
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that a healthy operation may take; every other time limit derives from it."""
    heard: int = 0
    """The last step whose loss was known outside of the ranks when they were called together."""

    @property
    def patience(self) -> float:
        """Seconds to wait for something that should come at once."""
        return min(5.0, self.timeout / 10)


class Pending:
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result is there."""


class World(ABC):
    """The replicas that work together. Collectives act in place or return new tensors, as named."""

    def __init__(self, seat: RankInfo, line: ControlChannel) -> None:
        require_usable(seat.device)
        self.seat, self.line = seat, line
        self.rank, self.size = seat.rank, seat.size
        self.device = seat.device.torch
        self.diary = Diary()
        self.waited = 0.0
        """Seconds that this rank stood still in collectives, waiting for others or for the network."""

    @property
    def is_recordable(self) -> bool:
        """Whether its collectives on this device may stand in a CUDA graph."""
        return False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Begins to combine a tensor over the ranks, in place; op is sum, avg, max or min."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension."""

    def start_all_gather(self, tensor: Tensor, into: Tensor) -> Pending:
        """Begins to stack the tensors of all ranks in `into`, beside whatever else is under way."""
        into.copy_(self.all_gather(tensor))
        return Pending()

    def start_all_to_all(self, tensor: Tensor, into: Tensor) -> Pending:
        """Begins to send row r of a tensor to rank r; row r of `into` comes from rank r."""
        into.copy_(self.all_gather(tensor)[:, self.rank])
        return Pending()

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copies a tensor from one rank to all, in place."""

    def start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Begins to send a tensor to one rank, under a tag that both know; meanwhile it must stay as it is."""
        raise UsageError("this world has no other rank to send to", got=to, remedy="ask for more devices")

    def start_receive(self, into: Tensor, source: int, tag: int) -> Pending:
        """Begins to receive a tensor of this shape and dtype from one rank."""
        raise UsageError("this world has no other rank to receive from", got=source, remedy="ask for more devices")

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return a Python value of every rank, in rank order.

        Values are plain data: numbers, texts, lists, tuples, dicts, sets, tensors, arrays and classes that were
        registered with `cluster.message`. Anything else is sent as a `cluster.Opaque`.
        """

    @abstractmethod
    def mark(self, name: str) -> None:
        """Says that something is done, once for each name, to ranks that wait for it now or later; waits for nobody."""

    @abstractmethod
    def wait_for(self, *names: str) -> None:
        """Returns when some rank has made one of these marks."""

    @abstractmethod
    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """A device mesh over all ranks, one dimension per axis, for torch's own parallel parts."""

    def along(self, axes: Mapping[str, int], *names: str) -> World:
        """The ranks that differ from this one along some axes of a mesh only, as a world of their own.

        >>> NullWorld().along({"replicas": 1, "tensor": 1}, "tensor").size
        1
        """
        return self._of(groups_along(axes, *names))

    def by_hosts(self) -> tuple[World, World]:
        """The ranks of this one's host, and those in its place on every host, as worlds of their own.

        >>> [world.size for world in NullWorld().by_hosts()]
        [1, 1]
        """
        hosts = self.gather_objects(self.seat.host)
        inside = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        if len(set(map(len, inside))) > 1:
            raise UsageError(
                "every host must have as many ranks as the others",
                got=", ".join(f"{len(ranks)} on {hosts[ranks[0]]}" for ranks in inside),
                remedy="start as many on each, or let all replicas agree alike",
            )
        return self._of(inside), self._of([list(ranks) for ranks in zip(*inside, strict=True)])

    def _of(self, groups: Sequence[Sequence[int]]) -> World:
        """This rank's one of some groups of equal size."""
        if len(groups[0]) == self.size:
            return self
        return NullWorld(self.seat.device, self.line) if len(groups[0]) == 1 else self._part(groups)

    def _part(self, groups: Sequence[Sequence[int]]) -> World:
        """That of these groups of ranks which this one is in, as a world of its own."""
        raise UsageError("this world has no parts", got=type(self).__name__, remedy="use processes of their own")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Combines a tensor over the ranks, in place."""
        self.start_all_reduce(tensor, op).wait()

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.gather_objects(None)

    def require_current(self) -> None:
        """Raises where this world is over: also a rank that needs no other one must hear that others have come."""
        if self.line.has_lost(self.seat.generation):
            raise PeerLost("a step", caller_line(), self.line.lost)

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says only that this world is over."""
        return isinstance(error, PeerLost)

    @abstractmethod
    def close(self) -> None:
        """Leaves the world."""


def groups_along(axes: Mapping[str, int], *names: str) -> list[list[int]]:
    """The ranks of a mesh, the last axis innermost, in groups that differ along some axes only.

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
    """One replica alone: every collective is the identity."""

    def __init__(
        self, device: Device | None = None, line: ControlChannel | None = None, seat: RankInfo | None = None
    ) -> None:
        super().__init__(seat or RankInfo(device=device or Device("cpu")), line or DirectChannel())
        self._owns_group = False

    @property
    def is_recordable(self) -> bool:
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
        """A mesh of one rank needs a process group all the same; gloo listens for it, on loopback."""
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
    """Makes a world the one that this process takes part in."""
    _current[:] = [world]


def current_world() -> World | None:
    """The world that this process was started in; None in a program that was started by hand."""
    return _current[0] if _current else None


def caller_line() -> str:
    """The innermost line of the person's own code that led here; ours when there is none."""
    last = innermost(traceback.extract_stack()[:-1])
    return f"{last.filename}:{last.lineno}"


def caller_lines() -> list[str]:
    """The lines of the person's own code that led here, the same on every host that runs it."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    theirs = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THEIRS)]
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in reversed(theirs)]


def innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The last frame of the person's own code, not torch's, Keras', Python's or ours; the last one if there is none."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return (theirs or frames)[-1]
