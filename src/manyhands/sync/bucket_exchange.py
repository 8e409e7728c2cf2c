"""The exchange of a flat gradient under a policy: warm-up, error feedback, rounds, and error measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core import TaskError, event, format_bytes
from ..distributed import Pending, World
from .hierarchical import HierarchicalSum
from .policy import Policy, PolicyCollectives
from .policy_memory import PolicyMemory

STEPS, OWN = "steps", "own"


@dataclass
class PolicyState:
    """The state of a sync policy by parameter name, independent of how parameters are assigned to buckets."""

    feedback: dict[str, Tensor] = field(default_factory=dict)
    """Error feedback (not sent yet) by parameter: one replica's, or that of all replicas, stacked in rank order."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Other state of the policy, equal on all replicas."""
    num_steps: int = 0
    """Number of steps under the policy, including its warm-up."""
    is_own: bool = False
    """Whether `feedback` is that of the replica that holds this state, without that of the other replicas."""

    @classmethod
    def joined(cls, states: Iterable[PolicyState]) -> PolicyState:
        """Return one state with the parameters of several buckets' states."""
        whole = cls()
        for state in states:
            whole.feedback |= state.feedback
            whole.shared |= state.shared
            whole.num_steps = max(whole.num_steps, state.num_steps)
            whole.is_own = state.is_own
        return whole

    def own(self) -> PolicyState:
        """Return a copy that is marked by `is_own` as the state of this replica only."""
        return replace(self, is_own=True)

    def gathered(self, world: World) -> PolicyState:
        """Return the state with the error feedback of all replicas, stacked; every replica must call it.

        Feedback is gathered one parameter at a time, and only rank 0 keeps it.
        """
        kept = {}
        for name, tensor in self.feedback.items():
            stacked = world.all_gather(tensor)
            if world.is_first:
                kept[name] = stacked.cpu()
        return PolicyState(kept, self.shared, self.num_steps)

    def share(self, world: World) -> PolicyState:
        """Return the state with this replica's feedback: its row of the stacked feedback of all replicas.

        If the number of replicas has changed, every replica gets an equal share of the summed feedback.
        """
        if self.is_own:
            return self

        def mine(stacked: Tensor) -> Tensor:
            return stacked[world.rank] if len(stacked) == world.size else stacked.sum(0) / world.size

        return PolicyState(
            {name: mine(stacked) for name, stacked in self.feedback.items()}, self.shared, self.num_steps
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors under flat names, for a checkpoint."""
        feedback = {f"feedback/{name}": tensor for name, tensor in self.feedback.items()}
        shared = {f"shared/{name}": tensor for name, tensor in self.shared.items()}
        own = {OWN: torch.tensor(True)} if self.is_own else {}
        return {STEPS: torch.tensor(self.num_steps), **own, **feedback, **shared}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PolicyState:
        """Return the state from tensors under flat names, a result of the method `tensors`.

        >>> PolicyState.of(PolicyState({"w": torch.ones(1, 2)}, {}, 3).tensors())
        PolicyState(feedback={'w': tensor([[1., 1.]])}, shared={}, num_steps=3, is_own=False)
        """
        state = cls(num_steps=int(tensors[STEPS]), is_own=OWN in tensors)
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if rest:
                getattr(state, kind)[rest] = tensor
        return state


def with_own_feedback(shared: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of `shared`, such as another replica's, with the error feedback of `mine`.

    All three are tensors under flat names, as `PolicyState.tensors` returns them. `mine` may be empty.
    """
    own = PolicyState.of(mine).feedback if mine else {}
    return replace(PolicyState.of(shared), feedback=own).tensors()


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
            self._waits_for = self._wire.all_reduce(flat)
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
