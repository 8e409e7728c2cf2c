"""Local: a replica per device that trains by itself and agrees with the others now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..cluster import NullWorld, World
from ..core import StrategySpec
from ..sync import Agreement, Local, State, average, make_policy
from .mirrored import MirroredReplica, odd_ones
from .replica import Replica


def replicated(
    spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]
) -> LocalReplica | MirroredReplica:
    """One of several whole networks, as its policy needs it."""
    kind = LocalReplica if isinstance(make_policy(spec.sync), Local) else MirroredReplica
    return kind(spec, world, model, optimizers)


class LocalReplica(Replica):
    """One of several replicas that go apart and become one again. Batch statistics are each replica's own meanwhile."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        policy = make_policy(spec.sync)
        assert isinstance(policy, Local)
        self._policy = policy
        self.group = NullWorld(world.seat.device, world.line)
        first = next(iter(self.groups))
        self._agreements = {
            key: Agreement(policy, world, group, model.buffers if key == first else list)
            for key, group in self.groups.items()
        }

    @property
    def drifts(self) -> bool:
        return True

    @property
    def agrees(self) -> bool:
        return all(agreement.is_reached for agreement in self._agreements.values())

    @property
    def records_exchange(self) -> bool:
        # There is none within a step.
        return True

    @property
    def num_bytes(self) -> int:
        return sum(agreement.num_bytes for agreement in self._agreements.values())

    def note(self, key: str, row: Tensor) -> bool:
        return self._agreements[key].note(row)

    def meet(self, key: str) -> None:
        self._agreements[key].meet()

    @torch.no_grad()
    def join(self, others: Iterable[Tensor] = ()) -> None:
        average(self.world, [*common_slots(self.world, self), *others])

    def load(self, whole: Mapping[str, Tensor], *, strict: bool = True) -> None:
        super().load(whole, strict=strict)
        for agreement in self._agreements.values():
            agreement.restart()

    def policy_state(self) -> dict[str, Tensor]:
        joined = State.joined(agreement.state() for agreement in self._agreements.values())
        return joined.gathered(self.world).tensors()

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        if not saved:
            return f"the checkpoint knows nothing of sync={self._policy}: it starts anew"
        for agreement in self._agreements.values():
            agreement.take_over(State.of(saved).share(self.world))
        return ""

    def align_buffers(self) -> None:
        for buffer in self.model.buffers():
            self.world.broadcast(buffer)

    def differences(self) -> list[str]:
        """Compares a hash of every tensor where the replicas agree."""
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        return odd_ones(self.world, named) if self.agrees else []


def common_slots(world: World, replica: Replica) -> list[Tensor]:
    """The slots of the optimizers that every replica has, in one order: one that was not used may lack some."""
    found = {
        (key, replica.names[parameter], slot): value
        for key, optimizer in replica.optimizers.items()
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }
    common = set.intersection(*(set(names) for names in world.gather_objects(list(found))))
    return [found[name] for name in sorted(common)]
