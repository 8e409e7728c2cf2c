"""Gradient buckets: gradients are packed into flat buffers and all-reduced while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core import TaskError
from ..distributed import World
from .bucket_exchange import BucketExchange, PolicyState, report_policy
from .policy import Policy
from .policy_memory import lay_like

T = TypeVar("T", bound=Tensor)
FIRST_BYTES = 1 << 20
"""The first bucket is small: the last layers' gradients are ready first and need not wait for many others."""
NUM_RIDERS = 3
"""Number of values piggybacked on a step's gradients, so that they need no separate collective."""


class Buckets:
    """The gradients of some parameters, summed over the replicas.

    Every parameter has a slot behind its bucket's gradients that counts the replicas in which it was used, so a
    parameter
    that no replica used keeps no gradient, exactly as on one device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World, policy: Policy) -> None:
        self._world, self._policy, self._parameters = world, policy, parameters
        self._armed = False
        self._next = 0
        self._hooks: list[RemovableHandle] = []
        self.deferred = False
        """Whether sums wait for all gradients: `pack`, `exchange`, `finish` instead of overlap with backward."""
        self._settled = False
        """Whether the parameters in use are known, so that they need not be determined in every step."""
        self._make()

    def _make(self) -> None:
        """Assign the trainable parameters to buckets, and register their hooks."""
        self._trainable = [p.requires_grad for p in self._parameters.values()]
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        plan = pieces(trainable, self._policy.bucket_bytes)
        self._buckets = [
            _Bucket(part, NUM_RIDERS if part is plan[-1] else 0, self._world, self._policy) for part in plan
        ]
        if self._buckets:
            # One bucket is enough to measure the policy's error, and the first is small.
            self._buckets[0].exchange.measures = True
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def refresh(self) -> None:
        """Rebuild the buckets if parameters were frozen or unfrozen since the last step."""
        if [p.requires_grad for p in self._parameters.values()] != self._trainable:
            self.rebuild_layout()

    def rebuild_layout(self) -> None:
        """Rebuild the buckets after the parameters' memory layout changed, which must be the same on every replica."""
        state = self._state()
        self.close()
        self._make()
        self._take_over(state)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that this replica sent in the last step."""
        return sum(bucket.exchange.num_bytes for bucket in self._buckets)

    @property
    def num_exact_bytes(self) -> int:
        """Return the bytes that the exact sums would have taken."""
        return sum(bucket.exchange.num_exact_bytes for bucket in self._buckets)

    def state(self) -> PolicyState:
        """Return the policy's state of all replicas; every replica must call it."""
        return self._state().gathered(self._world)

    def own_state(self) -> PolicyState:
        """Return the policy's state of this replica alone."""
        return self._state().own()

    def load_state(self, state: PolicyState) -> None:
        """Restore a result of `state` or `own_state`, on any number of replicas."""
        self._take_over(state.share(self._world))

    def _state(self) -> PolicyState:
        return PolicyState.joined([bucket.exchange.state() for bucket in self._buckets])

    def _take_over(self, state: PolicyState) -> None:
        for bucket in self._buckets:
            bucket.exchange.take_over(state)

    @property
    def piggybacked(self) -> Tensor | None:
        """Return the piggybacked values that are summed with the last bucket; set them before `arm`.

        None if their sum would not be exact enough, in a narrow dtype. No policy changes them.
        """
        if not self._buckets:
            return None
        piggybacked = self._buckets[-1].piggybacked
        return piggybacked if piggybacked.dtype in (torch.float32, torch.float64) else None

    def arm(self) -> None:
        """Mark the next backward as the last of this step: each bucket is reduced as soon as it is full."""
        self._armed = not self.deferred
        self._next = 0
        for bucket in self._buckets:
            bucket.ready.clear()

    @property
    def usage(self) -> list[list[bool]]:
        """Return which parameters some replica used in the last step, by bucket."""
        return [list(bucket.is_used) for bucket in self._buckets]

    def settle(self, usage: list[list[bool]] | None) -> None:
        """Set which parameters are used, so that finish() does not check; None checks again in every step."""
        self._settled = usage is not None
        for bucket, is_used in zip(self._buckets, usage or (), strict=False):
            bucket.is_used = list(is_used)

    def pack(self) -> None:
        """Copy all gradients into their buckets."""
        for bucket in self._buckets:
            bucket.fill()

    def exchange(self) -> None:
        """Sum the packed buckets over the replicas."""
        for bucket in self._buckets:
            bucket.exchange.begin(bucket.flat)
        self._complete()

    def finish(self) -> None:
        """Wait until every parameter's gradient is the sum over the replicas."""
        while self._next < len(self._buckets) and not self.deferred:
            self._launch()
        self._armed = False
        if not self.deferred:
            self._complete()
        for bucket in self._buckets:
            bucket.finish(self._settled)

    def _complete(self) -> None:
        """Finish all buckets round by round, so that all are in flight at a time, in the same order everywhere."""
        under_way = [bucket.exchange for bucket in self._buckets]
        while under_way:
            under_way = [exchange for exchange in under_way if exchange.advance()]
        if self._buckets:
            report_policy(self._world, self._policy, self._buckets[0].exchange, self.num_bytes, self.num_exact_bytes)

    def divide(self, count: Tensor) -> None:
        """Divide the summed gradients by a count."""
        for bucket in self._buckets:
            bucket.gradients.div_(count.to(bucket.flat.dtype))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self._armed:
                return
            if parameter in bucket.ready:
                raise TaskError(
                    "a gradient must be complete after one backward",
                    got="a gradient that was accumulated twice, as by reentrant checkpointing",
                    remedy="pass use_reentrant=False to torch.utils.checkpoint",
                )
            bucket.ready.add(parameter)
            # In order, because every rank must start the same collectives in the same sequence.
            while self._next < len(self._buckets) and self._buckets[self._next].is_full:
                self._launch()

        return ready

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        bucket.fill()
        bucket.exchange.begin(bucket.flat)
        if self._next > 1 and self._policy.changes_mathematics:
            # The second round of an earlier bucket overlaps with backward; chosen by bucket count, so that all ranks
            # use one order.
            self._buckets[self._next - 2].exchange.advance()
        self._next += 1


class _Bucket:
    def __init__(self, parameters: Mapping[str, nn.Parameter], num_riders: int, world: World, policy: Policy) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        parts = [sum(sizes), len(sizes), num_riders]
        self.flat = torch.zeros(sum(parts), dtype=first.dtype, device=first.device)
        self.gradients, self._used, self.piggybacked = self.flat.split(parts)
        self._views = [lay_like(p, part) for part, p in zip(self.gradients.split(sizes), self.parameters, strict=True)]
        self.ready: set[Tensor] = set()
        self.exchange = BucketExchange(policy, world, parameters)
        self.is_used = [True] * len(sizes)
        """Which parameters some replica used, as of the last check."""

    @property
    def is_full(self) -> bool:
        return len(self.ready) >= len(self.parameters)

    def fill(self) -> None:
        """Copy the gradients in; zero where this replica did not use the parameter."""
        gradients = [p.grad for p in self.parameters]
        self._require_dense(gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(gradients):
            self._fill_partly(gradients)
            return
        self._used.fill_(1)
        torch._foreach_copy_(self._views, present)

    def _fill_partly(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients.zero_()
        self._used.zero_()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._views[index].copy_(gradient)
                # Not an assignment, which would copy a number from the host and synchronize.
                self._used[index].fill_(1)

    def finish(self, settled: bool) -> None:
        if not settled:
            # Reading the counter synchronizes with the GPU; a replica that has a gradient need not read it.
            self.is_used = [p.grad is not None or self._used[i].item() > 0 for i, p in enumerate(self.parameters)]
        parts = zip(self.names, self.parameters, self._views, self.is_used, strict=True)
        for name, parameter, view, is_used in parts:
            if is_used:
                parameter.grad = view
            else:
                self.exchange.give_back(name, view)

    def _require_dense(self, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TaskError(
                    "gradients must be dense to be summed over replicas",
                    got=f"a sparse gradient of {name}",
                    remedy="build its layer with sparse=False",
                )


def pieces(parameters: Mapping[str, T], bucket_bytes: int) -> list[dict[str, T]]:
    """Return the parameters by bucket, in the order in which backward produces their gradients: last layers first."""
    plan: list[dict[str, T]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[dict[str, T], int]] = {}
    for name, parameter in reversed(list(parameters.items())):
        key = (parameter.dtype, parameter.device)
        bucket, num_bytes = open_buckets.get(key, ({}, 0))
        if not bucket:
            plan.append(bucket)
        bucket[name] = parameter
        num_bytes += parameter.numel() * parameter.element_size()
        limit = min(FIRST_BYTES, bucket_bytes) if len(plan) == 1 else bucket_bytes
        open_buckets[key] = ({}, 0) if num_bytes >= limit else (bucket, num_bytes)
    return plan
