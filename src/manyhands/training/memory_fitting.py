"""Find the least costly way to run a step within a given memory per device, before anything runs.

Forward and backward run on torch's fake tensors, which have sizes but no values, so networks too large for this machine
can be measured as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core import Mean, OutOfMemory, StrategyError, StrategySpec, Task, format_bytes
from ..data import map_leaves
from ..graph import Life, kept_bytes, largest_sum, lives
from ..strategies import AT_ONCE, SplitTable, in_double, keep_all, recompute, table_of
from .explain import few_samples, slots_of, without_values
from .repeated_blocks import KEPT, RepeatedBlocks, rows_of, shortened

SLOWER = {"": 1.0, "selective": 1.1, "blocks": 1.33}
"""Step time with each kind of recomputation, as a multiple of the plain step."""
SHARDED = 1.15
"""Step time with sharded parameters, which are gathered in addition to the gradient reduction."""
OFFLOADED = 2.0
"""Step time with gradients and optimizer state offloaded to the host and back."""
USABLE_SHARE = 0.9
"""The share of memory that is planned for; the allocator and non-tensor memory need the rest."""
NUM_ROWS = 2


@dataclass(frozen=True)
class MemoryOption:
    """A candidate spec, its bytes per device, and its step time as a multiple of the plain one."""

    spec: StrategySpec
    bytes: int
    cost: float


def fit_in(
    task: Task, spec: StrategySpec, memory: int, num_devices: int, host: int = 0
) -> tuple[StrategySpec, list[str]]:
    """Return the least costly spec that fits into `memory` bytes per device, and notices about it.

    Options that the user has set stay; recompute, accumulate and, on several devices, sharding are chosen. Optimizer
    state may be offloaded to `host` bytes of host memory per device, where the devices have their own memory.
    """
    model = without_values(task) or task.model()
    if spec.precision == "fp64":
        model = in_double(model)
    choices = sorted(_choices(task, model, spec, num_devices, host), key=lambda choice: choice.cost)
    best = next((choice for choice in choices if choice.bytes <= USABLE_SHARE * memory), None)
    if best is None:
        least = min(choices, key=lambda choice: choice.bytes)
        raise OutOfMemory(
            f"no option fits into {USABLE_SHARE:.0%} of {format_bytes(memory)}: the smallest is {least.spec} with "
            f"about {format_bytes(least.bytes)} a device; use more devices, a smaller batch or model, or precision=bf16"
        )
    taken = f"about {format_bytes(best.bytes)} of {format_bytes(memory)} on each device"
    plain = choices[0]
    if best is plain:
        return best.spec, [f"{best.spec} takes {taken}"]
    return best.spec, [f"{best.spec} takes {taken}; {plain.spec} would take {format_bytes(plain.bytes)}"]


def _choices(task: Task, model: nn.Module, spec: StrategySpec, num_devices: int, host: int) -> Iterator[MemoryOption]:
    """Yield every combination of the options that are not set, with its memory and cost."""
    slots = slots_of(task, model)
    batch, size = few_samples(task, spec, 2 * NUM_ROWS)
    for what in [spec.recompute] if spec.recompute else list(SLOWER):
        try:
            is_narrow = spec.precision == "bf16"
            seen = _seen(task, model, batch, what, is_narrow)
        except StrategyError:
            continue  # the network has no blocks to recompute
        for placed in _placed(spec, num_devices):
            table = table_of(model, placed, slots=slots)
            rows = -(-size // placed.num_parts)
            largest = max((p.numel() * p.element_size() for p in model.parameters()), default=0)
            for accumulate, (offload, fixed, slower) in product(_accumulations(spec, rows), _kept(placed, table, host)):
                peak = seen.peak(-(-rows // accumulate))
                made = dataclasses.replace(placed, recompute=what, accumulate=accumulate, offload=offload)
                cost = SLOWER.get(what, 1.33) * (1 + 0.01 * (accumulate - 1)) * (1.0 if placed.shards == 1 else SHARDED)
                yield MemoryOption(made, fixed + peak + largest, cost * slower)


def _kept(spec: StrategySpec, table: SplitTable, host: int) -> Iterator[tuple[str, int, float]]:
    """Yield offload settings with the bytes that a device holds permanently, and the cost factor."""
    copies = 2 if spec.num_parts > 1 and spec.shards == 1 else 1
    gradients, alone = copies * table.gradients, spec.num_parts == 1
    if "optimizer" not in spec.offloaded:
        yield spec.offload, table.parameters + gradients + table.optimizer, 1.0
    if "optimizer" in spec.offloaded or (host and table.optimizer + gradients * alone <= USABLE_SHARE * host):
        # During an update of some parameters, their gradients, optimizer state and temporaries are on the device.
        visiting = min(table.parameters, AT_ONCE) * (3 + table.optimizer / max(1, table.parameters))
        held = table.parameters + (0 if alone else gradients) + int(visiting)
        yield "+".join(dict.fromkeys((*spec.offloaded, "optimizer"))), held, OFFLOADED


def _placed(spec: StrategySpec, num_devices: int) -> Iterator[StrategySpec]:
    """Yield the spec on these devices, then the same with shards instead of replicas."""
    definite = spec.with_devices(num_devices)
    yield definite
    replicas = definite.axes.get("replicas", 1)
    if replicas > 1 and definite.shards == 1:
        yield dataclasses.replace(definite, replicas=1, shards=replicas)


def _accumulations(spec: StrategySpec, rows: int) -> list[int]:
    """Return candidate numbers of micro-batches: the one that is set, or powers of two up to the number of rows."""
    if spec.accumulate > 1:
        return [spec.accumulate]
    return [2**power for power in range(rows.bit_length()) if 2**power <= rows]


@dataclass
class _MeasuredLifetimes:
    """Tensor lifetimes of forward and backward, measured with `NUM_ROWS` rows and with twice as many."""

    small: list[Life]
    large: list[Life]
    more: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that omitted blocks keep, for `NUM_ROWS` rows and for twice as many."""

    def peak(self, rows: int) -> int:
        """Return the peak bytes for `rows` rows, including the activations of blocks that are not recomputed."""
        found = largest_sum(NUM_ROWS, self.small, 2 * NUM_ROWS, self.large, rows)
        return found + sum(max(0, few + (many - few) * (rows - NUM_ROWS) // NUM_ROWS) for few, many in self.more)


def _seen(task: Task, model: nn.Module, batch: Any, what: str, is_narrow: bool) -> _MeasuredLifetimes:
    """Measure the network with `KEPT` of each run of repeated blocks, and with one fewer to get a block's share."""

    def both(lengths: Mapping[RepeatedBlocks, int]) -> _MeasuredLifetimes:
        with shortened(lengths):
            small, large = (_followed(task, model, batch, n, what, is_narrow) for n in (NUM_ROWS, 2 * NUM_ROWS))
        return _MeasuredLifetimes(small, large)

    rows = rows_of(model)
    if not rows:
        return both({})
    try:
        found = both(dict.fromkeys(rows, KEPT))
        for row in rows:
            less = both({**dict.fromkeys(rows, KEPT), row: KEPT - 1})
            times = row.length - KEPT
            few, many = (
                sum(kept_bytes(one).values()) - sum(kept_bytes(other).values())
                for one, other in ((found.small, less.small), (found.large, less.large))
            )
            found.more.append((times * few, times * many))
    except StrategyError:
        raise
    except Exception:
        # The network may depend on its number of blocks: measure all of them.
        return both({})
    return found


def _followed(task: Task, model: nn.Module, batch: Any, rows: int, what: str, is_narrow: bool) -> list[Life]:
    """Return the lifetimes of all tensors of a forward and backward with this many rows, under recomputation `what`."""
    assert task.loss is not None
    loss = task.loss
    was_training = model.training
    model.train()
    recompute(model, what, own_randomness=False)
    try:
        with _pretended(model) as fake:
            part = map_leaves(lambda leaf: leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf, batch)

            def forward() -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow, cache_enabled=not what):
                    value = loss(model, fake(part))
                return value.total if isinstance(value, Mean) else value

            return lives(model, forward)
    finally:
        keep_all(model)
        model.train(was_training)


@contextmanager
def _pretended(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Replace the network's parameters and buffers by fake tensors within the context; yield a converter for data."""
    owners: list[dict[str, Any]] = [own for module in model.modules() for own in (module._parameters, module._buffers)]
    held = [(own, dict(own)) for own in owners]
    made: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            for own, before in held:
                for name, tensor in before.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = torch.empty_like(tensor, device="cpu")
                            made[id(tensor)].requires_grad_(tensor.requires_grad)
                        own[name] = made[id(tensor)]
            yield lambda data: map_leaves(
                lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, data
            )
        finally:
            for own, before in held:
                own.update(before)
