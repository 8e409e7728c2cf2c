"""The least costly way of taking a step within so much memory of each device, found before anything runs.

Forward and backward are followed with torch's fake tensors, which know their sizes only; so what a network too large
for this machine would hold can be told here.
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

from ..core import Mean, OutOfMemory, StrategyError, StrategySpec, Task
from ..data import map_leaves
from ..graph import Life, kept_bytes, largest_sum, lives
from ..strategies import AT_ONCE, SplitTable, in_double, keep_all, recompute, size_text, table_of
from .explain import few_samples, slots_of, without_values
from .repeated_blocks import KEPT, RepeatedBlocks, rows_of, shortened

SLOWER = {"": 1.0, "selective": 1.1, "blocks": 1.33}
"""What computing again costs, as a share of a step."""
SHARDED = 1.15
"""What it costs that parameters travel, besides the sums that replicas exchange anyway."""
OFFLOADED = 2.0
"""What it costs that gradients and optimizer state travel to the host and back."""
ROOM = 0.9
"""The share of the memory that is planned for; the allocator and what is not a tensor need the rest."""
NUM_ROWS = 2


@dataclass(frozen=True)
class MemoryOption:
    """A way of taking steps, what it takes of a device, and its time as a multiple of the plain one's."""

    spec: StrategySpec
    bytes: int
    cost: float


def fit_in(
    task: Task, spec: StrategySpec, memory: int, num_devices: int, host: int = 0
) -> tuple[StrategySpec, list[str]]:
    """The least costly spec that fits into so much memory of each device, and what to say about it.

    What a person has set stays as it is; recompute, accumulate and, on several devices, sharding are chosen. Optimizer
    state may wait in so many bytes of the host's memory for each device, where that is another one.
    """
    model = without_values(task) or task.model()
    if spec.precision == "fp64":
        model = in_double(model)
    choices = sorted(_choices(task, model, spec, num_devices, host), key=lambda choice: choice.cost)
    best = next((choice for choice in choices if choice.bytes <= ROOM * memory), None)
    if best is None:
        least = min(choices, key=lambda choice: choice.bytes)
        raise OutOfMemory(
            f"nothing fits into {ROOM:.0%} of {size_text(memory)}: the least is {least.spec} with about "
            f"{size_text(least.bytes)} a device; use more devices, a smaller batch or network, or precision=bf16"
        )
    taken = f"about {size_text(best.bytes)} of {size_text(memory)} on each device"
    plain = choices[0]
    if best is plain:
        return best.spec, [f"{best.spec} takes {taken}"]
    return best.spec, [f"{best.spec} takes {taken}; {plain.spec} would take {size_text(plain.bytes)}"]


def _choices(task: Task, model: nn.Module, spec: StrategySpec, num_devices: int, host: int) -> Iterator[MemoryOption]:
    """Every combination of what is not set, with what it takes."""
    slots = slots_of(task, model)
    batch, size = few_samples(task, spec, 2 * NUM_ROWS)
    for what in [spec.recompute] if spec.recompute else list(SLOWER):
        try:
            is_narrow = spec.precision == "bf16"
            seen = _seen(task, model, batch, what, is_narrow)
        except StrategyError:
            continue  # there are no blocks to compute again
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
    """What may wait on the host, the bytes that a device holds all the time then, and what it costs."""
    copies = 2 if spec.num_parts > 1 and spec.shards == 1 else 1
    gradients, alone = copies * table.gradients, spec.num_parts == 1
    if "optimizer" not in spec.offloaded:
        yield spec.offload, table.parameters + gradients + table.optimizer, 1.0
    if "optimizer" in spec.offloaded or (host and table.optimizer + gradients * alone <= ROOM * host):
        # While some parameters are updated their gradients, their state and what the update needs besides are here.
        visiting = min(table.parameters, AT_ONCE) * (3 + table.optimizer / max(1, table.parameters))
        held = table.parameters + (0 if alone else gradients) + int(visiting)
        yield "+".join(dict.fromkeys((*spec.offloaded, "optimizer"))), held, OFFLOADED


def _placed(spec: StrategySpec, num_devices: int) -> Iterator[StrategySpec]:
    """The spec on these devices, and with its replicas as shards."""
    definite = spec.with_devices(num_devices)
    yield definite
    replicas = definite.axes.get("replicas", 1)
    if replicas > 1 and definite.shards == 1:
        yield dataclasses.replace(definite, replicas=1, shards=replicas)


def _accumulations(spec: StrategySpec, rows: int) -> list[int]:
    """Numbers of micro-batches: what is set, or powers of two as far as there are rows."""
    if spec.accumulate > 1:
        return [spec.accumulate]
    return [2**power for power in range(rows.bit_length()) if 2**power <= rows]


@dataclass
class _Seen:
    """What was seen of a forward and a backward of few rows and of twice as many."""

    small: list[Life]
    large: list[Life]
    more: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that blocks which were left out keep, for few rows and for twice as many."""

    def peak(self, rows: int) -> int:
        """The most bytes at a time for so many rows; a block that was left out adds what it keeps, and not more."""
        found = largest_sum(NUM_ROWS, self.small, 2 * NUM_ROWS, self.large, rows)
        return found + sum(max(0, few + (many - few) * (rows - NUM_ROWS) // NUM_ROWS) for few, many in self.more)


def _seen(task: Task, model: nn.Module, batch: Any, what: str, is_narrow: bool) -> _Seen:
    """Follows the network with three blocks of each row, and for each row with one less, to see what one keeps."""

    def both(lengths: Mapping[RepeatedBlocks, int]) -> _Seen:
        with shortened(lengths):
            small, large = (_followed(task, model, batch, n, what, is_narrow) for n in (NUM_ROWS, 2 * NUM_ROWS))
        return _Seen(small, large)

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
        # It counts its blocks, say: then all of them are looked at.
        return both({})
    return found


def _followed(task: Task, model: nn.Module, batch: Any, rows: int, what: str, is_narrow: bool) -> list[Life]:
    """Everything that a forward and a backward of so many rows make, computed again as `what` says."""
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
    """The network with fake tensors for its own."""
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
