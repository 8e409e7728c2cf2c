"""Memory: a limit for a run, and what held it when a step did not fit: an account, and what would fit instead."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import re
import resource
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..core import ManyhandsError, Mean, OutOfMemory, SettingsError, StrategyError, Task
from ..data import Batch, first_dim, split
from ..distributed import Device, World
from ..graph import Life, kept_bytes, largest_sum, lives
from ..strategies import keep_all, recompute, size_text
from .hand import Hand

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIGNS = ("can't allocate memory", "CUDA out of memory", "HIP out of memory", "not enough memory", "std::bad_alloc")
_NO_KERNEL = "could not create a primitive"
"""What oneDNN says when it found no memory for a kernel's code; and then of every kernel that it has not made yet."""
M_MMAP_THRESHOLD = -3
LEAST = 16 << 20
"""Less than this no step can do with."""
MAPPED_FROM, MAPPED_AT_LAST = 1 << 17, 1 << 25
"""Where glibc's threshold begins, and where it ends up by itself."""
NUM_NAMED = 5
"""Modules that an account names."""
ROOM = 0.7
"""The share of the memory that a step may be planned to take: batches to come and a checkpoint need some too."""


# -- a limit -----------------------------------------------------------------------------------------------------------


def parse_bytes(text: str | int) -> int:
    """A number of bytes from a text.

    >>> parse_bytes("1.5GiB"), parse_bytes("200 MB"), parse_bytes(2**25)
    (1610612736, 200000000, 33554432)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", str(text), re.IGNORECASE)
    number = float(found[1]) if found else 0.0
    if found is None or isinstance(text, bool) or (found[3] and not found[2]) or number <= 0:
        raise SettingsError(
            "an amount of memory is a number of bytes above zero",
            got=repr(text),
            remedy='write it as "8GiB" or "500MB"',
        )
    unit = found[2].lower()
    count = int(number * (_BINARY[unit] if found[3] else _UNITS[unit]))
    if count < LEAST:
        raise SettingsError(
            f"an amount of memory is at least {size_text(LEAST)}",
            got=f"{text!r}, which is {size_text(count)}",
            remedy='write the unit too, such as "8GiB"',
        )
    return count


class Guard:
    """What a step is taken in: under a limit the kernel gives its process so many bytes of data and no more."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._is_first = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.limit is None:
            yield
            return
        # Where nothing is left at all, libraries that do not look at what malloc says would end the process.
        if self._is_first and _data_bytes() > self.limit:
            raise MemoryError
        self._is_first = False
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit if hard < 0 else min(self.limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def limited(device: torch.device, memory: int | None) -> Iterator[Guard]:
    """Lets a run take no more than so many bytes on its device, besides what was there; gives what guards a step.

    On a CPU the limit holds within steps only: a thread that writes a checkpoint must not fail for want of a stack. A
    thread that has met it may get no more kernels from oneDNN, so that a limited run needs a process of its own.
    """
    if memory is None:
        yield Guard()
    elif device.type == "cuda":
        with _limited_cuda(device, memory):
            yield Guard()
    else:
        # Every optimizer imports it, and it is not the run's own memory.
        importlib.import_module("torch._dynamo")
        # So are the stacks of the threads that compute; for want of one the process would end.
        torch.ones(1 << 20).add_(1)
        torch.ones(256, 256) @ torch.ones(256, 256)
        _map_from(MAPPED_FROM)
        try:
            yield Guard(_data_bytes() + memory)
        finally:
            _map_from(MAPPED_AT_LAST)


def _map_from(size: int) -> None:
    """Has the C library give blocks from this size on back as soon as they are freed, so that a limit counts what is
    held and not what was; its own threshold moves up to the size of tensors, and they then leave holes behind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, size)


class _HeapState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    )


def _holes() -> int:
    """Bytes that the C library has from the system and nobody uses; 0 where it does not say."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _HeapState
    return int(library.mallinfo2().free)


@contextlib.contextmanager
def _limited_cuda(device: torch.device, memory: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    if memory > total:
        raise SettingsError(
            f"{device} has {size_text(total)}", got=f"memory={size_text(memory)}", remedy="pass less, or nothing"
        )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    wanted = memory + torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(before, wanted / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _data_bytes() -> int:
    """What the kernel counts as this process's data, without holes, which are used again first."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 - _holes()


def headroom(device: torch.device, limit: int | None = None) -> int:
    """Bytes that this process could still take on its device, under a limit to its data."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, _ = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return min(free + reserved, allowed) - allocated
    available = int(psutil.virtual_memory().available)
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [bytes_ for bytes_ in (limit, soft) if bytes_ is not None and bytes_ != resource.RLIM_INFINITY]
    return min([available, *(bytes_ - _data_bytes() for bytes_ in limits)])


def host_bytes(devices: Sequence[Device]) -> int:
    """Bytes of the host's memory that each of its devices could leave something in; none where that is their own."""
    if any(device.kind == "cpu" for device in devices):
        return 0
    return int(psutil.virtual_memory().available) // len(devices)


# -- an account --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """What a step holds, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: dict[str, int] = field(default_factory=dict)
    """What forward keeps for backward, by the module that made it, the largest first; empty if not measured."""
    working: int = 0
    """What is there besides while forward and backward run, at the most."""
    rows: int = 0
    """Samples of the micro-batch they are for."""

    @property
    def fixed(self) -> int:
        """What does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """What forward and backward hold at the most."""
        return sum(self.activations.values()) + self.working

    @property
    def total(self) -> int:
        """All of it."""
        return self.fixed + self.peak

    def lines(self) -> list[str]:
        """A line for each part."""
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer}
        lines = [f"{name:<16} {size_text(size):>10}" for name, size in parts.items()]
        if not self.activations:
            return [*lines, "activations      could not be measured"]
        whole = size_text(sum(self.activations.values()))
        largest = list(self.activations.items())[:NUM_NAMED]
        named = ", ".join(f"{name or 'outside of the network'} {size_text(size)}" for name, size in largest)
        more = f", {len(self.activations) - NUM_NAMED} more" if len(self.activations) > NUM_NAMED else ""
        lines.append(f"{'activations':<16} {whole:>10} for {self.rows} rows: {named}{more}")
        return [*lines, f"{'working memory':<16} {size_text(self.working):>10} besides, while forward and backward run"]


def held_now(device: torch.device) -> int:
    """Bytes that this rank holds at the moment: on a GPU of its memory, else of the host's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def used(hand: Hand) -> dict[str, int]:
    """Bytes that this rank holds of the network and its optimizer's state, and the most it had taken on its device."""
    held = [parameter for parameter in hand.model.parameters() if not parameter.is_meta]
    if hand.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(hand.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"parameters": _bytes(held), "optimizer": sum(map(_held_state, hand.optimizers.values())), "peak": peak}


def account(hand: Hand, task: Task, batch: Batch) -> Account:
    """What a step of this task holds on this replica; activations are measured on a few rows."""
    model, optimizers = hand.model, hand.optimizers.values()
    rows = max(1, *batch.sizes)
    copies = 1 if hand.world.size == 1 else 2  # the gradient itself, and the buffer in which it travels
    activations, peak = _activations(hand, task, batch, rows) or ({}, 0)
    leaves = "optimizer" in hand.spec.offloaded and hand.device.type != "cpu"
    return Account(
        parameters=_bytes([*model.parameters(), *model.buffers()]),
        gradients=0 if leaves and copies == 1 else copies * _bytes([p for p in model.parameters() if p.requires_grad]),
        optimizer=0 if leaves else sum(map(state_bytes, optimizers)),
        activations=activations,
        working=max(0, peak - sum(activations.values())),
        rows=rows,
    )


def _bytes(tensors: list[Any]) -> int:
    """What this rank holds of tensors."""
    mine = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in mine)


def _held_state(optimizer: Optimizer) -> int:
    return _bytes([v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)])


def state_bytes(optimizer: Optimizer) -> int:
    """The optimizer's state; before the first step what it is going to be, seen on one number."""
    held = _held_state(optimizer)
    if held:
        return held
    total, accepted = 0, inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key in accepted and key != "params"}
        one = nn.Parameter(torch.zeros(8))
        one.grad = torch.zeros(8)
        with contextlib.suppress(Exception):
            tried = type(optimizer)([one], **settings)
            tried.step()
            each = sum(v.numel() for v in tried.state[one].values() if isinstance(v, Tensor)) // 8
            total += each * _bytes([p for p in group["params"] if p.requires_grad])
    return total


def _activations(
    hand: Hand, task: Task, batch: Batch, rows: int, *, precision: str | None = None
) -> tuple[dict[str, int], int] | None:
    """Bytes that forward keeps, by module, and what it and backward hold at the most, for so many rows.

    Measured on a few and on twice as many, and drawn out in a straight line.
    """
    there = first_dim(batch.data)
    few = min(2, max(1, there // 2))
    if task.loss is None or there < 2 * few:
        return None
    try:
        small, large = (
            _measured(hand, task, split(batch.data, [n, there - n])[0] if n < there else batch.data, precision)
            for n in (few, 2 * few)
        )
    except Exception:
        # Whatever keeps it from being measured, the account of the rest is still worth having.
        return None
    before, after = map(kept_bytes, (small, large))
    drawn_out = {
        name: max(0, round(before.get(name, 0) + (size - before.get(name, 0)) / few * (rows - few)))
        for name, size in after.items()
    }
    # A gradient of parameters stands beside the sum that it is added to.
    gradient = max((_bytes([p]) for p in hand.model.parameters() if p.requires_grad), default=0)
    peak = largest_sum(few, small, 2 * few, large, rows) + gradient
    return dict(sorted(drawn_out.items(), key=lambda pair: -pair[1])), peak


def _measured(hand: Hand, task: Task, data: Any, precision: str | None) -> list[Life]:
    assert task.loss is not None
    loss = task.loss

    def forward() -> Tensor:
        value = loss(hand.model, data)
        return value.total if isinstance(value, Mean) else value

    scope = torch.autocast(hand.device.type, dtype=torch.bfloat16) if precision == "bf16" else hand.replica.scope()

    def measure() -> list[Life]:
        with _without_peers(hand.world), _without_statistics(hand.model), scope:
            return lives(hand.model, forward)

    # oneDNN remembers for each thread that it once found no memory: this one can still compute.
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(measure).result()


@contextlib.contextmanager
def _without_peers(world: World) -> Iterator[None]:
    """Nobody answers a collective now: the other replicas are in the middle of their step."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no collectives while memory is accounted for")

    names = ("all_reduce", "start_all_reduce", "all_gather", "broadcast", "barrier", "gather_objects")
    if world.size > 1:
        vars(world).update(dict.fromkeys(names, refuse))
    try:
        yield
    finally:
        if world.size > 1:
            for name in names:
                del vars(world)[name]


@contextlib.contextmanager
def _without_statistics(model: nn.Module) -> Iterator[None]:
    """Batch statistics are neither summed over replicas nor changed."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


# -- what would fit ----------------------------------------------------------------------------------------------------


def remedies(hand: Hand, task: Task, batch: Batch, held: Account, memory: int) -> list[str]:
    """What would make the step fit, with what it would then take; the best known first."""
    found = []
    if held.fixed > ROOM * memory:
        found += _sharded(hand, held, memory)
    if held.fixed > memory:
        return [*found, "no batch: parameters, gradients and optimizer state alone are more than there is"]
    if not held.activations:
        return [*found, "a smaller batch at a time: accumulate=2 or more", 'recompute="blocks"', 'precision="bf16"']
    accumulate = _accumulate(hand, held.fixed, held.peak, held.rows, memory)
    if accumulate is not None:
        share = held.peak * hand.spec.accumulate // accumulate
        found.append(_line(f"accumulate={accumulate}", held.fixed + share, memory))
    if not hand.spec.recompute:
        found += _recomputed(hand, task, batch, held, memory)
    if hand.spec.precision == "fp32":
        half = _activations(hand, task, batch, held.rows, precision="bf16")
        if half is not None and half[1] < held.peak:
            found.append(_line('precision="bf16"', held.fixed + half[1], memory))
    return found


def _sharded(hand: Hand, held: Account, memory: int) -> list[str]:
    """So many devices that each one's part leaves room; none where the network is in parts already."""
    if hand.spec.shards != 1 or hand.spec.tensor * hand.spec.stages > 1:
        return []
    devices = 2
    while held.total / devices > ROOM * memory:
        devices *= 2
    return [_line(f"mh.Sharded({devices})", held.total // devices, memory) + f" on each of {devices} devices"]


def _accumulate(hand: Hand, fixed: int, peak: int, rows: int, memory: int) -> int | None:
    """The smallest number of micro-batches with which the step fits; None where even single rows do not."""
    now = hand.spec.accumulate
    for parts in range(2, rows + 1):
        if fixed + peak / parts <= ROOM * memory:
            return now * parts
    return None


def _recomputed(hand: Hand, task: Task, batch: Batch, held: Account, memory: int) -> list[str]:
    """What recompute="blocks" would take, and with smaller micro-batches; nothing where there are no blocks."""
    try:
        recompute(hand.model, "blocks", own_randomness=hand.randomness is None)
    except StrategyError:
        return []
    try:
        again = _activations(hand, task, batch, held.rows)
    finally:
        keep_all(hand.model)
    if again is None:
        return []
    total = held.fixed + again[1]
    found = [_line('recompute="blocks"', total, memory)]
    accumulate = _accumulate(hand, held.fixed, again[1], held.rows, memory)
    if total > ROOM * memory and accumulate is not None:
        share = again[1] * hand.spec.accumulate // accumulate
        found.append(_line(f'recompute="blocks", accumulate={accumulate}', held.fixed + share, memory))
    return found


def _line(what: str, total: int, memory: int) -> str:
    """What it would take; little room is said too, because batches to come and a checkpoint need some."""
    verdict = "" if total <= ROOM * memory else ", which is tight" if total <= memory else ", which is still too much"
    return f"{what:<20} about {size_text(total)}{verdict}"


# -- when it happens ---------------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException, *, is_limited: bool = False) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, ManyhandsError):
        return False
    is_limited |= resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    signs = (*_SIGNS, _NO_KERNEL) if is_limited else _SIGNS
    return any(sign in str(error) for sign in signs)


def explain_memory(error: BaseException, hand: Hand, task: Task, batch: Batch, limit: int | None = None) -> None:
    """Raises OutOfMemory, with an account, where an allocation failed; what the step held is let go first.

    The limit must not hold here: a thread that OpenMP cannot start for want of a stack would end the process.
    """
    if not is_out_of_memory(error, is_limited=limit is not None):
        return
    where = _where(error)
    asked = re.search(r"allocate ([0-9.]+ ?\w+)", str(error))
    _let_go(error, hand)
    room = headroom(hand.device, limit)
    held = account(hand, task, batch)
    memory = room + held.parameters + sum(map(_held_state, hand.optimizers.values()))
    wanted = f", where {_spelled(asked[1])} more were asked for" if asked else ""
    place = f"{hand.device} on rank {hand.world.rank}{where}{wanted}"
    head = f"step {hand.num_steps + 1} did not fit into the memory of {place}"
    options = remedies(hand, task, batch, held, memory)
    _free(hand.device)
    texts = [head, f"a step holds about {size_text(held.total)}, and there is room for {size_text(memory)}:"]
    texts += [f"  {line}" for line in held.lines()]
    texts += ["what would help:", *(f"  {line}" for line in options)]
    raise OutOfMemory("\n".join(texts)) from None


def _spelled(amount: str) -> str:
    return size_text(int(amount.split()[0])) if amount.split()[-1].startswith("byte") else amount


def _where(error: BaseException) -> str:
    """The innermost line of the person's own code."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__, "<")
    theirs = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f", at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _let_go(error: BaseException, hand: Hand) -> None:
    """Drops what the failed step left behind: the frames it was in, half of the gradients, the allocator's cache."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
    hand.forget_step()
    _free(hand.device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
