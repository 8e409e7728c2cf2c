"""An optimizer's state keyed by parameter names, so that it fits however parameters are ordered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core import CheckpointError

Slots = dict[str, Any]
EXECUTION = ("fused", "foreach", "capturable")
"""How an update is executed, not what it computes: that is the present machine's choice, never a file's."""


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """`{"state": {name: {slot: value}}, "groups": [{"params": [names], **hyperparameters}]}` of an optimizer.

    The tensors are the optimizer's own, not copies.
    """
    state = {
        _name(parameter, names): dict(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
    return {"state": state, "groups": [_group(group, names) for group in optimizer.param_groups]}


def load_optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str], data: Mapping[str, Any]) -> None:
    """Puts what `optimizer_state` gave into an optimizer of the same groups.

    Slots take their parameter's dtype and device; a `step` stays as it was saved unless the optimizer is
    capturable or fused, as torch itself has it.
    """
    saved = data["groups"]
    _require_same_groups(optimizer, names, saved)
    state: dict[int, Slots] = {}
    groups, index = [], 0
    for current, group in zip(optimizer.param_groups, saved, strict=True):
        # torch matches by position, so the names are taken in the current order.
        places = {names[parameter]: index + i for i, parameter in enumerate(current["params"])}
        index += len(places)
        state |= {at: _copied(data["state"][name]) for name, at in places.items() if name in data["state"]}
        groups.append({**_restored(current, group), "params": list(places.values())})
    held = [{key: value for key, value in g.items() if isinstance(value, Tensor)} for g in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, tensors, new in zip(optimizer.param_groups, held, saved, strict=True):
        for key, tensor in tensors.items():
            # A captured graph reads this very tensor, so its value changes and not the tensor.
            tensor.fill_(new.get(key, tensor.item()))
            group[key] = tensor


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
        f"the hyperparameter {key!r} must be a number, a text or a list of them",
        got=type(value).__name__,
        remedy="keep such objects outside the optimizer's groups",
    )


def _name(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise CheckpointError(
            "every parameter of the optimizer must belong to the model",
            got=f"one of shape {tuple(parameter.shape)} that does not",
            remedy="make the optimizer from model.parameters()",
        ) from None


def _require_same_groups(optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[Mapping[str, Any]]) -> None:
    current = [[_name(p, names) for p in group["params"]] for group in optimizer.param_groups]
    if len(current) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(current)} parameter groups",
            got=f"{len(saved)} in the checkpoint",
            remedy="make the optimizer as it was when the checkpoint was saved",
        )
    for number, (have, group) in enumerate(zip(current, saved, strict=True)):
        if sorted(have) != sorted(group["params"]):
            odd = sorted(set(have) ^ set(group["params"]))
            raise CheckpointError(
                f"group {number} of the optimizer must hold the parameters of the checkpoint",
                got=f"{len(odd)} that differ: {', '.join(odd[:5])}",
                remedy="make the optimizer as it was when the checkpoint was saved",
            )


def _restored(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved hyperparameters over the current ones; JSON made lists of tuples."""
    merged = {key: value for key, value in current.items() if key != "params"}
    for key, value in saved.items():
        if key != "params" and key not in EXECUTION:
            merged[key] = tuple(value) if isinstance(current.get(key), tuple) else value
    return merged


def _copied(slots: Slots) -> Slots:
    """Own copies, since the optimizer goes on to change them in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in slots.items()}
