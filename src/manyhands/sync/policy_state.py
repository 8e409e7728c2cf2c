"""PolicyState: the state of a sync policy by parameter, for checkpoints and for other buckets or replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..distributed import World

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
