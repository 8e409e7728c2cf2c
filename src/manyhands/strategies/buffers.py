"""Buffers that a forward updates: after all parts of a batch they have the value that the whole batch would give.

How a batch is split over ranks and micro-batches must not change running means, counters and codebooks. How a buffer's
new value depends on its old one and the samples is found before training, from a few samples, whole and in two parts:

- equal for every part, as a step counter or the vectors of spectral norm: every part has the right value;
- a mean over samples, as in `mean.lerp_(x.mean(0), 0.1)`: the mean of the parts' values, weighted by their samples;
- a sum over samples, as in `counts.mul_(0.9).add_(hits.sum(0))`: the sum of the parts' values, with the old one once.

Every part starts from the old value. Any other update is rejected. BatchNorm layers have separate rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core import (
    LayoutFree,
    StrategyError,
    UsageError,
    random_state,
    remember_buffers,
    remember_state,
    restore_random_state,
    set_training,
)
from ..distributed import World
from .local_updates import own_part

Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]
TOLERANCE = 1e-5
"""Maximum relative difference between the parts' combined value and the whole batch's."""
ROUNDINGS = 16
"""Roundings of a value that are not a difference."""
MORE_TRIALS = 6
"""How many further trials decide how a buffer that changes is updated."""


@dataclass(frozen=True)
class BufferRule:
    """How the values that parts of a batch leave in a buffer are combined."""

    is_mean: bool = False
    is_sum: bool = False
    decay: float = 1.0
    """For a sum: the fraction of the old value that every part keeps."""

    def combined(self, total: Tensor, old: Tensor, num_parts: float) -> Tensor:
        """Return the new value from the weighted mean of the parts' values, or from their sum."""
        return total if self.is_mean else total - (num_parts - 1) * self.decay * old


Rules = dict[str, BufferRule]


class Buffers:
    """The buffers of a network that its forward updates, and the values that parts of the current step left in them."""

    def __init__(self, model: nn.Module, rules: Mapping[str, BufferRule], world: World) -> None:
        self._model, self._world = model, world
        self.rules = dict(rules)
        """The rule of each buffer that the forward updates."""
        self._old: dict[str, Tensor]
        self._sums: dict[str, Tensor]
        self._counts: list[float]
        self.reset()

    @property
    def all_names(self) -> list[str]:
        """Names of the buffers that the forward updates."""
        return list(self.rules)

    @property
    def names(self) -> list[str]:
        """Names of the buffers that the forward updates from samples."""
        return [name for name, rule in self.rules.items() if rule.is_mean or rule.is_sum]

    @torch.no_grad()
    def begin(self) -> None:
        """Restore the old values before a further micro-batch of the step; the first one finds them in place."""
        if not self._old:
            self._old = {name: self._held(name).clone() for name in self.rules}
            self._sums = {name: _wide(torch.zeros_like(old)) for name, old in self._old.items()}
            return
        for name, old in self._old.items():
            self._put(name, old)

    @torch.no_grad()
    def end(self, num_samples: int, *, last: bool) -> None:
        """Record the values that a micro-batch left; after the last micro-batch combine those of all ranks."""
        self.add({name: self._held(name) for name in self.rules}, num_samples)
        if last:
            self.combine()

    def add(self, values: Mapping[str, Tensor], num_samples: int) -> None:
        """Add the values that a part of the batch left, unless the part has no samples."""
        if num_samples:
            for name in self.names:
                value = values[name]
                self._sums[name] += _wide(value) * (num_samples if self.rules[name].is_mean else 1)
            self._counts = [self._counts[0] + num_samples, self._counts[1] + 1]

    @torch.no_grad()
    def combine(self) -> None:
        """Write the values of the whole batch into the network. Collective: all ranks call it."""
        old, names = self._old, self.names
        if names:
            parts = [torch.view_as_real(t) if t.is_complex() else t for t in (self._sums[name] for name in names)]
            counts = torch.tensor(self._counts, dtype=torch.float64, device=parts[0].device)
            flat = torch.cat([*(part.flatten() for part in parts), counts])
            self._world.all_reduce(flat)
            *sums, counts = flat.split([*(part.numel() for part in parts), 2])
            num_samples, num_parts = counts.tolist()
            for name, total, part in zip(names, sums, parts, strict=True):
                total = total.view_as(part)
                total = torch.view_as_complex(total) if self._sums[name].is_complex() else total
                total = total / num_samples if self.rules[name].is_mean else total
                new = self.rules[name].combined(total, _wide(old[name]), num_parts)
                self._put(name, new if old[name].is_floating_point() or old[name].is_complex() else new.round())
        self.reset()

    def reset(self) -> None:
        """Drop the values that parts of the current step left."""
        self._old, self._sums, self._counts = {}, {}, [0.0, 0.0]

    def _held(self, name: str) -> Tensor:
        """Return this rank's part of the current buffer, which a forward may have replaced."""
        owner, _, last = name.rpartition(".")
        return own_part(self._model.get_submodule(owner)._buffers[last])

    def _put(self, name: str, value: Tensor) -> None:
        self._held(name).copy_(value)

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the network's buffers."""
        for name, value in values.items():
            self._put(name, value)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -- the trial ---------------------------------------------------------------------------------------------------------


def find_rules(model: nn.Module, probe: Probe | None, scope: AbstractContextManager[object]) -> Rules:
    """Return the rules of the buffers that a forward in training mode updates; raise for an update that has none.

    The network is restored. If the loss cannot be computed from a few samples, no rule is found.
    """
    names = buffers_outside_batch_norm(model)
    if probe is None or not names or not _row_counts(probe):
        return {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    states, put_back = random_state(device), remember_state(model)
    rows = _row_counts(probe)
    try:
        with scope, _as_in_training(model):
            trials = _trials(model, names, probe, device, rows)
    except UsageError:
        raise
    except Exception:
        # An error in the user's code is raised again in the first step.
        return {}
    finally:
        put_back()
        restore_random_state(states, device)
    return {name: _rule(model, name, trials) for name in names if any(trial.changes(name) for trial in trials)}


def _trials(
    model: nn.Module, names: Sequence[str], probe: Probe, device: torch.device, rows: int
) -> list[_BufferTrial]:
    """Return two trials, or more if the forward changes buffers, each from the state that the last one left.

    Further trials split the samples at random. In a few trials, updates that round or compare, such as
    `bias += (load.mean() - load).sign()`, can look like means or counters.
    """
    # A part of one sample may be too small.
    split = rows // 3
    try:
        trials = [_BufferTrial.of(model, names, probe, device, np.arange(rows), split)]
    except ValueError:
        split = rows // 2
        trials = [_BufferTrial.of(model, names, probe, device, np.arange(rows), split)]
    trials.append(_BufferTrial.of(model, names, probe, device, np.arange(rows), split))
    if not any(trial.changes(name) for trial in trials for name in names):
        return trials
    generator = np.random.default_rng(0)
    for _ in range(MORE_TRIALS):
        order = generator.permutation(rows)
        trials.append(
            _BufferTrial.of(model, names, probe, device, order, int(generator.integers(split, rows - split + 1)))
        )
    return trials


@dataclass
class _BufferTrial:
    """The values that a few samples leave in buffers, whole and in two parts; the buffers keep those of the whole."""

    old: dict[str, Tensor]
    whole: dict[str, Tensor]
    parts: list[dict[str, Tensor]]
    sizes: tuple[int, int]
    units: dict[str, float]
    """Rounding relative to the size of a buffer's values; 0 for whole numbers."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        names: Sequence[str],
        probe: Probe,
        device: torch.device,
        order: NDArray[np.int64],
        split: int,
    ) -> _BufferTrial:
        """Run a forward on all samples, on the first ones in an order of the samples, and on the others."""
        rows = len(order)
        draws = LayoutFree(device)

        def values() -> dict[str, Tensor]:
            held = dict(model.named_buffers())
            return {name: _wide(own_part(held[name])).clone() for name in names}

        def after(part: NDArray[np.int64]) -> dict[str, Tensor]:
            draws.load(0, 0, part)
            with draws.drawing():
                probe(model, lambda batch: _rows_of(batch, rows, part))
            return values()

        old, put_back, parts = values(), remember_buffers(model), []
        for part in (order[:split], order[split:]):
            try:
                parts.append(after(part))
            finally:
                put_back()
        held = dict(model.named_buffers())
        units = {name: _unit(held[name]) for name in names}
        return cls(old, after(np.arange(rows)), parts, (split, rows - split), units)

    def changes(self, name: str) -> bool:
        return any(not torch.equal(self.old[name], after[name]) for after in (self.whole, *self.parts))

    def is_same(self, name: str) -> bool:
        return all(self._close(name, self.whole[name], part[name]) for part in self.parts)

    def is_mean(self, name: str) -> bool:
        weighted = [part[name] * size for part, size in zip(self.parts, self.sizes, strict=True)]
        return self._close(name, self.whole[name], (weighted[0] + weighted[1]) / sum(self.sizes))

    def kept(self, name: str) -> Tensor:
        """Return what remains of the old value in each part, if the update is a sum."""
        return self.parts[0][name] + self.parts[1][name] - self.whole[name]

    def decay(self, name: str) -> float | None:
        """Return the fraction of the old value that remains; None if the old value is zero everywhere."""
        old, kept = self.old[name].flatten(), self.kept(name).flatten()
        square = (old * old.conj()).sum().real
        if square == 0:
            return None
        found = float((kept * old.conj()).sum().real / square)
        # Decays written in code, such as 0.999, are exact; those estimated from float32 values are nearly so.
        return round(found, 5) if abs(found - round(found, 5)) < 2e-6 else found

    def is_sum(self, name: str, decay: float) -> bool:
        return self._close(name, self.kept(name), decay * self.old[name])

    def _close(self, name: str, a: Tensor, b: Tensor) -> bool:
        """Return whether two values are equal up to rounding, measured by how far the trial changed the buffer.

        After many steps a counter or an average is much larger than what a batch adds to it.
        """
        if not a.numel():
            return True
        old, after = self.old[name], [self.whole[name], *(part[name] for part in self.parts)]
        change = max(float((value - old).abs().amax()) for value in after)
        largest = max(float(value.abs().amax()) for value in (old, *after))
        return bool((a - b).abs().amax() <= TOLERANCE * change + self.units[name] * largest)


def _rule(model: nn.Module, name: str, trials: Sequence[_BufferTrial]) -> BufferRule:
    if all(trial.is_same(name) for trial in trials):
        return BufferRule()
    if all(trial.is_mean(name) for trial in trials):
        return BufferRule(is_mean=True)
    decay = next((found for trial in reversed(trials) if (found := trial.decay(name)) is not None), 1.0)
    if all(trial.is_sum(name, decay) for trial in trials):
        return BufferRule(is_sum=True, decay=decay)
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__.removeprefix("FSDP")
    raise StrategyError(
        "where a batch is split, a buffer that forward updates must be a mean or a sum over samples",
        got=f"{name} of {owner}, which differs between a batch and its two halves",
        remedy="compute it from such buffers where it is read, use nn.BatchNorm for batch statistics, train on "
        'one device, or let every replica keep its own with batch_stats="local"',
    )


def buffers_outside_batch_norm(model: nn.Module) -> list[str]:
    """Return the names of a network's buffers, except those of BatchNorm, which has its own rule."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return [name for name, _ in model.named_buffers() if not norms or not name.startswith(norms)]


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """Set training mode inside this context, except for BatchNorm, whose statistics are those of the whole batch."""
    modes = {module: module.training for module in model.modules()}
    try:
        set_training(model)
        for module in modes:
            if isinstance(module, _BatchNorm):
                module.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _row_counts(probe: Probe) -> int:
    """Return how many samples a probe uses; 0 if unknown, or too few to be split into unequal parts."""
    found: list[int] = []

    def look(batch: Any) -> Any:
        found.extend(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        raise _BatchSeen

    with suppress(_BatchSeen):
        probe(nn.Module(), look)
    return found[0] if found and found[0] >= 3 and len(set(found)) == 1 else 0


class _BatchSeen(Exception):
    """Raised to stop after the batch was seen."""


def _rows_of(batch: Any, rows: int, part: NDArray[np.int64]) -> Any:
    chosen = torch.from_numpy(part)
    return tree_map_only(Tensor, lambda t: t[chosen.to(t.device)] if t.dim() and len(t) == rows else t, batch)


def _unit(tensor: Tensor) -> float:
    """Return how much rounding may change a value of a buffer, relative to its size."""
    is_rounded = tensor.is_floating_point() or tensor.is_complex()
    return min(ROUNDINGS * torch.finfo(tensor.dtype).eps, TOLERANCE) if is_rounded else 0.0
