"""Updates on the servers: the task's optimizer, applied to the pieces of tensors that a server holds.

A server records the pushes that it has applied, so that none is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture import match_strides
from ..core import Joined, TaskError, has_scheduler, nested_in
from ..strategies import draws_numbers, is_by_element, is_by_tensor, odd_slots, stateless_copy, updates_own_tensors
from .layout import Share, TensorPiece, tensor_of
from .messages import Slots, SlotTensor

DTYPES = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}


def moved(optimizer: Optimizer, parts: Mapping[Tensor, Sequence[nn.Parameter]]) -> Optimizer:
    """Return a copy of an optimizer without its state, with the `parts` of each parameter instead of the parameter."""
    if isinstance(optimizer, Joined):
        return Joined([moved(member, parts) for member in optimizer.members])
    twin = stateless_copy(optimizer)
    twin.param_groups = [
        {**group, "params": [part for parameter in group["params"] for part in parts.get(parameter, ())]}
        for group in optimizer.param_groups
    ]
    return twin


def pieces_of(optimizer: Optimizer, names: Mapping[str, nn.Parameter], share: Share, values: Sequence[Tensor]) -> Any:
    """Return a copy of an optimizer for the trained pieces in `share`, and its parameters by piece.

    The parameters are views of `values`, the flat buffers of the share. Optimizer slots are split like the tensors.
    """
    parameters: dict[TensorPiece, nn.Parameter] = {}
    parts: dict[Tensor, list[nn.Parameter]] = {}
    for flat_buffer, flat in zip(share, values, strict=True):
        for piece in flat_buffer.pieces:
            if not piece.is_trained:
                continue
            whole = names[piece.name]
            view = flat[piece.place]
            # A tensor that is held whole keeps its shape, because an optimizer may use rows and columns.
            parameters[piece] = nn.Parameter(view.view(whole.shape) if piece.length == whole.numel() else view)
            parts.setdefault(whole, []).append(parameters[piece])
    twin = moved(optimizer, parts)
    for piece, parameter in parameters.items():
        slots = optimizer.state.get(names[piece.name], {})
        if slots:
            twin.state[parameter] = {key: cut_slot(value, piece, names[piece.name]) for key, value in slots.items()}
    return twin, parameters


def cut_slot(slot: Any, piece: TensorPiece, whole: Tensor) -> Any:
    """Return a piece's part of an optimizer slot: its range if the slot has the tensor's shape, else the whole slot."""
    if not isinstance(slot, Tensor):
        return slot
    if slot.shape != whole.shape or piece.length == whole.numel():
        return slot.clone()
    return slot.reshape(-1)[piece.start : piece.stop].clone()


def pack_slots(slots: Mapping[str, Any]) -> tuple[Slots, list[Tensor]]:
    """Return an optimizer's slots of one piece in the form that is sent: plain data, and the tensors among them."""
    plain: Slots = {}
    tensors = []
    for name, value in slots.items():
        if isinstance(value, Tensor) and value.dim():
            plain[name] = SlotTensor(list(value.shape), str(value.dtype).removeprefix("torch."))
            tensors.append(value)
        elif value is not None:
            plain[name] = float(value)
    return plain, tensors


def unpack_slots(plain: Slots, frames: Iterator[Any]) -> dict[str, Any]:
    """Return the slots that `pack_slots` packed, reading tensors from `frames`; scalars become tensors, as in torch."""
    slots: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, SlotTensor):
            slots[name] = tensor_of(next(frames), DTYPES[value.dtype]).clone().view(value.shape)
        else:
            slots[name] = torch.tensor(value, dtype=torch.get_default_dtype())
    return slots


def needs_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer needs whole tensors rather than parts of them, found by trying it.

    Raises:
        TaskError: The optimizer contains other optimizers, draws random numbers, does not update the tensors of its
            groups, or its update of one tensor depends on other tensors.
    """
    if isinstance(optimizer, Joined):
        return max(map(needs_whole, optimizer.members))  # max checks all members, each of which may raise
    _require_movable(optimizer)
    if is_by_element(optimizer):
        return False
    if is_by_tensor(optimizer):
        return True
    raise TaskError(
        "on parameter servers, an optimizer must update every tensor independently",
        got=f"{type(optimizer).__name__}, whose update of one tensor depends on others",
        remedy="use for example torch.optim.AdamW, or mh.Mirrored()",
    )


def _require_movable(optimizer: Optimizer) -> None:
    """Raise TaskError for an optimizer that servers cannot apply to their own tensors."""
    name, inner = type(optimizer).__name__, [type(one).__name__ for one in nested_in(optimizer).values()]
    hooks = [hook for hook in _hooks(optimizer) if hook is not match_strides]
    why, remedy = "", "use for example torch.optim.AdamW, or mh.Mirrored()"
    if inner:
        why, remedy = f"which steps {', '.join(inner)} inside it", f"return them as a list, [{', '.join(inner)}]"
    elif hooks:
        why, remedy = "whose step has hooks, which servers cannot run", "remove the hooks"
        if has_scheduler(optimizer):
            remedy = "pass Task(schedule=lambda step, total: ...) instead of a scheduler"
    elif draws_numbers(optimizer):
        why, remedy = "which draws random numbers that would differ between servers", "use mh.Mirrored()"
    elif not updates_own_tensors(optimizer):
        why = "which does not update the tensors of its parameter groups"
    elif odd := odd_slots(optimizer):
        why = f"whose state {odd[0]!r} is neither a tensor nor a number, so that servers cannot send it"
        remedy = "keep a tensor per slot, or use mh.Mirrored() or mh.Sharded()"
    if why:
        raise TaskError(
            "an optimizer on parameter servers must update the tensors of its parameter groups, and nothing else",
            got=f"{name}, {why}",
            remedy=remedy,
        )


def _hooks(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


class AppliedPushes:
    """The numbers of the pushes that a server has applied: a compact set of mostly consecutive integers.

    >>> pushes = AppliedPushes()
    >>> for number in (0, 2, 1, 5):
    ...     pushes.add(number)
    >>> [number for number in range(7) if number in pushes], len(pushes)
    ([0, 1, 2, 5], 4)
    """

    def __init__(self, state: Sequence[int] = (0,)) -> None:
        self._below = state[0]
        self._others = set(state[1:])

    @property
    def state(self) -> list[int]:
        """The set in compact form: all numbers below the first entry, and the remaining entries themselves.

        >>> AppliedPushes([2, 5]).state, len(AppliedPushes([2, 5]))
        ([2, 5], 3)
        """
        return [self._below, *sorted(self._others)]

    def add(self, number: int) -> None:
        """Add the number of a push, which must not be in the set."""
        assert number not in self, f"push {number} was applied before"
        self._others.add(number)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1

    def __contains__(self, number: int) -> bool:
        return number < self._below or number in self._others

    def __len__(self) -> int:
        return self._below + len(self._others)
