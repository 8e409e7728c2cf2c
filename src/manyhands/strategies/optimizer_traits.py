"""Optimizer traits: what an update depends on, found by trying it on small tensors.

An elementwise update runs on a rank's own shard of each parameter. An update that reads rows, columns or norms, as
Adafactor's and Muon's, needs whole tensors, and one that draws random numbers needs the same numbers on every rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategyError, each_of, nested_in, parameters_of, random_state, restore_random_state
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


FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of an optimizer that cannot handle the tensors it is tried on."""
NUM_STEPS = 26
"""Number of steps that show whether an optimizer is elementwise; some do something else in every tenth one, say."""
_known: WeakKeyDictionary[Optimizer, Traits] = WeakKeyDictionary()


def traits_of(optimizer: Optimizer) -> Traits:
    """Return the traits of an optimizer with its settings; those of torch's element-wise ones are known."""
    if type(optimizer) in BY_ELEMENT or nested_in(optimizer):
        # A step of an optimizer with nested ones would update the network itself, so the nested ones are tried instead.
        return Traits()
    if optimizer not in _known:
        _known[optimizer] = _found_traits(optimizer)
    return _known[optimizer]


def _found_traits(optimizer: Optimizer) -> Traits:
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
                "where ranks hold different parts of a network, an optimizer must update every tensor independently",
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


def _kinds(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return one parameter group of each kind of settings; the learning rate does not change what an update reads."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        kinds.setdefault(repr(settings), group)
    return list(kinds.values())


def is_by_element(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates every element independently, found by trying it."""
    return all(_agree(optimizer, group, _halves) for group in _kinds(optimizer))


def is_by_tensor(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates every tensor independently, found by trying it."""
    return all(_agree(optimizer, group, _alone) for group in _kinds(optimizer))


def draws_numbers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer draws random numbers from torch's generator, found by trying it."""
    return any(_draws(optimizer, group) for group in _kinds(optimizer))


def updates_own_tensors(optimizer: Optimizer) -> bool:
    """Return whether steps change the tensors in each of an optimizer's groups, found by trying it."""
    return all(_moves(optimizer, group) for group in _kinds(optimizer))


def _moves(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether steps change the tensors in the optimizer's group, or fail on them."""
    found = _tried(optimizer, group)
    return found is None or not all(torch.equal(after, before) for before, after in zip(*found, strict=True))


def odd_slots(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's slots that are neither tensors nor numbers, found by trying it."""
    found: set[str] = set()
    start, *gradients = _samples()
    for group in _kinds(optimizer):
        slots: list[dict[str, Any]] = []
        with contextlib.suppress(*FAILURES):
            _walk(optimizer, group, start, gradients, slots)
        found |= {
            key
            for own in slots
            for key, value in own.items()
            if value is not None and not isinstance(value, (Tensor, Number))
        }
    return sorted(found)


def stateless_copy(optimizer: Optimizer, *, has_values: bool = True) -> Optimizer:
    """Return another optimizer of the same kind and settings, without state.

    Its attributes, such as a generator or averages, are copies, so its steps do not change the original. Without
    `has_values`, parameters in attributes, such as those of layers, are on the meta device, so that steps which look
    at them directly fail in place of changing them.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    held = parameters_of(optimizer)
    memo: dict[int, Any] = {id(p): p if has_values else nn.Parameter(p.detach().to("meta")) for p in held}
    memo[id(optimizer)] = twin
    known = vars(Optimizer([torch.zeros(1)], {}))
    for name, value in optimizer.__dict__.items():
        if name not in known:
            # Attributes that cannot be copied, such as an open file, are shared.
            with contextlib.suppress(Exception):
                twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    return twin


def _draws(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether steps draw numbers from torch's generator."""
    before = torch.get_rng_state()
    try:
        _tried(optimizer, group)
        return not torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(before)


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return matrices before and after a few steps; None if the optimizer cannot handle them."""
    start, *gradients = _samples()
    try:
        return start, _walk(optimizer, group, start, gradients)
    except FAILURES:
        return None


def _samples() -> list[list[Tensor]]:
    """Return two matrices, and their gradients in a few steps.

    Gradients point in similar directions, so that step sizes which optimizers estimate from the progress so far grow.
    """
    generator = torch.Generator().manual_seed(0)
    start, common, *noise = torch.randn(NUM_STEPS + 2, 2, 4, 6, generator=generator, dtype=torch.float64)
    return [list(start), *(list(common + 0.5 * one) for one in noise)]


def _halves(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten()[:7], tensor.flatten()[7:]]


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _agree(optimizer: Optimizer, group: dict[str, Any], split: Callable[[Tensor], list[Tensor]]) -> bool:
    """Return whether a few steps on parts give the same result as on two whole matrices."""
    start, *gradients = _samples()
    try:
        whole = _walk(optimizer, group, start, gradients)
        parts = [_walk(optimizer, group, split(start[i]), [split(g[i]) for g in gradients]) for i in range(2)]
    except FAILURES:
        return False
    joined = [torch.cat([tensor.flatten() for tensor in part]) for part in parts]
    return all(torch.allclose(a.flatten(), b, rtol=1e-9, atol=1e-12) for a, b in zip(whole, joined, strict=True))


def _walk(
    optimizer: Optimizer,
    group: dict[str, Any],
    start: list[Tensor],
    gradients: list[list[Tensor]],
    slots: list[dict[str, Any]] | None = None,
) -> Any:
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    twin = stateless_copy(optimizer, has_values=False)
    # A schedule may start with a learning rate of 0, which would hide the update.
    rate = {} if float(group.get("lr", 1.0)) else {"lr": 0.1}
    twin.param_groups = [{**group, **rate, "params": parameters}]
    # An optimizer that creates its slots at construction, as Adagrad does, has them only for its own tensors.
    sample = next((slots for parameter, slots in optimizer.state.items() if slots and parameter.numel()), None)
    if sample is not None:
        for parameter in parameters:
            twin.state[parameter] = {key: _slot_like(value, parameter) for key, value in sample.items()}
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    if slots is not None:
        slots += [dict(own) for own in twin.state.values()]
    return [parameter.detach() for parameter in parameters]


def _slot_like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.clone().double() if value.dim() == 0 else value.clone()
    return torch.full_like(parameter, float(value.flatten()[0]))
