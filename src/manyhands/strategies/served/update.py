"""Updates on the servers: the task's optimizer, moved from whole tensors to the pieces that a server holds."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import Joined, TaskError, has_scheduler, nested_in
from ...graph import lie_alike
from .layout import Share, TensorPiece, tensor_of
from .messages import Shaped, Slots

DTYPES = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of an optimizer that cannot handle the tensors it is tried on."""
NUM_STEPS = 3
"""Number of steps that show whether an optimizer is elementwise; the first one may be a special case."""


def moved(optimizer: Optimizer, parts: Mapping[Tensor, Sequence[nn.Parameter]]) -> Optimizer:
    """Return a copy of an optimizer that holds these parts instead of its parameters; existing slots are split too."""
    if isinstance(optimizer, Joined):
        return Joined([moved(member, parts) for member in optimizer.members])
    twin = _twin(optimizer)
    twin.param_groups = [
        {**group, "params": [part for parameter in group["params"] for part in parts.get(parameter, ())]}
        for group in optimizer.param_groups
    ]
    return twin


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return another optimizer of the same kind and settings, without state.

    Its attributes, such as a generator or averages, are copies, so its steps do not change the original.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(optimizer): twin}
    known = vars(Optimizer([torch.zeros(1)], {}))
    for name, value in optimizer.__dict__.items():
        if name not in known:
            # Attributes that cannot be copied, such as an open file, are shared.
            with contextlib.suppress(Exception):
                twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    return twin


def pieces_of(optimizer: Optimizer, names: Mapping[str, nn.Parameter], share: Share, values: Sequence[Tensor]) -> Any:
    """Return the optimizer on a server's pieces, and its parameters by piece."""
    parameters: dict[TensorPiece, nn.Parameter] = {}
    parts: dict[Tensor, list[nn.Parameter]] = {}
    for slab, flat in zip(share, values, strict=True):
        for piece in slab.pieces:
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
    """Return a piece's part of an optimizer slot: its range if the slot is shaped like the tensor, else all of it."""
    if not isinstance(slot, Tensor):
        return slot
    if slot.shape != whole.shape or piece.length == whole.numel():
        return slot.clone()
    return slot.reshape(-1)[piece.start : piece.stop].clone()


def pack_slots(slots: Mapping[str, Any]) -> tuple[Slots, list[Tensor]]:
    """Return an optimizer's slots of one piece as plain data, and the tensors among them."""
    plain: Slots = {}
    tensors = []
    for name, value in slots.items():
        if isinstance(value, Tensor) and value.dim():
            plain[name] = Shaped(list(value.shape), str(value.dtype).removeprefix("torch."))
            tensors.append(value)
        elif value is not None:
            plain[name] = float(value)
    return plain, tensors


def unpack_slots(plain: Slots, frames: Iterator[Any]) -> dict[str, Any]:
    """Restore what `pack_slots` returned, with the tensors as frames; a scalar becomes a tensor, as in torch."""
    slots: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Shaped):
            slots[name] = tensor_of(next(frames), DTYPES[value.dtype]).clone().view(value.shape)
        else:
            slots[name] = torch.tensor(value, dtype=torch.get_default_dtype())
    return slots


def needs_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer needs whole tensors, found by trying it; raise if it needs several at once.

    Raises:
        TaskError: It has optimizers inside it, draws random numbers, does not update what its groups hold, or its
            update of one tensor depends on others.
    """
    if isinstance(optimizer, Joined):
        return max(map(needs_whole, optimizer.members))  # max checks all members, each of which may raise
    _require_movable(optimizer)
    if is_by_element(optimizer):
        return False
    if is_by_tensor(optimizer):
        return True
    raise TaskError(
        "on parameter servers an optimizer updates every tensor by itself",
        got=f"{type(optimizer).__name__}, whose update of one tensor depends on others",
        remedy="use for instance torch.optim.AdamW, or mh.Mirrored()",
    )


def is_by_element(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates every element independently, found by trying it."""
    return all(_agree(optimizer, group, _halves) for group in optimizer.param_groups)


def is_by_tensor(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates every tensor independently, found by trying it."""
    return all(_agree(optimizer, group, _alone) for group in optimizer.param_groups)


def draws_numbers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer draws random numbers from torch's generator, found by trying it."""
    return any(_draws(optimizer, group) for group in optimizer.param_groups)


def _require_movable(optimizer: Optimizer) -> None:
    """Raise for an optimizer that servers cannot move to their own tensors."""
    name, inner = type(optimizer).__name__, [type(one).__name__ for one in nested_in(optimizer).values()]
    hooks = [hook for hook in _hooks(optimizer) if hook is not lie_alike]
    why, remedy = "", "use for instance torch.optim.AdamW, or mh.Mirrored()"
    if inner:
        why, remedy = f"which steps {', '.join(inner)} inside it", f"return them as a list, [{', '.join(inner)}]"
    elif hooks:
        why, remedy = "whose step has hooks that servers would not run as written", "leave them out"
        if has_scheduler(optimizer):
            remedy = "pass Task(schedule=lambda step, total: ...) instead of a scheduler"
    elif draws_numbers(optimizer):
        why, remedy = "which draws random numbers, other ones on every server", "use mh.Mirrored()"
    elif not all(_moves(optimizer, group) for group in optimizer.param_groups):
        why = "which does not update the tensors of its parameter groups"
    if why:
        raise TaskError(
            "parameter servers update the tensors that an optimizer's groups hold, each server its own",
            got=f"{name}, {why}",
            remedy=remedy,
        )


def _hooks(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def _draws(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether steps draw numbers from torch's generator."""
    before = torch.get_rng_state()
    try:
        _tried(optimizer, group)
        return not torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(before)


def _moves(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether steps change the tensors in the optimizer's group, or fail on them."""
    found = _tried(optimizer, group)
    return found is None or not all(torch.equal(after, before) for before, after in zip(*found, strict=True))


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return matrices before and after a few steps; None if the optimizer cannot handle them."""
    start, *gradients = _samples()
    try:
        return start, _walk(optimizer, group, start, gradients)
    except FAILURES:
        return None


def _samples() -> list[list[Tensor]]:
    """Return two matrices, and their gradients in a few steps."""
    generator = torch.Generator().manual_seed(0)
    return [list(torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)) for _ in range(NUM_STEPS + 1)]


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


def _walk(optimizer: Optimizer, group: dict[str, Any], start: list[Tensor], gradients: list[list[Tensor]]) -> Any:
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    twin = _twin(optimizer)
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
    return [parameter.detach() for parameter in parameters]


def _slot_like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.clone().double() if value.dim() == 0 else value.clone()
    return torch.full_like(parameter, float(value.flatten()[0]))
