"""Synchronization of local policies: averages replicas that trained independently into one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core import TaskError, event
from ..distributed import World
from .buckets import BucketExchange, describe_sizes, is_look, pieces
from .local import Local
from .policy_memory import key_of, wide
from .policy_state import PolicyState

ANCHOR, VELOCITY = "anchor", "velocity"
COUNT = 1
"""Index in a step's row of numbers at which the number of samples (or tokens) of this replica is."""


class Agreement:
    """Synchronize replicas under a local policy: count the local steps, and average the parameters when it is due.

    It keeps a copy of the parameters at the last synchronization (the anchors); the difference is the update.

    Args:
        policy: The local policy.
        world: The replicas.
        parameters: The parameters that an optimizer changes, by name.
        buffers: Returns the buffers to average, such as batch statistics.
        here: Returns this rank's part of a parameter, if parameters are sharded.
    """

    def __init__(
        self,
        policy: Local,
        world: World,
        parameters: Mapping[str, Tensor],
        buffers: Callable[[], Iterable[Tensor]],
        here: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._policy, self._world, self._buffers = policy, world, buffers
        self._parameters, self._here = parameters, here
        self._rows: list[Tensor] = []
        self._exchanges: list[tuple[list[str], BucketExchange]] = []
        for name, parameter in parameters.items():
            _require_real(policy, name, parameter)
        self._trained = _trainable(parameters)
        self._anchors = {name: _copy(parameter) for name, parameter in self._held().items()}
        self._velocities: dict[str, Tensor] = {}
        if policy.has_velocity:
            self._velocities = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        self.num_steps = self.num_syncs = 0
        """Number of steps in total, and number of synchronizations after the warm-up."""
        self.num_bytes = 0
        """Bytes that this replica sent in the last synchronization, divided by the number of steps before it."""

    def _held(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter: all of it, unless parameters are sharded."""
        return {name: self._here(parameter.detach()) for name, parameter in self._parameters.items()}

    @property
    def is_reached(self) -> bool:
        """Return whether the replicas are synchronized: no step was taken since the last synchronization."""
        return not self._rows

    def note(self, row: Tensor) -> bool:
        """Record a step; return whether the replicas must synchronize now.

        `row` holds the step's total loss, sample count and stop vote; `meet` replaces them by sums over the replicas.
        """
        self._rows.append(row)
        self.num_steps += 1
        if self._velocities or self.num_steps <= self._policy.warmup:
            return self.is_outer
        return len(self._rows) >= self._policy.every

    @property
    def is_outer(self) -> bool:
        """Return whether a synchronization at this step applies the policy's outer update.

        A policy with a velocity applies it every `every` steps only, because each update accelerates the velocity.
        Other synchronizations, such as before a checkpoint, only average the parameters.
        """
        since = self.num_steps - self._policy.warmup
        return not self._velocities or since <= 0 or since % self._policy.every == 0

    @torch.no_grad()
    def meet(self) -> None:
        """Synchronize all replicas: average parameters and buffers, and sum the rows given to `note` over the replicas.

        Every replica must call it. It does nothing if no step was taken since the last call.
        """
        if self.is_reached:
            return
        numbers = torch.stack(self._rows)
        weight = numbers[:, COUNT].sum()
        self._world.all_reduce(numbers)
        total = numbers[:, COUNT].sum()
        share = torch.where(total > 0, weight / total, 1 / self._world.size)
        for row, sums in zip(self._rows, numbers, strict=True):
            row.copy_(sums)
        self._average_buffers(share)
        self._go(share)
        self._rows = []

    def _go(self, share: Tensor) -> None:
        held, before = self._held(), self._trained
        self._trained = _trainable(self._parameters)
        self._plan([name for name in held if name in before | self._trained])
        is_warm = self.num_steps <= self._policy.warmup
        self.num_syncs += not is_warm
        flats = [self._ways(names, held) * share for names, _ in self._exchanges]
        looks = bool(flats) and self._world.is_first and not is_warm and is_look(self.num_syncs)
        own = flats[0] / share if looks else None
        for flat, (_, exchange) in zip(flats, self._exchanges, strict=True):
            exchange.begin(flat)
        under_way = [exchange for _, exchange in self._exchanges]
        while under_way:
            under_way = [exchange for exchange in under_way if exchange.advance()]
        exact = sum(exchange.num_exact_bytes for _, exchange in self._exchanges)
        sent = sum(exchange.num_bytes for _, exchange in self._exchanges)
        self.num_bytes = sent // len(self._rows)
        if own is not None:
            self._report(own, flats[0], exact)
        for flat, (names, _) in zip(flats, self._exchanges, strict=True):
            self._arrive(flat, names, held, is_warm)

    def _ways(self, names: Sequence[str], held: Mapping[str, Tensor]) -> Tensor:
        anchors = [self._anchors[name] for name in names]
        ways = torch._foreach_sub([wide_of(held[name]) for name in names], anchors)
        return torch.cat([way.reshape(-1) for way in ways])

    def _arrive(self, flat: Tensor, names: Sequence[str], held: Mapping[str, Tensor], is_warm: bool) -> None:
        """Set parameters from their mean update `flat`: apply the outer update if it is due, otherwise only average.

        Only an outer update changes the anchors.
        """
        anchors = [self._anchors[name] for name in names]
        parts = flat.split([anchor.numel() for anchor in anchors])
        ways = [part.view(anchor.shape) for part, anchor in zip(parts, anchors, strict=True)]
        if not self.is_outer:
            torch._foreach_copy_([held[name] for name in names], torch._foreach_add(anchors, ways))
            return
        velocities = [self._velocities[name] for name in names if name in self._velocities]
        steps = ways if is_warm else self._policy.follow(ways, velocities)
        torch._foreach_add_(anchors, list(steps))
        parameters = [held[name] for name in names]
        torch._foreach_copy_(parameters, anchors)
        if any(parameter.dtype != anchor.dtype for parameter, anchor in zip(parameters, anchors, strict=True)):
            torch._foreach_copy_(anchors, parameters)

    def _plan(self, trained: Sequence[str]) -> None:
        """Create the bucket exchanges for the parameters named in `trained`; keep the state of earlier exchanges."""
        planned = [name for names, _ in self._exchanges for name in names]
        if set(planned) == set(trained):
            return
        state = self.state()
        alike = {name: self._anchors[name] for name in trained}
        carrier = self._policy.carrier
        made = [piece for piece in pieces(alike, carrier.bucket_bytes) if piece]
        self._exchanges = [(list(piece), BucketExchange(carrier, self._world, piece)) for piece in made]
        for _, exchange in self._exchanges:
            exchange.take_over(_of_carrier(state))

    def _average_buffers(self, share: Tensor) -> None:
        """Average floating-point and complex buffers, weighted by `share`; copy others from the first replica."""
        for dtype, buffers in _by_dtype(self._buffers()).items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if dtype.is_floating_point or dtype.is_complex:
                flat = flat.to(torch.promote_types(dtype, torch.float32)) * share
                self._world.all_reduce(flat)
            else:
                self._world.broadcast(flat)
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _report(self, own: Tensor, mean: Tensor, exact: int) -> None:
        """Report the relative distance of the first replica's update from the mean update, and the bytes saved."""
        apart = float((own - mean).norm() / mean.norm())
        if not math.isfinite(apart):
            return
        policy, sizes = self._policy, describe_sizes(self.num_bytes, exact)
        text = (
            f"sync={policy}: the update of a replica differed from the mean update by {apart:.2g} of its norm; {sizes}"
        )
        values = {"policy": str(policy), "relative_error": apart, "bytes": self.num_bytes, "exact_bytes": exact}
        self._world.channel.report(event("sync", num_lossy=self.num_syncs, **values))
        self._world.channel.report(event("notice", text=text))

    def state(self) -> PolicyState:
        """Return the policy's state (feedback, velocities, anchors); complete only right after a synchronization."""
        state = PolicyState.joined(exchange.state() for _, exchange in self._exchanges)
        velocities = {key_of(VELOCITY, name): velocity for name, velocity in self._velocities.items()}
        anchors = {} if self.is_outer else {key_of(ANCHOR, name): anchor for name, anchor in self._anchors.items()}
        return PolicyState(state.feedback, {**state.shared, **velocities, **anchors}, self.num_steps)

    @torch.no_grad()
    def take_over(self, state: PolicyState) -> None:
        """Restore a result of `state` for the same parameters."""
        self.num_steps = state.num_steps
        for kind, held in ((VELOCITY, self._velocities), (ANCHOR, self._anchors)):
            for name, mine in held.items():
                saved = state.shared.get(key_of(kind, name))
                if saved is not None and saved.shape == mine.shape:
                    mine.copy_(saved)
        self._plan([name for name in self._parameters if name in self._trained])
        for _, exchange in self._exchanges:
            exchange.take_over(_of_carrier(state))

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the anchors to the current parameters and forget the local steps, after parameters were loaded."""
        self._rows = []
        for name, parameter in self._held().items():
            self._anchors[name].copy_(parameter)


def average(world: World, tensors: Iterable[Tensor]) -> None:
    """Replace floating-point tensors by their means over the replicas, in one collective for each dtype."""
    for dtype, some in _by_dtype(tensors).items():
        if dtype.is_floating_point:
            # An optimizer on a GPU may keep its step counters on the CPU.
            flat = torch.cat([tensor.reshape(-1).to(world.device) for tensor in some]).to(wide(dtype))
            world.all_reduce(flat, "avg")
            for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _of_carrier(state: PolicyState) -> PolicyState:
    """Return the part of a local policy's state that belongs to the policy that sums its updates."""
    shared = {key: held for key, held in state.shared.items() if key.partition("/")[0] not in (ANCHOR, VELOCITY)}
    return replace(state, shared=shared)


def wide_of(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision in which policies compute: at least float32."""
    return tensor.to(wide(tensor.dtype))


def _copy(parameter: Tensor) -> Tensor:
    return wide_of(parameter.detach()).clone(memory_format=torch.contiguous_format)


def _trainable(parameters: Mapping[str, Tensor]) -> set[str]:
    return {name for name, parameter in parameters.items() if parameter.requires_grad}


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor.detach())
    return found


def _require_real(policy: Local, name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        raise TaskError(
            f"the policy {policy} needs parameters with a floating-point dtype",
            got=f"{name} of {parameter.dtype}",
            remedy='use sync="allreduce"',
        )
