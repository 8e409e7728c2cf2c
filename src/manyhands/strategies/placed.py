"""Placed strategy: pieces of a network are on devices chosen by the user or by cost; branches run in parallel.

Every rank calls the loss function. The rank with the network's output computes it; on other ranks it ends at the call
of the network, and backward starts with the gradients received from other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from ..core import DATA_AXES, Mean, StrategySpec, format_bytes
from ..distributed import World
from ..graph import Call, DrawCounter
from ..sync import Buckets, PolicyState, acting, make_policy
from .batch_stats import BatchStats
from .first_call import Loss, one_call
from .local_updates import own_part
from .mirrored import hash_of
from .partition_drawing import Outline, drawn
from .piece_parameters import Holding
from .piece_runner import Flow, Relay
from .placement import Partition, Placement
from .replica import Replica


def autocast_of(spec: StrategySpec, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory for the autocast context of a spec's precision."""
    if spec.precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


class OutputOnOtherRank(Exception):
    """Raised to end the loss function early: the network's output is on another rank."""


class PlacedReplica(Replica):
    """One rank's part of a network whose pieces are placed on several ranks."""

    def __init__(
        self,
        spec: StrategySpec,
        world: World,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        placement: Placement,
        holding: Holding | None = None,
    ) -> None:
        super().__init__(spec, world, model, optimizers)
        self.placement, self.holding = placement, holding or Holding()
        self.notes += self.holding.notes
        self.inner, self.outer = world.along(spec.axes, "stages"), world.along(spec.axes, "replicas")
        self.held = {key: self._held_of(group) for key, group in self.groups.items()}
        """The parameters, or shards of them, that this rank holds, by optimizer."""
        self._together = [axis for axis in spec.axes if axis != "replicas"]
        """The axes of the ranks that hold one network together."""
        self._policy = acting(make_policy(spec.sync), self.outer)
        self._buckets = {key: Buckets(g, self.outer, self._policy) for key, g in self.held.items() if g}
        for buckets in self._buckets.values():
            # Several pieces and micro-batches add to one gradient, so it is complete only at the end.
            buckets.deferred = True
        data = world.along(spec.axes, *DATA_AXES)
        self._stats = BatchStats(None, data) if spec.batch_stats != "local" and data.size > 1 else None
        self.holding.stats = self._stats
        self._clock = DrawCounter()
        self._relays: dict[int, tuple[Partition, Relay]] = {}
        self.flow: Flow | None = None
        self._partition: Partition | None = None
        self._has_called = False
        model.forward = MethodType(self._forward(), model)

    def _held_of(self, group: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        mine = {name: p for name, p in group.items() if self.placement.holds(name, self.inner.rank)}
        return {name: self.holding.part(parameter) for name, parameter in mine.items()}

    def _own_of(self, key: str) -> list[nn.Parameter]:
        """Return the network's original parameters of which this rank holds at least a part."""
        return [self.groups[key][name] for name in self.held[key]]

    # -- forward ---------------------------------------------------------------------------------------------------

    @property
    def has_answer(self) -> bool:
        """Whether this rank has the network's output and computes the loss."""
        return self.inner.rank == self.placement.end

    @property
    def reports_loss(self) -> bool:
        return self.has_answer and self.holding.reports_loss

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self.holding.scope():
            yield

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return False

    def loss(self, function: Loss, data: Any) -> Tensor | Mean:
        """Compute the loss of a micro-batch on the rank that has the output; return a zero loss on other ranks."""
        self._has_called = False
        try:
            value: Tensor | Mean = function(self.model, data)
        except OutputOnOtherRank:
            return self.nothing()
        return value

    def nothing(self) -> Tensor | Mean:
        """Return a zero loss of the task's kind, with zero weight."""
        zero = torch.zeros((), device=self.world.device)
        return Mean(zero, zero.double()) if self.placement.calling.counts else zero

    def _forward(self) -> Any:
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = Call.of(args, kwargs)
            if model.training and torch.is_grad_enabled():
                if self._has_called:
                    raise one_call(2)
                self._has_called = True
                return self._train(call)
            return self._answer(call)

        return forward

    def _train(self, call: Call) -> Any:
        """Run this rank's part of a training forward; return the output, or raise `OutputOnOtherRank`."""
        self.refresh()
        partition, relay = self.relay_for(call)
        self.holding.open()
        self.flow = flow = self._flow_of(call, 0)
        for piece in relay.pieces:
            result = relay.forward(flow, piece)
        flow.settle()
        self.buffers.put(flow.buffers)
        return self.answer_of(partition, flow, result)

    def answer_of(self, partition: Partition, flow: Flow, result: list[Tensor]) -> Any:
        """Return the network's output on the rank that has it; raise `OutputOnOtherRank` elsewhere."""
        if self.spec.deterministic:
            torch.default_generator.manual_seed(flow.start + partition.works.facts.num_draws)
        if not self.has_answer:
            raise OutputOnOtherRank
        # Not a leaf tensor, because a loss function may change its input in place.
        made = {name: tensor.view_as(tensor) for name, tensor in zip(partition.returned, result, strict=True)}
        return _filled(partition, made)

    def _answer(self, call: Call) -> Any:
        """Return the network's output on all ranks of the group, without gradients."""
        self.refresh()
        with torch.no_grad():
            partition, relay = self.relay_for(call)
            self.holding.open()
            flow = self._flow_of(call, 0)
            for piece in relay.pieces:
                result = relay.forward(flow, piece)
            made = {}
            for place, name in enumerate(partition.returned):
                value = partition.works.facts.values[name]
                empty = torch.empty(value.shape, dtype=value.dtype, device=self.world.device)
                made[name] = result[place].contiguous() if self.has_answer else empty
                self.inner.broadcast(made[name], self.placement.end)
            flow.settle()
            self.holding.shut()
        if self.spec.deterministic:
            torch.default_generator.manual_seed(flow.start + partition.works.facts.num_draws)
        if torch.is_grad_enabled():
            # Code that computes a loss in evaluation mode may check whether it requires a gradient.
            made = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in made.items()}
        return _filled(partition, made)

    def relay_for(self, call: Call) -> tuple[Partition, Relay]:
        """Return the partition for a call, and this rank's part of running it."""
        partition = self.placement.partition(call, training=self.model.training and torch.is_grad_enabled())
        if id(partition) not in self._relays:
            own = self.buffers.all_names
            relay = self.placement.relay(partition, self.inner, self._clock, self._substitute, self.holding, own)
            self._relays[id(partition)] = (partition, relay)
        self._partition = partition
        return self._relays[id(partition)]

    def refresh(self) -> None:
        """Rebuild the pieces if the network was changed since the last step."""
        if self.placement.refresh():
            self._relays.clear()

    def _flow_of(self, call: Call, number: int) -> Flow:
        return Flow(number, call.tensors, torch.default_generator.initial_seed() if self.spec.deterministic else 0)

    def _substitute(self, node: fx.Node, path: str) -> Any:
        """Return a replacement for batch norm (statistics over all replicas) or for a tensor-parallel layer."""
        is_norm = getattr(node.target, "_opname", "") == "batch_norm" and bool(node.args[5])
        normalise = self._stats.normalise if self._stats is not None and is_norm else None
        return self.holding.substitute(node, path) or normalise

    def set_padding(self, is_padding: bool) -> None:
        if self._stats is not None:
            self._stats.is_padding = is_padding

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        assert self.flow is not None
        assert self._partition is not None
        _, relay = self._relays[id(self._partition)]
        with self.holding.back():
            if self.has_answer:
                objective.backward()
            for piece in reversed(relay.pieces):
                relay.backward(self.flow, piece)
        self.flow.settle()
        self.flow = None

    def finish(self, key: str, count: Tensor | None) -> None:
        self.holding.collect(self._own_of(key))
        for own, held in zip(self._own_of(key), self.held[key].values(), strict=True):
            held.requires_grad_(own.requires_grad)
        if self.outer.size > 1 and key in self._buckets:
            self._buckets[key].refresh()
            self._buckets[key].pack()
            self._buckets[key].exchange()
            self._buckets[key].finish()
        self._add_tied(key)
        gradients = self._gradients(key)
        if count is not None and gradients:
            torch._foreach_div_(gradients, count.to(gradients[0].dtype))
        self.holding.link(self._own_of(key))

    def update(self, key: str, where: Tensor | None = None) -> None:
        super().update(key, where)
        self.holding.close()

    def forget(self) -> None:
        super().forget()
        self.holding.close()

    def _add_tied(self, key: str) -> None:
        """Sum gradients of weights that several ranks hold, in rank order, which gives bitwise equal results."""
        for number, name in enumerate(self.groups[key]):
            ranks, parameter = sorted(self.placement.holders[name]), self.held[key].get(name)
            if len(ranks) == 1 or parameter is None or not parameter.requires_grad:
                continue
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            own = own.contiguous()
            parts = {rank: torch.empty_like(own) for rank in ranks if rank != self.inner.rank}
            coming = [self.inner.start_receive(part, rank, number) for rank, part in parts.items()]
            going = [self.inner.start_send(own, rank, number) for rank in parts]
            for pending in (*coming, *going):
                pending.wait()
            parts[self.inner.rank] = own
            parameter.grad = torch.stack([parts[rank] for rank in ranks]).sum(0)

    def _gradients(self, key: str) -> list[Tensor]:
        return [p.grad for p in self.held[key].values() if p.grad is not None]

    def clip(self, key: str, max_norm: float) -> Tensor:
        """Clip the gradients to a norm that counts each weight once even if several ranks hold it; return the norm."""
        mine = [
            (p.grad, self.holding.copies(self.groups[key][name]))
            for name, p in self.held[key].items()
            if p.grad is not None and min(self.placement.holders[name]) == self.inner.rank
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if mine:
            squares = torch.stack(torch._foreach_norm([gradient for gradient, _ in mine])).double().square()
            total += (squares / torch.tensor([copies for _, copies in mine], device=squares.device)).sum()
        self.world.along(self.spec.axes, *self._together).all_reduce(total)
        norm = total.sqrt()
        gradients = self._gradients(key)
        if gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def is_finite(self, key: str) -> Tensor:
        fine = [gradient.isfinite().all() for gradient in self._gradients(key)]
        flag = torch.stack(fine).all() if fine else torch.ones((), dtype=torch.bool, device=self.world.device)
        flag = flag.to(torch.int64)
        self.world.along(self.spec.axes, *self._together).all_reduce(flag, "min")
        return flag > 0

    @property
    def num_bytes(self) -> int:
        return sum(buckets.num_bytes for buckets in self._buckets.values())

    # -- gathering and checkpoints ---------------------------------------------------------------------------------

    def gathered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Merge the nested dicts of all ranks of the group, broadcasting each tensor from a rank that holds it."""
        known = {**self._first_names(), **{name: name for name, _ in self.model.named_buffers()}}
        flat = dict(_flat(parts))
        for path, tensor in flat.items():
            if not tensor.is_meta:
                name = next((known[part] for part in reversed(path) if part in known), "")
                flat[path] = self.holding.whole(tensor, name)
        mine = {path: (tuple(t.shape), t.dtype) for path, t in flat.items() if not t.is_meta}
        every = self.inner.gather_objects(mine)
        for source, offered in enumerate(every):
            for path, (shape, dtype) in offered.items():
                if any(path in earlier for earlier in every[:source]):
                    continue
                tensor = flat.get(path)
                if source != self.inner.rank:
                    tensor = torch.empty(shape, dtype=dtype, device=self.world.device)
                assert tensor is not None
                tensor = tensor.detach().contiguous()
                self.inner.broadcast(tensor, source)
                _put(parts, path, tensor)
        return parts

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        return self.holding.whole(tensor, name)

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        return torch.empty_like(whole, device="meta") if like.is_meta else self.holding.part_for(whole, like, name)

    def policy_state(self) -> dict[str, Tensor]:
        if not self._policy.changes_mathematics:
            return {}
        state = PolicyState.joined(buckets.own_state() for buckets in self._buckets.values())
        whole = {name: self.holding.joined(part, name) for name, part in state.feedback.items()}
        return self.gathered(PolicyState(whole, state.shared, state.num_steps).gathered(self.outer).tensors())

    def own_policy_state(self) -> dict[str, Tensor]:
        if not self._policy.changes_mathematics:
            return {}
        return PolicyState.joined(buckets.own_state() for buckets in self._buckets.values()).tensors()

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        if not self._policy.changes_mathematics:
            return super().load_policy_state(saved)
        if not saved:
            return f"the checkpoint has no state of sync={self._policy}, which starts fresh"
        state = PolicyState.of(saved)
        if not state.is_own:
            mine = state.share(self.outer).feedback
            held = {name for group in self.held.values() for name in group}
            parts = {name: self.holding.shard_of(whole, name) for name, whole in mine.items() if name in held}
            state = PolicyState(parts, state.shared, state.num_steps).own()
        for buckets in self._buckets.values():
            buckets.load_state(state)
        return ""

    def align_buffers(self) -> None:
        data = self.world.along(self.spec.axes, *DATA_AXES)
        for buffer in self.model.buffers():
            if not buffer.is_meta:
                data.broadcast(own_part(buffer))

    def outline(self) -> Outline:
        """Return which pieces are on which device, and what is sent between them for the probed samples."""
        names = self.inner.gather_objects(str(self.inner.rank_info.device))
        assert self.placement.first is not None
        return drawn(str(self.spec), self.placement.first, self.placement, names)

    def hints(self) -> list[str]:
        found = [str(self.outline())]
        together = [f"{self.spec.axes[axis]} {axis}" for axis in ("shards", "tensor") if axis in self.spec.axes]
        if together:
            mine = sum(p.numel() * p.element_size() for group in self.held.values() for p in group.values())
            most = max(self.world.gather_objects(mine))
            found.append(
                f"each stage is held in parts, {' x '.join(together)}: at most {format_bytes(most)} of parameters "
                "a device"
            )
        return found

    def differences(self) -> list[str]:
        """Return the names of tensors of the same stage that differ between replicas."""
        every_one = (*self.model.named_parameters(), *self.model.named_buffers())
        named = {name: own_part(tensor.detach()) for name, tensor in every_one if not tensor.is_meta}
        found = []
        if named and self.outer.size > 1:
            gathered = self.outer.all_gather(torch.stack([hash_of(tensor) for tensor in named.values()]))
            same = (gathered == gathered[0]).all(0).tolist()
            found = [name for name, is_same in zip(named, same, strict=True) if not is_same]
        every = self.world.gather_objects(found)
        return [f"{name} (over the replicas)" for name in dict.fromkeys(name for names in every for name in names)]

    def close(self) -> None:
        for buckets in self._buckets.values():
            buckets.close()
        self._relays.clear()
        self.model.__dict__.pop("forward", None)


def _filled(partition: Partition, made: Mapping[str, Tensor]) -> Any:
    """Return the network's output; unused tensors in it are on the meta device, so that reading them raises."""
    leaves: list[Any] = []
    for output in partition.works.traced.outputs:
        if not isinstance(output, fx.Node):
            leaves.append(output)
        elif output.name in partition.works.facts.numbers:
            leaves.append(partition.works.facts.numbers[output.name])
        elif output.name in made:
            leaves.append(made[output.name])
        else:
            value = partition.works.facts.values[output.name]
            leaves.append(torch.empty(value.shape, dtype=value.dtype, device="meta"))
    return partition.works.traced.answer.filled(leaves)


def _flat(nested: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    for key, value in nested.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        elif isinstance(value, dict):
            yield from _flat(value, (*path, key))


def _put(nested: dict[str, Any], path: tuple[str, ...], value: Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value
