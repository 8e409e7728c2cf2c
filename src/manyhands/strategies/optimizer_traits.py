"""Optimizer traits: what an update depends on, found by trying it on small tensors.

An elementwise update runs on a rank's own shard of each parameter. An update that reads rows, columns or norms, as
Adafactor's and Muon's, needs whole tensors, and one that draws random numbers needs the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategyError, each_of, nested_in, random_state, restore_random_state
from ..distributed import World
from .local_updates import BY_ELEMENT, on_own_parts

if TYPE_CHECKING:
    from .replica import Replica


@dataclass(frozen=True)
class Traits:
    """What an optimizer's update of an element depends on."""

    by_element: bool = True
    """Whether the update depends only on the element's own value, gradient and state."""
    by_tensor: bool = True
    """Whether the update depends only on values of the element's own tensor."""
    draws: bool = False
    """Whether the update draws random numbers."""


_known: WeakKeyDictionary[Optimizer, Traits] = WeakKeyDictionary()


def traits_of(optimizer: Optimizer) -> Traits:
    """Return the traits of an optimizer with its settings; those of torch's element-wise ones are known."""
    if type(optimizer) in BY_ELEMENT or nested_in(optimizer):
        # A step of an optimizer with nested ones would update the network itself, so the nested ones are tried instead.
        return Traits()
    if optimizer not in _known:
        _known[optimizer] = _tried(optimizer)
    return _known[optimizer]


def _tried(optimizer: Optimizer) -> Traits:
    # The parameter servers try optimizers in the same way; their package is slow to import.
    from .served.update import draws_numbers, is_by_element, is_by_tensor

    states = random_state(torch.device("cpu"))
    try:
        return Traits(is_by_element(optimizer), is_by_tensor(optimizer), draws_numbers(optimizer))
    finally:
        restore_random_state(states, torch.device("cpu"))


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that take an optimizer's step: its members, and those that each of them keeps inside."""
    every = []
    for member in each_of(optimizer):
        every += [member, *(found for inner in nested_in(member).values() for found in inner_optimizers(inner))]
    return every


def require_in_stages(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose update needs tensors of stages on other ranks."""
    for found in inner_optimizers(optimizer):
        traits = traits_of(found)
        if traits.draws or not traits.by_tensor:
            what = "draws random numbers" if traits.draws else "updates a tensor by what others are"
            raise StrategyError(
                "where ranks hold different parts of a network, an optimizer updates every tensor by itself",
                got=f"{type(found).__name__}, which {what}",
                remedy="use mh.Mirrored() or mh.Sharded(), or an optimizer such as torch.optim.AdamW",
            )


@contextmanager
def stepping(replica: Replica, optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer the tensors that its update needs inside this context: local shards, or whole tensors."""
    with ExitStack() as scope:
        every = inner_optimizers(optimizer)
        if any(traits_of(found).draws for found in every):
            scope.enter_context(_same_draws(replica.world))
        for found in every:
            if nested_in(found):
                continue
            traits = traits_of(found)
            is_split = any(_is_parted(p) for group in found.param_groups for p in group["params"])
            if is_split and not traits.by_element:
                scope.enter_context(_on_wholes(replica, found))
            else:
                scope.enter_context(on_own_parts(found, by_element=traits.by_element))
        yield


@contextmanager
def _same_draws(world: World) -> Iterator[None]:
    """Use the first rank's random numbers on all ranks inside this context; afterwards each continues with its own."""
    if world.size == 1:
        yield
        return
    own = random_state(world.device)
    common = {name: state.to(world.device) for name, state in own.items()}
    for state in common.values():
        world.broadcast(state.contiguous())
    restore_random_state({name: state.cpu() for name, state in common.items()}, world.device)
    try:
        yield
    finally:
        if not world.is_first:
            restore_random_state(own, world.device)


@contextmanager
def _on_wholes(replica: Replica, optimizer: Optimizer) -> Iterator[None]:
    """Make an optimizer's parameters, gradients and state whole on every rank inside this context."""
    groups, state = optimizer.param_groups, optimizer.state
    held = [group["params"] for group in groups]
    parted = [p for parameters in held for p in parameters if _is_parted(p)]
    wholes = {parameter: _whole(replica, parameter) for parameter in parted}
    for parameter, whole in wholes.items():
        name = replica.names[parameter]
        slots = state.pop(parameter, {})
        if slots:
            state[whole] = {key: _gathered(replica, slot, name) for key, slot in slots.items()}
    for group in groups:
        group["params"] = [wholes.get(parameter, parameter) for parameter in group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters
        with torch.no_grad():
            for parameter, whole in wholes.items():
                name = replica.names[parameter]
                parameter.copy_(replica.part_for(whole.detach(), parameter, name))
                slots = state.pop(whole, {})
                if slots:
                    state[parameter] = {key: _kept(replica, slot, parameter, name) for key, slot in slots.items()}


def _whole(replica: Replica, parameter: nn.Parameter) -> nn.Parameter:
    name = replica.names[parameter]
    whole = nn.Parameter(replica.whole(parameter.detach(), name).clone(), parameter.requires_grad)
    whole.grad = None if parameter.grad is None else replica.whole(parameter.grad, name)
    return whole


def _gathered(replica: Replica, slot: Any, name: str) -> Any:
    return replica.whole(slot, name) if isinstance(slot, Tensor) else slot


def _kept(replica: Replica, slot: Any, parameter: nn.Parameter, name: str) -> Any:
    has_all = isinstance(slot, Tensor) and slot.shape == parameter.shape and parameter.dim() > 0
    return replica.part_for(slot, parameter, name) if has_all else slot


def _is_parted(parameter: Tensor) -> bool:
    return hasattr(parameter, "_local_tensor")
