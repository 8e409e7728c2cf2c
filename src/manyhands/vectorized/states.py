"""Checkpoints of single members of a vectorized ensemble, from which they can resume in a stack or alone in `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core import CheckpointError, StrategySpec
from ..data import Cursor
from .build import Built
from .member import VectorizedMember
from .member_training import CannotStack
from .stack import AVERAGES, BUFFERS, COUNT, FROZEN, PARAMETERS, STEP, Row

COUNTED = ("exp_avg_sq", "square_avg")
"""Kinds of optimizer state in whose presence torch's optimizers also store the number of updates as "step"."""


def state_of(
    member: VectorizedMember, row: Row, built: Built, spec: StrategySpec, used: frozenset[str] | None = None
) -> dict[str, Any]:
    """Return the state of a member as the fields of a checkpoint of `fit`, such as `step`, `model` and `optimizers`.

    Args:
        member: The progress of the member.
        row: The member's tensors.
        built: The member's network and optimizer.
        spec: The strategy to store in the checkpoint.
        used: Names of the parameters that get gradients; None for all. There is no optimizer state for the others.
    """
    held = {name: tensor.cpu() for kind in (PARAMETERS, FROZEN, BUFFERS) for name, tensor in _kind(row, kind).items()}
    model = {name: held[_source(name, built, held)] for name in built.model.state_dict()}
    return {
        "step": member.step,
        "model": model,
        "optimizers": {"": _optimizer(member, row, built, used)},
        "state": {"cursors": [member.cursor.to_dict()], "spec": spec.to_dict(), "state": member.loop_state()},
        "random": {},
        "averages": {name: tensor.cpu() for name, tensor in _kind(row, AVERAGES).items()},
    }


@torch.no_grad()
def fill(member: VectorizedMember, row: Row, built: Built, state: Mapping[str, Any]) -> None:
    """Load the fields of a checkpoint, from `state_of` or `fit`, into a member's progress and its row of tensors.

    Raises:
        CheckpointError: The checkpoint is from another network.
        CannotStack: Parameters were updated a different number of times, which a stack cannot represent.
    """
    model = state["model"]
    own = dict(built.model.state_dict())
    odd = sorted(set(own) ^ set(model)) or [name for name in own if own[name].shape != model[name].shape]
    if odd:
        raise CheckpointError(
            "the state of a member must match its network",
            got=f"a state with different tensors {', '.join(odd[:3])}",
            remedy="load the state of a member with the same network",
        )
    held = {_source(name, built, row_names(row)): tensor for name, tensor in model.items()}
    for kind in (PARAMETERS, FROZEN, BUFFERS):
        for name in _kind(row, kind):
            if name in held:
                row[kind, name].copy_(held[name])
    averages = state.get("averages") or {}
    for name in _kind(row, AVERAGES):
        row[AVERAGES, name].copy_(averages.get(name, held.get(name, row[AVERAGES, name])))
    slots = state["optimizers"][""]["state"]
    for names, update in zip(built.groups, built.updates, strict=True):
        for name in names:
            for slot in update.slots:
                value = slots.get(name, {}).get(slot)
                row[slot, name].zero_() if value is None else row[slot, name].copy_(value)
    member.step = int(state["step"])
    counts = [int(values["step"]) for values in slots.values() if "step" in values]
    if len(set(counts)) > 1:
        raise CannotStack("parameters were updated a different number of times, and a stack counts updates together")
    row[COUNT].fill_(max(counts, default=member.step))
    row[STEP].fill_(member.step)
    member.cursor = Cursor.from_dict(state["state"]["cursors"][0])
    member.resume_from(state["state"].get("state", {}))


def row_names(row: Row) -> dict[str, Tensor]:
    """Return the parameters and buffers in a member's row of tensors, by name."""
    return {name: tensor for kind in (PARAMETERS, FROZEN, BUFFERS) for name, tensor in _kind(row, kind).items()}


def _kind(row: Row, kind: str) -> dict[str, Tensor]:
    return {name: tensor for (own, name), tensor in row.items() if own == kind}


def _source(name: str, built: Built, held: Mapping[str, Tensor]) -> str:
    """Return the key of a tensor in `held`; a tensor that several layers share has several names, but one key."""
    if name in held:
        return name
    every = dict(built.model.named_parameters(remove_duplicate=False)) | dict(
        built.model.named_buffers(remove_duplicate=False)
    )
    return next(other for other in held if other in every and every[other] is every[name])


def _optimizer(member: VectorizedMember, row: Row, built: Built, used: frozenset[str] | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for names, update in zip(built.groups, built.updates, strict=True):
        for name in (name for name in names if member.step and (used is None or name in used)):
            slots: dict[str, Any] = {slot: row[slot, name].cpu() for slot in update.slots}
            if any(slot in slots for slot in COUNTED):
                slots["step"] = row[COUNT].cpu().float()
            if slots:
                state[name] = slots
    groups = []
    for names, group in zip(built.held, built.settings, strict=True):
        groups.append({"params": list(names), **{key: _plain(value) for key, value in group.items()}})
    return {"state": state, "groups": groups}


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
