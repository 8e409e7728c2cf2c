"""Gradient buckets: flat buffers that are summed over the replicas, under a policy, while backward still runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core import TaskError, event, format_bytes
from ..distributed import Pending, World
from .hierarchical import HierarchicalSum
from .policy import Policy, PolicyCollectives
from .policy_memory import PolicyMemory, lay_like
from .policy_state import PolicyState

T = TypeVar("T", bound=Tensor)
FIRST_BYTES = 1 << 20
"""Size of the first bucket, smaller than others so that the sum of the first gradients starts early in backward."""
NUM_RIDERS = 3
"""Number of values piggybacked on a step's last bucket (loss, count, stop vote), to save a separate collective."""


class Buckets:
    """Sum the gradients of some parameters over the replicas, in buckets, while backward still runs.

    Behind its gradients a bucket has one counter per parameter: the number of replicas that used the parameter. So a
    parameter that no replica used keeps no gradient, as on one device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World, policy: Policy) -> None:
        self._world, self._policy, self._parameters = world, policy, parameters
        self._armed = False
        self._next = 0
        self._hooks: list[RemovableHandle] = []
        self.deferred = False
        """Whether sums wait for all gradients instead of overlapping with backward.

        If so, the caller calls `pack`, `exchange` and `finish` in every step.
        """
        self._settled = False
        """Whether `settle` has set which parameters are used, so that `finish` need not read the counters."""
        self._make()

    def _make(self) -> None:
        """Assign the trainable parameters to buckets, and register their hooks."""
        self._trainable = [p.requires_grad for p in self._parameters.values()]
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        plan = pieces(trainable, self._policy.bucket_bytes)
        self._buckets = [
            _GradientBucket(part, NUM_RIDERS if part is plan[-1] else 0, self._world, self._policy) for part in plan
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
        """Rebuild the buckets after the parameters' memory layout changed; it must be the same on every replica."""
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
        """Return the bytes that this replica would have sent in the last step with the exact sum."""
        return sum(bucket.exchange.num_exact_bytes for bucket in self._buckets)

    def state(self) -> PolicyState:
        """Return the policy's state with the error feedback of all replicas, for a checkpoint.

        Every replica must call it; only rank 0 gets the feedback.
        """
        return self._state().gathered(self._world)

    def own_state(self) -> PolicyState:
        """Return the policy's state with the error feedback of this replica only; no communication is needed."""
        return self._state().own()

    def load_state(self, state: PolicyState) -> None:
        """Restore the policy's state from a result of `state` or `own_state`; the number of replicas may differ."""
        self._take_over(state.share(self._world))

    def _state(self) -> PolicyState:
        return PolicyState.joined([bucket.exchange.state() for bucket in self._buckets])

    def _take_over(self, state: PolicyState) -> None:
        for bucket in self._buckets:
            bucket.exchange.take_over(state)

    @property
    def piggybacked(self) -> Tensor | None:
        """Return the tensor of values that are summed exactly with the last bucket; the caller sets them before `arm`.

        None if there is no bucket, or if the last bucket's dtype is narrower than float32, so that sums would be
        inexact.
        """
        if not self._buckets:
            return None
        piggybacked = self._buckets[-1].piggybacked
        return piggybacked if piggybacked.dtype in (torch.float32, torch.float64) else None

    def arm(self) -> None:
        """Declare that the next backward is the last of this step; it reduces each bucket as soon as it is full."""
        self._armed = not self.deferred
        self._next = 0
        for bucket in self._buckets:
            bucket.ready.clear()

    @property
    def usage(self) -> list[list[bool]]:
        """Return, for each bucket and each of its parameters, whether any replica used it in the last step."""
        return [list(bucket.is_used) for bucket in self._buckets]

    def settle(self, usage: list[list[bool]] | None) -> None:
        """Set which parameters are used, as `usage` returns it, so that `finish` does not read the counters.

        With None, `finish` reads them in every step again.
        """
        self._settled = usage is not None
        for bucket, is_used in zip(self._buckets, usage or (), strict=False):
            bucket.is_used = list(is_used)

    def pack(self) -> None:
        """Copy all gradients into their buckets; used if `deferred`."""
        for bucket in self._buckets:
            bucket.fill()

    def exchange(self) -> None:
        """Sum the packed buckets over the replicas, and wait for the sums; used if `deferred`."""
        for bucket in self._buckets:
            bucket.exchange.begin(bucket.flat)
        self._complete()

    def finish(self) -> None:
        """Wait for all sums, and set the gradient of every parameter in use to its sum over the replicas."""
        while self._next < len(self._buckets) and not self.deferred:
            self._launch()
        self._armed = False
        if not self.deferred:
            self._complete()
        for bucket in self._buckets:
            bucket.finish(self._settled)

    def _complete(self) -> None:
        """Finish the sums of all buckets, round by round: all are in flight at once, in the same order on all ranks."""
        under_way = [bucket.exchange for bucket in self._buckets]
        while under_way:
            under_way = [exchange for exchange in under_way if exchange.advance()]
        if self._buckets:
            report_policy(self._world, self._policy, self._buckets[0].exchange, self.num_bytes, self.num_exact_bytes)

    def divide(self, count: Tensor) -> None:
        """Divide the summed gradients by `count`, such as the number of samples of all replicas."""
        for bucket in self._buckets:
            bucket.gradients.div_(count.to(bucket.flat.dtype))

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: _GradientBucket) -> Callable[[Tensor], None]:
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
            # Launch in bucket order, because all ranks must start the same collectives in the same sequence.
            while self._next < len(self._buckets) and self._buckets[self._next].is_full:
                self._launch()

        return ready

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        bucket.fill()
        bucket.exchange.begin(bucket.flat)
        if self._next > 1 and self._policy.changes_mathematics:
            # The second round of an earlier bucket overlaps with backward. Which bucket is advanced depends only on
            # the number of launched buckets, so the order is the same on all ranks.
            self._buckets[self._next - 2].exchange.advance()
        self._next += 1


class _GradientBucket:
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
        """For each parameter, whether any replica used it, as of the last reading of the counters."""

    @property
    def is_full(self) -> bool:
        return len(self.ready) >= len(self.parameters)

    def fill(self) -> None:
        """Copy the gradients into the flat buffer, with zeros for parameters that this replica did not use."""
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
                # An assignment would copy a number from the host and synchronize with the GPU.
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
    """Return the parameters of each bucket, last layers first: the order in which backward produces gradients.

    A bucket has parameters of one dtype and device, and is closed when it has at least `bucket_bytes`.
    """
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


class BucketExchange:
    """Sum one flat gradient per step over the replicas, under a policy.

    Values behind the gradient in the same buffer are always summed exactly.
    """

    def __init__(self, policy: Policy, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._policy, self._world = policy, world
        self._wire = PolicyCollectives(world)
        self._rounds: Iterator[Pending] = iter(())
        self._waits_for: Pending | None = None
        self._size = sum(parameter.numel() for parameter in parameters.values())
        self._memory: PolicyMemory | None = None
        self.measures = False
        """Whether the result is compared with the exact sum, in the 1st, 10th, 100th … inexact step."""
        self.error: Tensor | None = None
        """The relative error of the last result; None if it was not measured in that step."""
        self.num_exact_bytes = 0
        """Bytes that this replica would have sent in the last step with the exact sum."""
        self._hosts: HierarchicalSum | None = None
        if policy.changes_mathematics and self._size:
            _require_real(policy, parameters)
            self._memory = PolicyMemory(parameters)
        if policy.between == "hosts" and self._size:
            self._hosts = HierarchicalSum(policy, world, next(iter(parameters.values())), self._size)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that this replica sent in the last step; with between="hosts", only those between hosts."""
        return self._wire.num_bytes + (0 if self._hosts is None else self._hosts.num_bytes)

    @property
    def num_lossy(self) -> int:
        """Return the number of steps after the warm-up under a policy that changes the mathematics."""
        return 0 if self._memory is None else max(0, self._memory.num_steps - self._policy.warmup)

    def begin(self, flat: Tensor) -> None:
        """Start the first communication round for the buffer `flat`: the gradient, and values to sum exactly."""
        self._wire.num_bytes = 0
        if self._hosts is not None:
            self._hosts.num_bytes = 0
        self.num_exact_bytes = 2 * flat.numel() * flat.element_size() * (self._wire.size - 1) // self._wire.size
        self.error = None
        memory = self._memory
        if memory is not None:
            memory.num_steps += 1
        is_exact = memory is None or memory.num_steps <= self._policy.warmup
        if is_exact and self._hosts is None:
            self._wire.num_bytes = self.num_exact_bytes
            self._waits_for = self._world.start_all_reduce(flat)
            return
        gradient, tail = flat[: self._size], flat[self._size :]
        self._rounds = (
            self._exact(gradient, tail) if memory is None or is_exact else self._lossy(memory, gradient, tail)
        )
        self._waits_for = next(self._rounds)

    def advance(self) -> bool:
        """Wait for the communication round in flight and start the next; return False if no round is left."""
        if self._waits_for is None:
            return False
        self._waits_for.wait()
        self._waits_for = next(self._rounds, None)
        return self._waits_for is not None

    def _exact(self, gradient: Tensor, tail: Tensor) -> Iterator[Pending]:
        """Sum the gradient exactly, first within each host and then between hosts; sum the tail at the same time."""
        assert self._hosts is not None
        tail_sums = self._wire.all_reduce(tail) if tail.numel() else Pending()
        yield from self._hosts.reduce(gradient, None)
        yield tail_sums

    def _lossy(self, memory: PolicyMemory, gradient: Tensor, tail: Tensor) -> Iterator[Pending]:
        tail_sums = self._wire.all_reduce(tail) if tail.numel() else Pending()
        exact = gradient.clone() if self.measures and is_look(self.num_lossy) else None
        exact_sums = Pending() if exact is None else self._world.start_all_reduce(exact)
        wide = torch.add(
            gradient, memory.feedback, out=memory.buffer("gradient", gradient.shape, memory.feedback.dtype)
        )
        memory.feedback.zero_()
        if self._hosts is None:
            yield from self._policy.reduce(self._wire, wide, memory)
        else:
            yield from self._hosts.reduce(wide, memory)
        # A non-finite gradient already shows in this step's result; in the feedback it would spoil every later step.
        memory.feedback.nan_to_num_(0.0, 0.0, 0.0)
        gradient.copy_(wide)
        yield tail_sums
        yield exact_sums
        if exact is not None:
            self.error = (wide - exact).norm() / exact.norm()

    def give_back(self, name: str, unused: Tensor) -> None:
        """Add the sum of a parameter that no replica used in this step back to its error feedback, for a later step.

        Such a sum contains only feedback of earlier steps. Every replica takes back an equal share.
        """
        if self._memory is not None:
            self._memory.feedback_by_name()[name].add_(unused, alpha=1 / self._wire.size)

    def state(self) -> PolicyState:
        """Return the policy's state for this bucket; the feedback tensors are views, not copies."""
        if self._memory is None:
            return PolicyState()
        return PolicyState(self._memory.feedback_by_name(), dict(self._memory.shared), self._memory.num_steps)

    def take_over(self, state: PolicyState) -> None:
        """Restore the policy's state for this bucket's parameters from `state`, which may contain others too."""
        if self._memory is not None:
            self._memory.take_over(state.feedback, state.shared, state.num_steps)


def report_policy(world: World, policy: Policy, exchange: BucketExchange, num_bytes: int, num_exact_bytes: int) -> None:
    """Report the relative error of `exchange` in this step, if it was measured, and the bytes that the policy saves.

    Only rank 0 reports, as an event and as a notice to the user. The byte counts are those of all buckets in this step.
    """
    if exchange.error is None or not world.is_first:
        return
    error = float(exchange.error)
    if not math.isfinite(error):
        return
    saved = describe_sizes(num_bytes, num_exact_bytes)
    text = f"sync={policy}: the mean gradient differed from the exact one by {error:.2g} of its norm; {saved}"
    fields = {"policy": str(policy), "relative_error": error, "bytes": num_bytes, "exact_bytes": num_exact_bytes}
    world.channel.report(event("sync", num_lossy=exchange.num_lossy, **fields))
    world.channel.report(event("notice", text=text))


def describe_sizes(num_bytes: int, num_exact_bytes: int) -> str:
    """Return a text that compares the bytes per step under a policy with those of the exact sum.

    >>> describe_sizes(2000, 10**7)
    '1.95 KiB a step on the wire instead of 9.54 MiB'
    """
    return f"{format_bytes(num_bytes, 3)} a step on the wire instead of {format_bytes(num_exact_bytes, 3)}"


def is_look(count: int) -> bool:
    """Return whether `count` is a power of ten: the error is measured in the 1st, 10th, 100th … step."""
    return count >= 1 and 10 ** round(math.log10(count)) == count


def _require_real(policy: Policy, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise TaskError(
                f"the policy {policy} needs parameters with a floating-point dtype",
                got=f"{name} of {parameter.dtype}",
                remedy='use sync="allreduce"',
            )
