"""Current step of a replica, which the patched functions of Keras use.

Keras' loss is a mean over this replica's rows. Training needs the mean over the global batch, so a gradient is weighted
by its share of the rows when the optimizer gets it. `strategy.run` works as in tf.distribute: gradients are summed
without weights, and Keras' losses are this replica's share of the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import mix
from ..training import Hand
from .batch_share import MicroBatchRows

if TYPE_CHECKING:
    from .strategy import Strategy

BUCKET = 1 << 23
"""Elements of gradients per bucket; one bucket is filled while the previous one is in flight."""


@dataclass
class GradientSums:
    """Gradients summed over the micro-batches of one step, by optimizer."""

    held: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def add(self, key: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add gradients of the optimizer `key` to those of earlier micro-batches, and return the sums."""
        before = self.held.get(key, [None] * len(gradients))
        self.held[key] = [
            new if old is None else old if new is None else old + new
            for old, new in zip(before, gradients, strict=True)
        ]
        return self.held[key]


Update = Callable[[Any, Callable[..., Any], Sequence[Tensor | None], Sequence[Any]], None]
"""Function that takes an optimizer, its unwrapped `apply`, this replica's gradients and the variables to update."""


@dataclass
class MicroBatchStep:
    """State of the micro-batch that this replica computes: its rows, gradient sums and weights."""

    strategy: Strategy
    rows: MicroBatchRows
    sums: GradientSums
    is_plain_sum: bool = False
    """Whether gradients are summed without weights, because each replica's loss is its share of the global loss."""
    is_weighed: bool = False
    """Whether the loss was weighted before backward, so that gradients must not be weighted again."""
    is_applying: bool = False
    update: Update | None = None
    """Function that applies an optimizer over the replicas; None if each replica applies the summed gradients."""

    @property
    def hand(self) -> Hand:
        """The strategy's handle of this replica."""
        return self.strategy.hand

    @property
    def weight(self) -> float:
        """Factor by which this replica's gradients are multiplied before they are summed over the replicas."""
        if self.is_plain_sum:
            return 0.0 if self.strategy.worker is None else 1.0
        return 1.0 if self.is_weighed else self.rows.weight

    @property
    def is_borrowed(self) -> bool:
        """Whether this process computes a borrowed row, which must not count."""
        return self.strategy.worker is None or (self.rows.is_padding and not self.is_plain_sum)

    def part(self, contribution: Tensor) -> Tensor:
        """Return this replica's share of a loss, divided by the weight that its gradients will get."""
        return contribution if self.is_plain_sum else contribution * (self.rows.total / max(1, self.rows.size))

    def weighed(self, loss: Tensor) -> Tensor:
        """Return a loss weighted by this replica's share of the rows; its gradients are not weighted again."""
        if self.is_plain_sum:
            return loss
        self.is_weighed = True
        return loss * self.rows.weight

    def add_gradients(self, optimizer: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Add weighted gradients; return their sum, or None while more micro-batches of the step follow."""
        if self.weight != 1.0:
            gradients = [None if g is None else g * self.weight for g in gradients]
        added = self.sums.add(id(optimizer), gradients)
        if not self.rows.last:
            return None
        del self.sums.held[id(optimizer)]
        return added

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """Mark that an optimizer is applying summed gradients: an optimizer that it wraps must not sum them again."""
        self.is_applying = True
        try:
            yield
        finally:
            self.is_applying = False
            # Otherwise a forward after an update in the same step would use stale low-precision copies of weights.
            torch.clear_autocast_cache()


def sum_gradients(hand: Hand, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> list[Tensor | None]:
    """Sum gradients over the replicas; a variable that no replica used has no gradient, as on one device."""
    if hand.size == 1 or not gradients:
        return list(gradients)
    values = [getattr(variable, "value", variable) for variable in variables]
    whole = [torch.zeros_like(v) if g is None else g.detach() for g, v in zip(gradients, values, strict=True)]
    used = torch.tensor([g is not None for g in gradients], dtype=torch.float32, device=whole[0].device)
    pending = [hand.replicas.start_all_reduce(used)]
    flats = []
    for bucket in _buckets(whole):
        flat = torch.cat([whole[index].reshape(-1) for index in bucket])
        flats.append((bucket, flat))
        pending.append(hand.replicas.start_all_reduce(flat))
    for each in pending:
        each.wait()
    summed: list[Tensor | None] = [None] * len(whole)
    is_used = used.tolist()
    for bucket, flat in flats:
        for index, part in zip(bucket, flat.split([whole[i].numel() for i in bucket]), strict=True):
            summed[index] = part.view_as(whole[index]) if is_used[index] else None
    return summed


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indexes of the tensors in each bucket: adjacent ones of one dtype, of at most BUCKET elements."""
    buckets: list[list[int]] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        joins = buckets and filled + tensor.numel() <= BUCKET and tensors[buckets[-1][0]].dtype == tensor.dtype
        if not joins:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += tensor.numel()
    return buckets


_steps: list[MicroBatchStep] = []


def current_step() -> MicroBatchStep | None:
    """Return the step that this replica is computing; None outside of a step."""
    return _steps[-1] if _steps else None


@contextlib.contextmanager
def taking(step: MicroBatchStep) -> Iterator[None]:
    """Make `step` the current step within the context, and draw random numbers from the replica's own generators."""
    _steps.append(step)
    try:
        with own_numbers(step.hand) if step.hand.size > 1 else contextlib.nullcontext():
            yield
    finally:
        _steps.pop()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Run the block of the context as if no step were computed."""
    held, _steps[:] = _steps[:], []
    try:
        yield
    finally:
        _steps[:] = held


_states: dict[int, list[Tensor]] = {}
"""Random states for the computation of each rank; data loading draws from the states that all replicas share."""


@contextlib.contextmanager
def own_numbers(hand: Hand) -> Iterator[None]:
    """Draw random numbers from the replica's own generator states within the context.

    The states that all replicas share, which determine the order of the data, stay unchanged.
    """
    generators = [torch.default_generator]
    if hand.device.type == "cuda":
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[hand.device.index])
    shared = [generator.get_state() for generator in generators]
    if hand.rank not in _states:
        for generator in generators:
            generator.manual_seed(mix(generator.initial_seed(), hand.rank + 1))
    else:
        _restore(generators, _states[hand.rank])
    try:
        yield
    finally:
        _states[hand.rank] = [generator.get_state() for generator in generators]
        _restore(generators, shared)


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
