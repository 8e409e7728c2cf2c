"""Optimizers of a task: one, or a list or dict of several, which are joined into one if the task has a loss."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .errors import TaskError

_ITEM = re.compile(r"(?P<list>.+)\[\d+\]")
"""The name of a tensor in a list of tensors."""


class Joined(Optimizer):
    """Several optimizers over disjoint parameters, used as one optimizer.

    The parameter groups are the group objects of the members, in order, so schedules and checkpoints work as with one
    optimizer. The state is a view of the members' states.

    >>> import torch
    >>> net = nn.Linear(2, 2)
    >>> joined = Joined([torch.optim.SGD([net.weight], lr=0.1), torch.optim.Adam([net.bias], lr=0.01)])
    >>> [group["lr"] for group in joined.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self._states = _States(self.members)
        super().__setstate__({})  # hooks and profiling, without the base class's own groups and state

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["members"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.members))}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """The state of each parameter, stored in the member that holds the parameter."""
        return self._states

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step every member."""
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`: every member gets its own groups, with its parameters counted from 0."""
        groups, start = iter(state_dict["param_groups"]), 0
        for member in self.members:
            own = [{**next(groups)} for _ in member.param_groups]
            count = sum(len(group["params"]) for group in own)
            for group in own:
                group["params"] = [index - start for index in group["params"]]
            slots = {i - start: value for i, value in state_dict["state"].items() if start <= i < start + count}
            member.load_state_dict({"state": slots, "param_groups": own})
            start += count


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one mapping; new entries go to the optimizer that holds the parameter."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, slots: Any) -> None:
        self._of(parameter)[parameter] = slots

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in member.state for member in self._members)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        # The states are defaultdicts: indexing them would create an entry.
        return next((member.state[parameter] for member in self._members if parameter in member.state), default)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for member in self._members for parameter in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)

    def _of(self, parameter: Tensor) -> Any:
        for member in self._members:
            if parameter in member.state:
                return member.state
        for member in self._members:
            if any(parameter is held for held in parameters_of(member)):
                return member.state
        raise KeyError(parameter)


def each_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that are stepped: the members of a joined one, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, Joined) else (optimizer,)


def make_optimizers(make: Callable[[Any], Any], model: nn.Module, *, keyed: bool) -> Any:
    """Return what a task's optimizer function returns, with lists and dicts joined into one optimizer.

    Args:
        keyed: Whether a dict stays a dict, for a task with `step`, which refers to optimizers by key.

    Raises:
        TaskError: The function created a learning-rate scheduler, which would never be stepped.
    """
    made = make(model)
    several = list(made.values()) if isinstance(made, Mapping) else made
    if not isinstance(several, list | tuple):
        several = [made]
    if keyed and isinstance(made, Mapping):
        return made
    _refuse_scheduler(several)
    if several == [made]:
        return made
    return joined(several)


def joined(optimizers: Sequence[Any]) -> Optimizer:
    """Return one optimizer that steps all given ones; raise TaskError for objects that are no optimizers."""
    odd = next((made for made in optimizers if not isinstance(made, Optimizer)), None)
    if odd is not None or not optimizers:
        raise TaskError(
            "the optimizer function must return a torch optimizer, or a list or a dict of them",
            got="an empty list or dict" if odd is None else f"an object of type {type(odd).__name__} among them",
            remedy="return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]",
        )
    return optimizers[0] if len(optimizers) == 1 else Joined(optimizers)


def nested_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer has in its attributes and steps itself, by attribute."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        items = value.items() if isinstance(value, dict) else enumerate(value) if _is_list(value) else [("", value)]
        found |= {f"{name}.{key}".rstrip("."): item for key, item in items if isinstance(item, Optimizer)}
    return {} if isinstance(optimizer, Joined) else found


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, of its members and of its nested optimizers, without duplicates."""
    found = {id(group): group for group in optimizer.param_groups}
    inner = [one for member in each_of(optimizer) for one in nested_in(member).values()]
    found |= {id(group): group for one in inner for group in groups_of(one)}
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that an optimizer holds."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _refuse_scheduler(made: Iterable[Any]) -> None:
    """Raise TaskError if an optimizer function created a learning-rate scheduler, which nothing would step."""
    for item in made:
        found = _scheduler_of(item)
        if found:
            raise TaskError(
                "the learning rate must be scheduled by the task",
                got=f"an optimizer function that creates a {found}, which would never be stepped",
                remedy="remove the scheduler and pass Task(schedule=lambda step, total: ...), which multiplies "
                "the optimizer's learning rate, for example 0.5 * (1 + math.cos(math.pi * step / total)) for a cosine",
            )


def _scheduler_of(made: Any) -> str:
    """Return the class name of the scheduler that `made` is or has, if only a custom loop could step it; else ""."""
    if isinstance(made, LRScheduler):
        return type(made).__name__
    if not isinstance(made, Optimizer) or not has_scheduler(made) or _steps_by_itself(made):
        return ""
    return next((type(one).__name__ for one in gc.get_referrers(made) if isinstance(one, LRScheduler)), "LRScheduler")


def has_scheduler(optimizer: Optimizer) -> bool:
    """Return whether a learning-rate scheduler was created for an optimizer: torch then marks the step method."""
    return any(getattr(member.step, "_wrapped_by_lr_sched", False) for member in each_of(optimizer))


def _steps_by_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's own step may step its scheduler: in a hook, or because it holds the scheduler."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or any(isinstance(value, LRScheduler) for value in vars(optimizer).values())


def flat_slots(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of a parameter, with a separate entry for each tensor in a list of tensors.

    SOAP and Shampoo, for example, keep a list with a matrix per dimension.

    >>> import torch
    >>> sorted(flat_slots({"step": 1, "GG": [torch.eye(2), torch.eye(3)]}))
    ['GG[0]', 'GG[1]', 'step']
    """
    flat: dict[str, Any] = {}
    for name, value in slots.items():
        if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
            flat |= {f"{name}[{index}]": item for index, item in enumerate(value)}
        else:
            flat[name] = value
    return flat


def nested_slots(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of a parameter with its lists of tensors: the inverse of `flat_slots`.

    >>> nested_slots({"step": 1, "GG[0]": "a", "GG[1]": "b"})
    {'step': 1, 'GG': ['a', 'b']}
    """
    slots: dict[str, Any] = {}
    for name, value in flat.items():
        found = _ITEM.fullmatch(name)
        if found is None:
            slots[name] = value
        else:
            slots.setdefault(found["list"], []).append(value)
    return slots
