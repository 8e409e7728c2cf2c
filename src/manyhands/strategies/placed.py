"""Placed: a network whose parts are on the devices that a person, or what they cost, says. Branches run side by side.

Every rank calls the loss. Where the network's answer is, the loss is computed; on the other ranks it ends at the call
of the network, and backward begins with the gradients that come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from ..core import DATA_AXES, Mean, StrategySpec
from ..distributed import World
from ..graph import Call, DrawCounter
from ..sync import Buckets, PolicyState, acting, make_policy
from .batch_stats import BatchStats
from .local_updates import own_part
from .mirrored import hash_of
from .partition_drawing import Outline, drawn
from .piece_parameters import Holding
from .piece_runner import Flow, Relay
from .placement import Cut, Loss, Placement, one_call
from .replica import Replica
from .split_table import size_text


def autocast_of(spec: StrategySpec, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Where a network is computed in the precision of a spec."""
    if spec.precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


class OutputOnOtherRank(Exception):
    """The network's answer is on another rank, so the loss ends here."""


class PlacedReplica(Replica):
    """A rank's part of a network that is cut."""

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
        """What this rank holds of parameters, by optimizer."""
        self._together = [axis for axis in spec.axes if axis != "replicas"]
        """The axes of the ranks that hold one network together."""
        self._policy = acting(make_policy(spec.sync), self.outer)
        self._buckets = {key: Buckets(g, self.outer, self._policy) for key, g in self.held.items() if g}
        for buckets in self._buckets.values():
            # Several pieces and micro-batches add to one gradient, so it is complete at the end only.
            buckets.deferred = True
        data = world.along(spec.axes, *DATA_AXES)
        self._stats = BatchStats(None, data) if spec.batch_stats != "local" and data.size > 1 else None
        self.holding.stats = self._stats
        self._clock = DrawCounter()
        self._relays: dict[int, tuple[Cut, Relay]] = {}
        self.flow: Flow | None = None
        self._cut: Cut | None = None
        self._has_called = False
        model.forward = MethodType(self._forward(), model)

    def _held_of(self, group: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        mine = {name: p for name, p in group.items() if self.placement.holds(name, self.inner.rank)}
        return {name: self.holding.part(parameter) for name, parameter in mine.items()}

    def _own_of(self, key: str) -> list[nn.Parameter]:
        """The network's own parameters that this rank holds something of."""
        return [self.groups[key][name] for name in self.held[key]]

    # -- forward ---------------------------------------------------------------------------------------------------

    @property
    def has_answer(self) -> bool:
        """Whether the loss is computed here."""
        return self.inner.rank == self.placement.end

    @property
    def speaks(self) -> bool:
        return self.has_answer and self.holding.speaks

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self.holding.scope():
            yield

    @property
    def is_recordable(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return False

    def loss(self, function: Loss, data: Any) -> Tensor | Mean:
        """The loss of a micro-batch where it is computed; on other ranks one that weighs nothing."""
        self._has_called = False
        try:
            value: Tensor | Mean = function(self.model, data)
        except OutputOnOtherRank:
            return self.nothing()
        return value

    def nothing(self) -> Tensor | Mean:
        """A loss of the task's kind that weighs nothing."""
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
        """Takes part in a forward for training; the answer where it is, else the end of the loss."""
        self.refresh()
        cut, relay = self.relay_for(call)
        self.holding.open()
        self.flow = flow = self._flow_of(call, 0)
        for piece in relay.pieces:
            result = relay.forward(flow, piece)
        flow.settle()
        self.buffers.put(flow.buffers)
        return self.answer_of(cut, flow, result)

    def answer_of(self, cut: Cut, flow: Flow, result: list[Tensor]) -> Any:
        """What the network returns, on the rank that has it."""
        if self.spec.deterministic:
            torch.default_generator.manual_seed(flow.start + cut.works.facts.num_draws)
        if not self.has_answer:
            raise OutputOnOtherRank
        # Not a leaf: a loss may change what it is given in place.
        made = {name: tensor.view_as(tensor) for name, tensor in zip(cut.returned, result, strict=True)}
        return _filled(cut, made)

    def _answer(self, call: Call) -> Any:
        """The network's answer on all ranks of the group, without a way back."""
        self.refresh()
        with torch.no_grad():
            cut, relay = self.relay_for(call)
            self.holding.open()
            flow = self._flow_of(call, 0)
            for piece in relay.pieces:
                result = relay.forward(flow, piece)
            made = {}
            for place, name in enumerate(cut.returned):
                value = cut.works.facts.values[name]
                empty = torch.empty(value.shape, dtype=value.dtype, device=self.world.device)
                made[name] = result[place].contiguous() if self.has_answer else empty
                self.inner.broadcast(made[name], self.placement.end)
            flow.settle()
            self.holding.shut()
        if self.spec.deterministic:
            torch.default_generator.manual_seed(flow.start + cut.works.facts.num_draws)
        if torch.is_grad_enabled():
            # Who looks at a loss in evaluation mode asks whether it has a gradient.
            made = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in made.items()}
        return _filled(cut, made)

    def relay_for(self, call: Call) -> tuple[Cut, Relay]:
        """The cut for a call, and what this rank does of it."""
        cut = self.placement.cut(call, training=self.model.training and torch.is_grad_enabled())
        if id(cut) not in self._relays:
            own = self.buffers.all_names
            relay = self.placement.relay(cut, self.inner, self._clock, self._substitute, self.holding, own)
            self._relays[id(cut)] = (cut, relay)
        self._cut = cut
        return self._relays[id(cut)]

    def refresh(self) -> None:
        """Follows what was changed in the network since the last step."""
        if self.placement.refresh():
            self._relays.clear()

    def _flow_of(self, call: Call, number: int) -> Flow:
        return Flow(number, call.tensors, torch.default_generator.initial_seed() if self.spec.deterministic else 0)

    def _substitute(self, node: fx.Node, path: str) -> Any:
        """Batch statistics over the replicas in the place of a rank's own, and layers that ranks compute together."""
        is_norm = getattr(node.target, "_opname", "") == "batch_norm" and bool(node.args[5])
        normalise = self._stats.normalise if self._stats is not None and is_norm else None
        return self.holding.substitute(node, path) or normalise

    def ghost(self, is_ghost: bool) -> None:
        if self._stats is not None:
            self._stats.is_ghost = is_ghost

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        assert self.flow is not None
        assert self._cut is not None
        _, relay = self._relays[id(self._cut)]
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
        """Sums the gradients of weights that several ranks hold, in the order of ranks: equal bits on all."""
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
        """A weight that several ranks hold counts once."""
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

    # -- whole -----------------------------------------------------------------------------------------------------

    def gathered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Nested dicts of all ranks of the group as one, with the tensors of whoever holds them."""
        known = {*self.names.values(), *(name for name, _ in self.model.named_buffers())}
        flat = dict(_flat(parts))
        for path, tensor in flat.items():
            if not tensor.is_meta:
                name = next((part for part in reversed(path) if part in known), "")
                flat[path] = self.holding.whole(tensor, name)
        mine = {path: (tuple(t.shape), t.dtype) for path, t in flat.items() if not t.is_meta}
        every = self.inner.gather_objects(mine)
        for source, theirs in enumerate(every):
            for path, (shape, dtype) in theirs.items():
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
            return f"the checkpoint knows nothing of sync={self._policy}: it starts anew"
        state = PolicyState.of(saved)
        if not state.is_own:
            mine = state.share(self.outer).feedback
            held = {name for group in self.held.values() for name in group}
            parts = {name: self.holding.cut(whole, name) for name, whole in mine.items() if name in held}
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
        """Which parts are where, and what crosses for the rows that were looked at."""
        names = self.inner.gather_objects(str(self.inner.seat.device))
        assert self.placement.first is not None
        return drawn(str(self.spec), self.placement.first, self.placement, names)

    def hints(self) -> list[str]:
        found = [str(self.outline())]
        together = [f"{self.spec.axes[axis]} {axis}" for axis in ("shards", "tensor") if axis in self.spec.axes]
        if together:
            mine = sum(p.numel() * p.element_size() for group in self.held.values() for p in group.values())
            most = max(self.world.gather_objects(mine))
            found.append(
                f"each stage is held in parts, {' x '.join(together)}: at most {size_text(most)} of parameters a device"
            )
        return found

    def differences(self) -> list[str]:
        """Compares what ranks of different replicas hold of the same stage."""
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


def _filled(cut: Cut, made: Mapping[str, Tensor]) -> Any:
    """The network's answer; what nobody looks at is without values, so that looking at it all the same is an error."""
    leaves: list[Any] = []
    for output in cut.works.traced.outputs:
        if not isinstance(output, fx.Node):
            leaves.append(output)
        elif output.name in cut.works.facts.numbers:
            leaves.append(cut.works.facts.numbers[output.name])
        elif output.name in made:
            leaves.append(made[output.name])
        else:
            value = cut.works.facts.values[output.name]
            leaves.append(torch.empty(value.shape, dtype=value.dtype, device="meta"))
    return cut.works.traced.answer.filled(leaves)


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
