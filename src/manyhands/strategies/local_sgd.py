"""Local SGD: a replica per device trains independently and is synchronized periodically."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec
from ..distributed import NullWorld, World
from ..sync import Agreement, AllReduce, Buckets, Local, PolicyState, acting, average, make_policy
from .batch_stats import BatchStats
from .mirrored import MirroredReplica, comparable, odd_ones
from .replica import Replica


def replicated(
    spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]
) -> LocalReplica | MirroredReplica:
    """Return the replica class that the policy needs: local SGD or mirrored."""
    kind = LocalReplica if isinstance(acting(make_policy(spec.sync), world), Local) else MirroredReplica
    return kind(spec, world, model, optimizers)


class LocalReplica(Replica):
    """One of several replicas that train independently and are averaged periodically; batch statistics stay local.

    If whole hosts run local SGD, the ranks of a host stay synchronized: they sum gradients and share batch statistics.
    """

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        policy = make_policy(spec.sync)
        assert isinstance(policy, Local)
        self._policy = policy
        others = world
        self.group = NullWorld(world.rank_info.device, world.channel)
        if policy.between == "hosts":
            self.group, others = world.by_hosts()
        is_alone = self.group.size == 1
        self._buckets = {} if is_alone else {k: Buckets(g, self.group, AllReduce()) for k, g in self.groups.items()}
        self._stats = BatchStats(model, self.group) if spec.batch_stats != "local" and not is_alone else None
        first = next(iter(self.groups))
        self._agreements = {
            key: Agreement(policy, others, group, model.buffers if key == first else list)
            for key, group in self.groups.items()
        }

    def set_padding(self, is_padding: bool) -> None:
        if self._stats is not None:
            self._stats.is_padding = is_padding

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        if last and key in self._buckets:
            self._buckets[key].refresh()
            self._buckets[key].arm()
        super().backward(objective, key, last=last)

    def finish(self, key: str, count: Tensor | None) -> None:
        if key in self._buckets:
            self._buckets[key].finish()
        super().finish(key, count)

    @property
    def is_capturable(self) -> bool:
        return not self._buckets

    @property
    def is_local(self) -> bool:
        return self._stats is None or not self._stats.layers

    @property
    def is_local_sgd(self) -> bool:
        return True

    @property
    def agrees(self) -> bool:
        return all(agreement.is_reached for agreement in self._agreements.values())

    @property
    def records_exchange(self) -> bool:
        # A local step has no exchange.
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
        joined = PolicyState.joined(agreement.state() for agreement in self._agreements.values())
        return joined.gathered(self.world).tensors()

    def own_policy_state(self) -> dict[str, Tensor]:
        return PolicyState.joined(agreement.state().own() for agreement in self._agreements.values()).tensors()

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        if not saved:
            return f"the checkpoint has no state of sync={self._policy}, which starts fresh"
        for agreement in self._agreements.values():
            agreement.take_over(PolicyState.of(saved).share(self.world))
        return ""

    def align_buffers(self) -> None:
        for buffer in self.model.buffers():
            self.world.broadcast(buffer)

    def differences(self) -> list[str]:
        """Return the tensors whose hashes differ between replicas, if the replicas are synchronized now."""
        # Hosts average their statistics; those of the ranks within a host may still differ.
        has_own_stats = self.spec.batch_stats == "local" and self.group.size > 1
        return (
            odd_ones(self.world, comparable(self.model, self.world, has_own_stats=has_own_stats)) if self.agrees else []
        )

    def close(self) -> None:
        for buckets in self._buckets.values():
            buckets.close()
        if self._stats is not None:
            self._stats.close()


def common_slots(world: World, replica: Replica) -> list[Tensor]:
    """Return the optimizer slots that every replica has, in the same order; an unused parameter may lack some."""
    found = {
        (key, replica.names[parameter], slot): value
        for key, optimizer in replica.optimizers.items()
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }
    common = set.intersection(*(set(names) for names in world.gather_objects(list(found))))
    return [found[name] for name in sorted(common)]
