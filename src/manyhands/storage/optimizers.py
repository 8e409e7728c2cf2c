"""An optimizer's state keyed by parameter names, so that it does not depend on the order of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core import CheckpointError, each_of, flat_slots, has_scheduler, nested_in, nested_slots

Slots = dict[str, Any]
EXECUTION = ("fused", "foreach", "capturable")
"""Settings of how an update is executed, not what it computes; they are never loaded from a file."""


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return `{"state": {name: {slot: value}}, "groups": [{"params": [names], **hyperparameters}]}` of an optimizer.

    Slots of a nested optimizer are named "attribute:slot"; its groups are in "inner" by attribute. A slot that is a
    list of tensors becomes the slots "slot[0]", "slot[1]" and so on. The tensors are not copied. `names` are the names
    of all parameters.
    """
    state = {
        _name(parameter, names): flat_slots(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
    found: dict[str, Any] = {"state": state, "groups": [_group(g, names) for g in optimizer.param_groups]}
    for attribute, one in _inner(optimizer).items():
        own = optimizer_state(one, names)
        found.setdefault("inner", {})[attribute] = {key: value for key, value in own.items() if key != "state"}
        for name, slots in own["state"].items():
            state.setdefault(name, {}).update({f"{attribute}:{slot}": value for slot, value in slots.items()})
    return found


def _inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return nested optimizers by attribute, except those that share the outer optimizer's state.

    If `optimizer` consists of several members, the key is the member's number and the attribute.
    """
    members = each_of(optimizer)
    return {
        f"{number}.{attribute}" if len(members) > 1 else attribute: one
        for number, member in enumerate(members)
        for attribute, one in nested_in(member).items()
        if one.state is not member.state
    }


def load_optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], data: Mapping[str, Any], *, has_schedule: bool = False
) -> None:
    """Load `data`, which `optimizer_state` returned, into an optimizer with the same groups.

    Slots take their parameter's dtype and device; as in torch, a `step` does so only if the optimizer is capturable or
    fused. Raise CheckpointError if the data does not fit the optimizer, or if the optimizer has a scheduler that the
    caller does not restore as well (`has_schedule`).
    """
    saved = data["groups"]
    if has_scheduler(optimizer) and not has_schedule:
        raise CheckpointError(
            "the learning rate must be scheduled by the task, so that a run can be resumed",
            got="an optimizer with a learning-rate scheduler, whose state is not in the checkpoint",
            remedy="pass Task(schedule=lambda step, total: ...) instead of the scheduler, or in a custom loop save its "
            "state too: hand.save(path, scheduler=scheduler.state_dict())",
        )
    _require_same_groups(optimizer, names, saved)
    inner, known = _inner(optimizer), data.get("inner", {})
    if inner.keys() != known.keys():
        raise CheckpointError(
            f"the checkpoint must contain the inner optimizers {', '.join(inner) or '(none)'}",
            got=f"{', '.join(known) or 'none'} in the checkpoint",
            remedy="create the optimizer as it was when the checkpoint was saved",
        )
    alike = [one for one in nested_in(optimizer).values() if one.state is optimizer.state]
    _load(optimizer, names, {**data, "state": _slots(data["state"], "", [f"{attribute}:" for attribute in inner])})
    for one in alike:
        one.state = optimizer.state
    for attribute, one in inner.items():
        load_optimizer_state(one, names, {**known[attribute], "state": _slots(data["state"], f"{attribute}:")})


def _slots(state: Mapping[str, Slots], prefix: str, without: Sequence[str] = ()) -> dict[str, Slots]:
    """Return the slots whose names start with `prefix`, by the rest of their names; omit prefixes in `without`."""
    found = {
        name: {
            slot.removeprefix(prefix): value
            for slot, value in slots.items()
            if slot.startswith(prefix) and not slot.startswith(tuple(without))
        }
        for name, slots in state.items()
    }
    return {name: slots for name, slots in found.items() if slots}


def _load(optimizer: Optimizer, names: Mapping[Tensor, str], data: Mapping[str, Any]) -> None:
    state: dict[int, Slots] = {}
    groups, index = [], 0
    for current, group in zip(optimizer.param_groups, data["groups"], strict=True):
        # torch matches parameters by position, so names are mapped to positions in the current order.
        places = {names[parameter]: index + i for i, parameter in enumerate(current["params"])}
        index += len(places)
        state |= {
            at: nested_slots(_copied(data["state"][name])) for name, at in places.items() if name in data["state"]
        }
        groups.append({**_restored(current, group), "params": list(places.values())})
    # Captured graphs read the tensors among the hyperparameters, and other optimizers may share the groups themselves.
    held = [(member, member.param_groups, list(member.param_groups)) for member in each_of(optimizer)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for member, kept, before in held:
        for group, new in zip(before, member.param_groups, strict=True):
            group.update({key: _into(group.get(key), value) for key, value in new.items() if key != "params"})
        kept[:] = before
        member.param_groups = kept


def _into(held: Any, value: Any) -> Any:
    """Return the new value; if the old one was a tensor, copy the new value into it and return that tensor."""
    return held.fill_(value) if isinstance(held, Tensor) and held.numel() == 1 else value


def _group(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    plain = {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
    return {"params": [_name(parameter, names) for parameter in group["params"]], **plain}


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    raise CheckpointError(
        f"the hyperparameter {key!r} must be a number, a string or a list of them",
        got=type(value).__name__,
        remedy="keep such objects outside of the optimizer's groups",
    )


def _name(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise CheckpointError(
            "every parameter of the optimizer must belong to the model",
            got=f"one of shape {tuple(parameter.shape)} that does not",
            remedy="create the optimizer from model.parameters()",
        ) from None


def _require_same_groups(optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[Mapping[str, Any]]) -> None:
    current = [[_name(p, names) for p in group["params"]] for group in optimizer.param_groups]
    if len(current) != len(saved):
        raise CheckpointError(
            f"the checkpoint must have {len(current)} parameter groups, like the optimizer",
            got=f"{len(saved)}",
            remedy="create the optimizer as it was when the checkpoint was saved",
        )
    for number, (have, group) in enumerate(zip(current, saved, strict=True)):
        if sorted(have) != sorted(group["params"]):
            odd = sorted(set(have) ^ set(group["params"]))
            raise CheckpointError(
                f"group {number} of the optimizer must have the parameters of the checkpoint",
                got=f"{len(odd)} that differ: {', '.join(odd[:5])}",
                remedy="create the optimizer as it was when the checkpoint was saved",
            )


def _restored(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current hyperparameters updated with saved ones; lists from JSON become tuples again."""
    merged = {key: value for key, value in current.items() if key != "params"}
    for key, value in saved.items():
        if key != "params" and key not in EXECUTION:
            merged[key] = tuple(value) if isinstance(current.get(key), tuple) else value
    return merged


def _copied(slots: Slots) -> Slots:
    """Return copies of the slots, because the optimizer will change them in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in slots.items()}
