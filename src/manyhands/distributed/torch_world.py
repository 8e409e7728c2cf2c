"""The world over torch.distributed: gloo, and also NCCL where every rank has its own GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import Event, PeerLost, UsageError
from .authentication import NotAuthentic, ObjectGather, RankKey, SignedStore, confirm
from .control_channel import ControlChannel
from .devices import Device
from .gloo_sockets import break_off, inodes, listening_ports, shut_down
from .hangs import STALL, STEP, HangReport, StallWatchdog, stack_event
from .world import Pending, RankInfo, World, caller_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

CONFIRM_SECONDS = 20.0
"""Seconds that a peer may take to prove over a new connection that it is a rank of this job."""
BLOCKED_SECONDS = 1.0
"""Seconds after which a rank counts as blocked that is still in the same collective, with its connections shut down."""
_TORCH_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
PART_BYTES, MAX_PARTS = 1 << 18, 8
"""Minimum bytes of the chunks into which a large message is divided for gloo, and maximum number of its chunks."""


def backend_for(devices: Sequence[Device]) -> str:
    """Return the backend of torch.distributed: gloo, and NCCL too if each device is a GPU of its own.

    NCCL refuses two ranks on the same GPU.
    """
    cuda = {(d.host, d.index) for d in devices if d.kind == "cuda"}
    return "cpu:gloo,cuda:nccl" if len(cuda) == len(devices) else "gloo"


class _GroupWorld(World):
    """Base class of worlds whose collectives use a process group of torch.distributed."""

    _group: dist.ProcessGroup
    _aside: dist.ProcessGroup
    """The group of collectives that overlap with backward: on gloo, those of a layer must not interleave with them."""
    _is_nccl = False
    _whole: World
    """The world that owns the connections and counts the time spent waiting."""
    _objects: ObjectGather

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        with self._naming("all_reduce"):
            work = dist.all_reduce(tensor, _OPS[op], group=self._aside, async_op=True)
            return _TorchPending(self, work, "all_reduce")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        with self._naming("all_reduce"):
            dist.all_reduce(tensor, _OPS[op], group=self._group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._naming("all_gather"):
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.stack(parts)

    def start_all_gather(self, tensor: Tensor, into: Tensor) -> Pending:
        flat, rows = tensor.contiguous().view(-1), into.view(len(into), -1)
        with self._naming("all_gather"):
            works = [
                dist.all_gather([row[part] for row in rows], flat[part], group=self._aside, async_op=True)
                for part in self._parts_of(tensor, flat.numel())
            ]
            return _Many([_TorchPending(self, work, "all_gather") for work in works])

    def start_all_to_all(self, tensor: Tensor, into: Tensor) -> Pending:
        rows, found = tensor.view(len(tensor), -1), into.view(len(into), -1)
        parts = list(self._parts_of(tensor[0], rows.shape[1]))
        with self._naming("all_to_all"):
            if len(parts) == 1:
                work = dist.all_to_all_single(into, tensor.contiguous(), group=self._aside, async_op=True)
                return _TorchPending(self, work, "all_to_all")
            landed = [torch.empty_like(found[:, part]) for part in parts]
            works = [
                dist.all_to_all_single(to, rows[:, part].contiguous(), group=self._aside, async_op=True)
                for to, part in zip(landed, parts, strict=True)
            ]
        pending = [_TorchPending(self, work, "all_to_all") for work in works]
        return _Many(pending, lambda: torch._foreach_copy_([found[:, part] for part in parts], landed))

    def _parts_of(self, tensor: Tensor, count: int) -> Iterator[slice]:
        """Yield slices of the `count` elements of a message: several on gloo, so that they overlap; one on NCCL."""
        num_parts = 1
        if not self._is_nccl:
            num_parts = max(1, min(MAX_PARTS, tensor.numel() * tensor.element_size() // PART_BYTES))
        each = -(-count // num_parts)
        for start in range(0, max(1, count), max(1, each)):
            yield slice(start, min(count, start + each))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with self._naming("broadcast"):
            dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)

    def start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        # Gloo sends from host memory and receives into it.
        here = tensor if self.is_capturable or tensor.device.type == "cpu" else tensor.cpu()
        with self._naming("send"):
            work = dist.isend(here, dist.get_global_rank(self._group, to), group=self._group, tag=tag)
            return _TorchPending(self, work, "send", (here, here))

    def start_receive(self, into: Tensor, source: int, tag: int) -> Pending:
        with self._naming("receive"):
            here = into if self.is_capturable or into.device.type == "cpu" else torch.empty_like(into, device="cpu")
            work = dist.irecv(here, dist.get_global_rank(self._group, source), group=self._group, tag=tag)
            return _TorchPending(self, work, "receive", (into, here))

    def gather_objects(self, value: Any) -> list[Any]:
        with self._naming("gather"):
            return self._objects(value, self._gather_bytes)

    def _gather_bytes(self, data: Tensor) -> Tensor:
        stacked = torch.empty(self.size, len(data), dtype=torch.uint8)
        dist.all_gather(list(stacked), data, group=self._group)
        return stacked

    @contextlib.contextmanager
    def _naming(self, operation: str) -> Iterator[None]:
        """Convert the error of a broken connection to PeerLost, with the failed peer, the operation and the line."""
        start, before = time.perf_counter(), self._whole.collective_log.begin(operation)
        try:
            if self.channel.has_lost(self.rank_info.generation):
                raise PeerLost(operation, caller_line(), self.channel.lost)
            yield
            self._whole.waited += time.perf_counter() - start
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            if isinstance(error, NotAuthentic):
                raise PeerLost(operation, caller_line(), str(error)) from error
            who = self.channel.wait_for_failure(self.rank_info.generation, self.rank_info.patience)
            if not who and not _is_connection_error(error):
                raise
            raise PeerLost(operation, caller_line(), who or "a peer closed its connection", _brief(error)) from error
        finally:
            self._whole.collective_log.end(before)


class TorchWorld(_GroupWorld):
    """Ranks in separate processes, which find each other in a store, under a prefix for each generation.

    `key` is the secret key of this generation; without it, messages that other processes inject are not detected.
    """

    def __init__(
        self, rank_info: RankInfo, channel: ControlChannel, store: dist.Store, backend: str, key: RankKey | None = None
    ) -> None:
        super().__init__(rank_info, channel)
        self._key = key or RankKey.none()
        self._objects = ObjectGather(self._key, "whole", rank_info.rank)
        # A value written by another process is ignored for as long as a rank may take to write the authentic one.
        self._root = SignedStore(store, self._key, rank_info.timeout / 10)
        self._store = dist.PrefixStore(f"ports{rank_info.generation}", self._root)
        self._marks = dist.PrefixStore(f"marks{rank_info.generation}", self._root)
        self._ports = _Ports({store.port} if isinstance(store, dist.TCPStore) else set())
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self._parts: dict[tuple[tuple[int, ...], ...], World] = {}
        self._is_nccl = "nccl" in backend and self.device.type == "cuda"
        self._opening: set[int] | None = None
        """Inodes of the sockets that were open before the ranks began to connect a new group; None at other times."""
        self._is_closed = False
        channel.on_lost(rank_info.generation, self._abort)
        channel.report_stack = functools.partial(stack_event, self.collective_log)
        self._watchdog = StallWatchdog(self.collective_log, STALL * rank_info.timeout, self._report_stall)
        try:
            self._connect(backend)
        except RuntimeError as error:
            self.close()
            # If a peer never connected, no connection broke: the other ranks keep their state for the next rendezvous.
            is_missing = isinstance(error, dist.DistStoreError) and channel.recovers
            if not is_missing and not self.is_loss(error):
                raise
            if isinstance(error, NotAuthentic):
                raise PeerLost("joining", caller_line(), channel.lost or str(error)) from error
            raise PeerLost("joining", caller_line(), channel.lost or "a peer did not connect", _brief(error)) from error

    def _connect(self, backend: str) -> None:
        rank_info = self.rank_info
        with self._opening_groups() as groups:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"generation{rank_info.generation}", self._root),
                rank=rank_info.rank,
                world_size=rank_info.size,
                timeout=timedelta(seconds=rank_info.timeout),
                device_id=self.device if "nccl" in backend else None,
            )
            whole = dist.group.WORLD
            assert whole is not None
            self._whole, self._group = self, whole
            self._aside = whole if "nccl" in backend else dist.new_group(timeout=timedelta(seconds=rank_info.timeout))
            groups |= {"whole": whole} if self._aside is whole else {"whole": whole, "aside": self._aside}

    def is_loss(self, error: BaseException) -> bool:
        if isinstance(error, PeerLost | NotAuthentic):
            return True
        # Errors that torch's own parallel modules raise when their connections are shut down are not wrapped.
        is_broken = isinstance(error, RuntimeError) and _is_connection_error(error)
        return is_broken and bool(self.channel.wait_for_failure(self.rank_info.generation, self.rank_info.patience))

    @property
    def is_capturable(self) -> bool:
        return self._is_nccl

    def mark(self, name: str) -> None:
        self._marks.set(name, "1")

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + self.rank_info.timeout
        with self.collective_log.waiting(f"waiting for {names[0]}"):
            while not any(self._marks.check([name]) and self._marks.get(name) for name in names):
                if self.channel.has_lost(self.rank_info.generation) or time.monotonic() > deadline:
                    lost = self.channel.lost or f"no rank reported a reason within the timeout: {names[0]}"
                    raise PeerLost("waiting", caller_line(), lost)
                time.sleep(0.01)

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        key = tuple(axes.items())
        if key not in self._meshes:
            with self._naming("mesh"), self._opening_groups() as groups:
                sizes, names = tuple(axes.values()), tuple(axes)
                mesh = self._meshes[key] = dist.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
                for name in names:
                    # init_device_mesh has no argument for it, and the default is half an hour.
                    dist.distributed_c10d._set_pg_timeout(
                        timedelta(seconds=self.rank_info.timeout), mesh.get_group(name)
                    )
                groups |= {f"mesh {key} {name}": mesh.get_group(name) for name, size in key if size > 1}
        return self._meshes[key]

    def _part(self, groups: Sequence[Sequence[int]]) -> World:
        key = tuple(map(tuple, groups))
        if key not in self._parts:
            timeout = timedelta(seconds=self.rank_info.timeout)
            with self._naming("mesh"), self._opening_groups() as opened:
                ours, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=timeout)
                aside = ours
                if not self._is_nccl:
                    aside, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=timeout)
                opened |= {f"part {key}": ours} if aside is ours else {f"part {key}": ours, f"aside {key}": aside}
            self._parts[key] = _Along(self, ours, aside, ObjectGather(self._key, f"part {key}", dist.get_rank(ours)))
        return self._parts[key]

    @contextlib.contextmanager
    def _opening_groups(self) -> Iterator[dict[str, dist.ProcessGroup]]:
        """Confirm the connections of new groups, which the caller puts into the dict under names that all ranks use.

        Also exchange the ports on which gloo listens, by which `_abort` recognizes gloo's connections. All ranks create
        their groups in the same order, so they use the same round number.
        """
        before, self._opening = set(listening_ports()), inodes()
        groups: dict[str, dist.ProcessGroup] = {}
        try:
            yield groups
            nonces = self._ports.add(self._store, self.rank_info, set(listening_ports()) - before)
            for name, group in groups.items():
                if torch.device("cpu") in group._device_types:
                    confirm(self._key, group, name, nonces, min(CONFIRM_SECONDS, self.rank_info.timeout / 2))
        finally:
            self._opening = None

    def _report_stall(self, entry: Event) -> None:
        """Report a stall to the coordinator, which asks all ranks for their stacks; print it if there is none."""
        if self.channel.is_watched:
            self.channel.report(entry)
        else:
            alone = HangReport(entry["number"], 1, answers={self.rank: entry})
            print(alone.text({self.rank: self.rank_info.host}), file=sys.stderr, flush=True)

    def close(self) -> None:
        self._watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that failed during creation has used up a number, so the ranks' group names would differ next time.
        dist.distributed_c10d._world.group_count = 0
        self._is_closed = True

    def _abort(self) -> None:
        """Wake threads that are blocked in a collective. Gloo has no abort, so its sockets are shut down."""
        shut_down(self._ports.known, self.rank_info.patience)
        if self._opening is not None:
            break_off(self._opening, self.rank_info.size)
        if self.channel.recovers:
            # Gloo sometimes keeps waiting to send until its time limit, although all connections are closed.
            late = threading.Timer(self.rank_info.patience, self._leave_gloo)
            late.daemon = True
            late.start()
        group = dist.group.WORLD
        if self.device.type == "cuda" and group is not None and hasattr(group, "abort"):
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _leave_gloo(self) -> None:
        """Exit the process if it stays blocked in the same collective; the coordinator then replaces the rank."""
        before = self._blocked_in()
        time.sleep(BLOCKED_SECONDS)
        if before and self._blocked_in() == before:
            text = f"this rank is blocked in {before[0]}, although its connections are closed: it exits and is replaced"
            print(text, file=sys.stderr, flush=True)
            os._exit(os.EX_TEMPFAIL)

    def _blocked_in(self) -> tuple[object, ...]:
        """Identify the collective that the computing thread is in; return an empty tuple if it is in none.

        Collectives that torch's own modules call, such as those of `fully_shard`, are not in the collective log: their
        innermost Python frame is one of torch.distributed.
        """
        collective_log = self.collective_log
        if self._is_closed:
            return ()
        if collective_log.operation not in ("", STEP):
            return collective_log.operation, collective_log.number, collective_log.since
        if self._opening is not None:
            return "gloo", id(self._opening)
        frame = sys._current_frames().get(collective_log.thread)
        if frame is None or not frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
            return ()
        return frame.f_code.co_name, id(frame), frame.f_lasti


class _Along(_GroupWorld):
    """The world of a subset of another world's ranks, which still owns the connections."""

    def __init__(
        self, whole: TorchWorld, group: dist.ProcessGroup, aside: dist.ProcessGroup, objects: ObjectGather
    ) -> None:
        rank_info = dataclasses.replace(whole.rank_info, rank=dist.get_rank(group), size=dist.get_world_size(group))
        super().__init__(rank_info, whole.channel)
        self._whole, self._group, self._aside, self._is_nccl = whole, group, aside, whole._is_nccl
        self._objects = objects

    @property
    def is_capturable(self) -> bool:
        return self._whole.is_capturable

    def mark(self, name: str) -> None:
        self._whole.mark(name)

    def wait_for(self, *names: str) -> None:
        self._whole.wait_for(*names)

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        raise UsageError(
            "a mesh can only be created from the whole world",
            got="a group of its ranks",
            remedy="call mesh() of the whole world",
        )

    def close(self) -> None:
        """Do nothing, because the world of all ranks closes the process groups."""


class _Many(Pending):
    """Several collectives as one, with a function to call when all are complete."""

    def __init__(self, pending: Sequence[Pending], then: Callable[[], object] = lambda: None) -> None:
        self._pending, self._then = pending, then

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._then()


class _TorchPending(Pending):
    def __init__(
        self, world: _GroupWorld, work: Any, operation: str, landing: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Wrap a work handle of torch.

        `landing` is a destination and the buffer from which its values are copied when the work is complete.
        """
        self._world, self._work, self._operation, self._landing = world, work, operation, landing

    def wait(self) -> None:
        with self._world._naming(self._operation):
            self._work.wait()
        if self._landing is not None:
            into, here = self._landing
            if into is not here:
                into.copy_(here)


def _brief(error: RuntimeError) -> str:
    """Return the first line of an error of gloo or NCCL without the source file and the advice.

    >>> _brief(RuntimeError("[/gloo/pair.cc:537] Connection closed by peer. This is typically caused by a crash."))
    'Connection closed by peer'
    """
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". This is")[0].splitlines()[0]


def _is_connection_error(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "socket", "broken pipe", "timed out", "timeout", "nccl", "peer"))


class _Ports:
    """The ports on which gloo listens in all ranks, and the store's; every connection has one of them at one end."""

    def __init__(self, known: set[int]) -> None:
        self.known = known
        self._num_rounds = 0

    def add(self, store: dist.Store, rank_info: RankInfo, ours: set[int]) -> dict[int, bytes]:
        """Exchange the ports that ranks have opened since the last call; return a fresh random number by rank."""
        prefix, self._num_rounds = str(self._num_rounds), self._num_rounds + 1
        own_nonce = secrets.token_hex(16)
        store.set(f"{prefix}/{rank_info.rank}", f"{own_nonce} {','.join(map(str, ours)) or '0'}")
        texts = [store.get(f"{prefix}/{rank}").decode().split() for rank in range(rank_info.size)]
        self.known |= {int(port) for _, ports in texts for port in ports.split(",")} - {0}
        # The own number is not read back, so that no attacker can make this rank accept codes for earlier numbers.
        nonces = {rank: bytes.fromhex(nonce) for rank, (nonce, _) in enumerate(texts)}
        return {**nonces, rank_info.rank: bytes.fromhex(own_nonce)}
