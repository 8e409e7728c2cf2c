"""Memory of a run: what uses it, and after an out-of-memory error what would fit."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import resource
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..core import ManyhandsError, Mean, OutOfMemory, SettingsError, StrategyError, Task, format_bytes
from ..data import Batch, first_dim, split
from ..distributed import World
from ..graph import Life, kept_bytes, largest_sum, lives
from ..strategies import keep_all, recompute
from .hand import Hand
from .memory_limit import headroom

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIGNS = ("can't allocate memory", "CUDA out of memory", "HIP out of memory", "not enough memory", "std::bad_alloc")
_NO_KERNEL = "could not create a primitive"
"""oneDNN's error when it finds no memory for a kernel's code; it then repeats it for every new kernel."""
LEAST = 16 << 20
"""Minimum memory limit in bytes; no step can run with less."""
NUM_NAMED = 5
"""Number of modules that an account names."""
USABLE_SHARE = 0.7
"""The share of memory that a step is planned to use; later batches and checkpoints need the rest."""


def parse_bytes(text: str | int) -> int:
    """Parse a number of bytes.

    >>> parse_bytes("1.5GiB"), parse_bytes("200 MB"), parse_bytes(2**25)
    (1610612736, 200000000, 33554432)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", str(text), re.IGNORECASE)
    number = float(found[1]) if found else 0.0
    if found is None or isinstance(text, bool) or (found[3] and not found[2]) or number <= 0:
        raise SettingsError(
            "an amount of memory must be a number of bytes above zero",
            got=repr(text),
            remedy='write for example "8GiB" or "500MB"',
        )
    unit = found[2].lower()
    count = int(number * (_BINARY[unit] if found[3] else _UNITS[unit]))
    if count < LEAST:
        raise SettingsError(
            f"an amount of memory must be at least {format_bytes(LEAST)}",
            got=f"{text!r}, which is {format_bytes(count)}",
            remedy='include the unit, such as "8GiB"',
        )
    return count


@dataclass(frozen=True)
class Account:
    """The memory that a step uses, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: dict[str, int] = field(default_factory=dict)
    """What forward saves for backward, by module, largest first; empty if not measured."""
    working: int = 0
    """The additional peak while forward and backward run."""
    rows: int = 0
    """Rows of the micro-batch that the activations are for."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Peak bytes of forward and backward."""
        return sum(self.activations.values()) + self.working

    @property
    def total(self) -> int:
        """All bytes of the step."""
        return self.fixed + self.peak

    def lines(self) -> list[str]:
        """Return one line of text per part."""
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer}
        lines = [f"{name:<16} {format_bytes(size):>10}" for name, size in parts.items()]
        if not self.activations:
            return [*lines, "activations      could not be measured"]
        whole = format_bytes(sum(self.activations.values()))
        largest = list(self.activations.items())[:NUM_NAMED]
        named = ", ".join(f"{name or 'outside of the network'} {format_bytes(size)}" for name, size in largest)
        more = f", {len(self.activations) - NUM_NAMED} more" if len(self.activations) > NUM_NAMED else ""
        lines.append(f"{'activations':<16} {whole:>10} for {self.rows} rows: {named}{more}")
        return [
            *lines,
            f"{'working memory':<16} {format_bytes(self.working):>10} in addition, during forward and backward",
        ]


def used(hand: Hand) -> dict[str, int]:
    """Return this rank's bytes of parameters and optimizer state, and its peak memory use."""
    held = [parameter for parameter in hand.model.parameters() if not parameter.is_meta]
    if hand.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(hand.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"parameters": _bytes(held), "optimizer": sum(map(_held_state, hand.optimizers.values())), "peak": peak}


def account(hand: Hand, task: Task, batch: Batch) -> Account:
    """Return what a step of this task uses on this replica; activations are measured on a few rows."""
    model, optimizers = hand.model, hand.optimizers.values()
    rows = max(1, *batch.sizes)
    copies = 1 if hand.world.size == 1 else 2  # the gradient, and its communication buffer
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
    """Return the bytes of tensors that this rank holds; of distributed tensors, its local shard."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _held_state(optimizer: Optimizer) -> int:
    return _bytes([v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)])


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state; before the first step, estimated with a tiny parameter."""
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
    """Return activation bytes by module and the peak of forward and backward for `rows` rows; None if not measurable.

    Measured on a few rows and on twice as many, then extrapolated linearly.
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
        # The rest of the account is useful even if activations cannot be measured.
        return None
    before, after = map(kept_bytes, (small, large))
    drawn_out = {
        name: max(0, round(before.get(name, 0) + (size - before.get(name, 0)) / few * (rows - few)))
        for name, size in after.items()
    }
    # A parameter's new gradient exists beside the sum that it is added to.
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

    # oneDNN remembers per thread that an allocation failed; a fresh thread can still compute.
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(measure).result()


@contextlib.contextmanager
def _without_peers(world: World) -> Iterator[None]:
    """Make collectives raise, since the other replicas are in the middle of their step and would not answer."""

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
    """Neither reduce batch statistics over replicas nor update them."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


# -- remedies ----------------------------------------------------------------------------------------------------------


def remedies(hand: Hand, task: Task, batch: Batch, held: Account, memory: int) -> list[str]:
    """Return options with which the step would fit and the memory they would take, as lines of text."""
    found = []
    if held.fixed > USABLE_SHARE * memory:
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
    """Suggest the number of devices whose shards would fit; nothing where the network is already split."""
    if hand.spec.shards != 1 or hand.spec.tensor * hand.spec.stages * hand.spec.context > 1:
        return []
    devices = 2
    while held.total / devices > USABLE_SHARE * memory:
        devices *= 2
    return [_line(f"mh.Sharded({devices})", held.total // devices, memory) + f" on each of {devices} devices"]


def _accumulate(hand: Hand, fixed: int, peak: int, rows: int, memory: int) -> int | None:
    """Return the smallest number of micro-batches with which the step fits; None where even single rows do not."""
    now = hand.spec.accumulate
    for parts in range(2, rows + 1):
        if fixed + peak / parts <= USABLE_SHARE * memory:
            return now * parts
    return None


def _recomputed(hand: Hand, task: Task, batch: Batch, held: Account, memory: int) -> list[str]:
    """Suggest recompute="blocks", alone and with more micro-batches; nothing where the network has no blocks."""
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
    if total > USABLE_SHARE * memory and accumulate is not None:
        share = again[1] * hand.spec.accumulate // accumulate
        found.append(_line(f'recompute="blocks", accumulate={accumulate}', held.fixed + share, memory))
    return found


def _line(what: str, total: int, memory: int) -> str:
    """Return a line for an option and its memory, with a remark if it is more than may be used safely, or too much."""
    verdict = ", which is tight" if total <= memory else ", which is still too much"
    verdict = "" if total <= USABLE_SHARE * memory else verdict
    return f"{what:<20} about {format_bytes(total)}{verdict}"


# -- out-of-memory errors ----------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException, *, is_limited: bool = False) -> bool:
    """Return whether an error is a failed allocation, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, ManyhandsError):
        return False
    is_limited |= resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    signs = (*_SIGNS, _NO_KERNEL) if is_limited else _SIGNS
    return any(sign in str(error) for sign in signs)


def explain_memory(error: BaseException, hand: Hand, task: Task, batch: Batch, limit: int | None = None) -> None:
    """Raise `OutOfMemory` with an account where an allocation failed, after freeing what the step held.

    Must run outside the limit: OpenMP crashes the process if it cannot allocate a thread's stack.
    """
    if not is_out_of_memory(error, is_limited=limit is not None):
        return
    where = _where(error)
    asked = re.search(r"allocate ([0-9.]+ ?\w+)", str(error))
    _let_go(error, hand)
    free_bytes = headroom(hand.device, limit)
    held = account(hand, task, batch)
    memory = free_bytes + held.parameters + sum(map(_held_state, hand.optimizers.values()))
    wanted = f", where {_spelled(asked[1])} more were asked for" if asked else ""
    place = f"{hand.device} on rank {hand.world.rank}{where}{wanted}"
    head = f"step {hand.num_steps + 1} did not fit into the memory of {place}"
    options = remedies(hand, task, batch, held, memory)
    _free(hand.device)
    texts = [head, f"a step holds about {format_bytes(held.total)}, and there is room for {format_bytes(memory)}:"]
    texts += [f"  {line}" for line in held.lines()]
    texts += ["what would help:", *(f"  {line}" for line in options)]
    raise OutOfMemory("\n".join(texts)) from None


def _spelled(amount: str) -> str:
    return format_bytes(int(amount.split()[0])) if amount.split()[-1].startswith("byte") else amount


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__, "<")
    user_frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f", at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""


def _let_go(error: BaseException, hand: Hand) -> None:
    """Free what the failed step left behind: its frames, partial gradients, and the allocator's cache."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
    hand.current.forget()
    _free(hand.device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
