"""TensorParallel: a replica whose layers are computed by several ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ...core import StrategySpec
from ...distributed import World
from ..batch_stats import BatchStats
from ..recompute import keep_all
from ..sharded import ShardedReplica
from .axis import WHOLE, Axis, in_tensors
from .glue import glued, plain
from .layout import Layout, dress
from .operators import run_whole


class TensorSharding:
    """A network that is split along the tensor axis: its layout, and the forwards attached to its layers."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, layout: Layout) -> None:
        self.axis = Axis(world.mesh(spec.axes)["tensor"])
        self.ranks = world.along(spec.axes, "tensor")
        self.layout = layout
        run_whole(layout.operators)
        self.sections = _under_every_name(self.layout.sections(model), model)
        self._take_off: Callable[[], None] = _nothing

    def apply(self, model: nn.Module) -> None:
        """Replace every parameter by this rank's shard, and let layers compute on shards."""
        self.shard(model)
        self._take_off = dress(model, self.axis, self.layout)

    def shard(self, model: nn.Module) -> None:
        """Replace every parameter that has values by this rank's shard."""
        placements = self.layout.placements(model)
        made: dict[Any, nn.Parameter] = {}
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            if tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                if tensor not in made or name in placements:
                    parted = self.part(tensor.detach(), name, placements)
                    made[tensor] = nn.Parameter(parted, requires_grad=tensor.requires_grad)
            elif name in placements:
                module._buffers[last] = self.part(tensor, name, placements)
        for module in model.modules():
            for last, held in module._parameters.items():
                if held is not None and held in made:
                    module._parameters[last] = made[held]

    def part(self, whole: Tensor, name: str, placements: Mapping[str, Any]) -> DTensor:
        """Return this rank's shard of a tensor that all ranks have."""
        place = placements.get(name, WHOLE)
        if not isinstance(place, Shard):
            return self.axis.of(whole.clone(), WHOLE)
        begin, count = self.axis.span(whole.shape[place.dim])
        ordered = reorder(whole, place.dim, self.sections.get(name), self.axis.size)
        local = ordered.narrow(place.dim, begin, count).clone(memory_format=torch.contiguous_format)
        return self.axis.sharded(local, place.dim, whole.shape[place.dim])

    def completed(self, parameters: Sequence[Any]) -> list[Tensor]:
        """Return this rank's shards of gradients; partial sums are reduced over the ranks in one collective."""
        found: dict[int, Tensor] = {}
        terms: list[tuple[int, Tensor]] = []
        for place, parameter in enumerate(parameters):
            gradient, placements = parameter.grad, parameter.placements
            if placements[0] == WHOLE and gradient.placements[0].is_partial():
                terms.append((place, gradient.to_local()))
            else:
                found[place] = gradient.redistribute(placements=placements).to_local()
        if terms:
            flat = torch.cat([part.flatten() for _, part in terms])
            self.ranks.all_reduce(flat)
            sums = flat.split([part.numel() for _, part in terms])
            found |= {place: whole.view_as(part) for (place, part), whole in zip(terms, sums, strict=True)}
        return [found[place] for place in range(len(parameters))]

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the network and its loss are computed."""
        return glued(self.axis)

    def take_off(self) -> None:
        """Restore the layers' original forward."""
        self._take_off()


class TensorReplica(ShardedReplica):
    """One rank's part of a network with tensor-parallel layers, optionally combined with shards and replicas."""

    def __init__(
        self,
        spec: StrategySpec,
        world: World,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        sharding: TensorSharding,
        stats: BatchStats | None,
    ) -> None:
        super().__init__(spec, world, model, optimizers, stats)
        self._sharding = sharding
        self.notes = sharding.layout.notes

    @property
    def reports_loss(self) -> bool:
        return self._sharding.ranks.is_first

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self._sharding.scope():
            yield

    def plain(self, value: Any) -> Any:
        return in_tensors(partial(plain, self._sharding.axis), value)

    def backward(self, objective: Tensor, key: str, *, last: bool) -> None:
        with self._sharding.scope():
            super().backward(objective, key, last=last)

    def finish(self, key: str, count: Tensor | None) -> None:
        self._complete(key)
        super().finish(key, count)

    def _complete(self, key: str) -> None:
        """Sum gradients of which each rank has a partial sum, in one collective."""
        odd: list[Any] = [
            p for p in self.groups[key].values() if p.grad is not None and _placements(p.grad) != _placements(p)
        ]
        terms = []
        for parameter in odd:
            # Iterate in the order of the group, because every rank must run the collectives in the same order.
            if parameter.placements[-1] == WHOLE and parameter.grad.placements[-1].is_partial():
                terms.append(parameter)
            else:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if not terms:
            return
        parts = [parameter.grad.to_local() for parameter in terms]
        flat = torch.cat([part.flatten() for part in parts])
        self._sharding.ranks.all_reduce(flat)
        for parameter, part, whole in zip(terms, parts, flat.split([part.numel() for part in parts]), strict=True):
            settings = {"shape": parameter.shape, "stride": parameter.stride()}
            local = whole.view_as(part)
            parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **settings)

    def whole(self, tensor: Tensor, name: str = "") -> Tensor:
        whole = super().whole(tensor, name)
        sections = self._sharding.sections.get(name)
        if sections is None or whole.dim() == 0 or not isinstance(tensor, DTensor):
            return whole
        return reorder(whole, self._dim(tensor), sections, self._sharding.axis.size, back=True)

    def part_for(self, whole: Tensor, like: Tensor, name: str = "") -> Tensor:
        sections = self._sharding.sections.get(name)
        if sections is not None and isinstance(like, DTensor) and whole.shape == like.shape:
            whole = reorder(whole, self._dim(like), sections, self._sharding.axis.size)
        return super().part_for(whole, like, name)

    @staticmethod
    def _dim(tensor: DTensor) -> int:
        place = tensor.placements[-1]
        assert isinstance(place, Shard), "only sharded parameters have sections"
        return place.dim

    def differences(self) -> list[str]:
        """Return tensors that differ between replicas or between ranks of the tensor axis that should hold the same."""
        named: dict[str, Any] = dict(self.model.named_parameters())
        common = {name: p.to_local() for name, p in named.items() if p.placements[-1] == WHOLE}
        return [*super().differences(), *self.odd_over(self._sharding.ranks, common, "over the tensor axis")]

    def close(self) -> None:
        keep_all(self.model)
        self._sharding.take_off()
        super().close()


def _under_every_name(sections: Mapping[str, Sequence[int]], model: nn.Module) -> dict[str, Sequence[int]]:
    """Return sections with those of parameters that have several names under each name, as in a state dict."""
    named = list(model.named_parameters(remove_duplicate=False))
    found = {parameter: sections[name] for name, parameter in named if name in sections}
    return {**sections, **{name: found[parameter] for name, parameter in named if parameter in found}}


def _nothing() -> None:
    """Do nothing: there is nothing to remove from the network."""


def _placements(tensor: Any) -> Any:
    return tensor.placements


def reorder(whole: Tensor, dim: int, sections: Sequence[int] | None, size: int, *, back: bool = False) -> Tensor:
    """Reorder so that an even split gives each rank its part of every section; `back` undoes it.

    >>> reorder(torch.arange(8), 0, [4, 4], 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    >>> reorder(reorder(torch.arange(8), 0, [4, 4], 2), 0, [4, 4], 2, back=True).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if sections is None:
        return whole
    places = torch.arange(whole.shape[dim], device=whole.device).split(list(sections))
    order = torch.cat([part.chunk(size)[rank] for rank in range(size) for part in places])
    return whole.index_select(dim, order.argsort() if back else order)
