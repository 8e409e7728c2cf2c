"""Updates on the servers: the task's own optimizer, moved from whole tensors onto the pieces that a server holds."""

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
"""What an optimizer raises that cannot take the tensors it is tried on."""
NUM_STEPS = 3
"""Steps that show whether an optimizer looks at one element at a time; the first of them may be a plain one."""


def moved(optimizer: Optimizer, parts: Mapping[Tensor, Sequence[nn.Parameter]]) -> Optimizer:
    """A copy of an optimizer that holds these parts instead of its parameters; the first slots are cut likewise."""
    if isinstance(optimizer, Joined):
        return Joined([moved(member, parts) for member in optimizer.members])
    twin = _twin(optimizer)
    twin.param_groups = [
        {**group, "params": [part for parameter in group["params"] for part in parts.get(parameter, ())]}
        for group in optimizer.param_groups
    ]
    return twin


def _twin(optimizer: Optimizer) -> Optimizer:
    """Another optimizer of the same kind and settings, without a memory.

    What it keeps in attributes, such as a generator or averages, is its own, so its steps leave the first one as it is.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(optimizer): twin}
    known = vars(Optimizer([torch.zeros(1)], {}))
    for name, value in optimizer.__dict__.items():
        if name not in known:
            # What cannot be copied, such as an open file, is shared.
            with contextlib.suppress(Exception):
                twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    return twin


def pieces_of(optimizer: Optimizer, names: Mapping[str, nn.Parameter], share: Share, values: Sequence[Tensor]) -> Any:
    """The optimizer on the pieces of a server, and its parameters by piece."""
    parameters: dict[TensorPiece, nn.Parameter] = {}
    parts: dict[Tensor, list[nn.Parameter]] = {}
    for slab, flat in zip(share, values, strict=True):
        for piece in slab.pieces:
            if not piece.is_trained:
                continue
            whole = names[piece.name]
            view = flat[piece.place]
            # A tensor that is held whole keeps its shape: an optimizer may look at rows and columns.
            parameters[piece] = nn.Parameter(view.view(whole.shape) if piece.length == whole.numel() else view)
            parts.setdefault(whole, []).append(parameters[piece])
    twin = moved(optimizer, parts)
    for piece, parameter in parameters.items():
        slots = optimizer.state.get(names[piece.name], {})
        if slots:
            twin.state[parameter] = {key: cut_slot(value, piece, names[piece.name]) for key, value in slots.items()}
    return twin, parameters


def cut_slot(slot: Any, piece: TensorPiece, whole: Tensor) -> Any:
    """What a piece has of an optimizer's slot: its stretch where the slot is like the tensor, else all of it."""
    if not isinstance(slot, Tensor):
        return slot
    if slot.shape != whole.shape or piece.length == whole.numel():
        return slot.clone()
    return slot.reshape(-1)[piece.start : piece.stop].clone()


def pack_slots(slots: Mapping[str, Any]) -> tuple[Slots, list[Tensor]]:
    """An optimizer's slots of one piece as plain data, and the tensors among them."""
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
    """The inverse of `pack_slots`, with the tensors as frames; a single number is a tensor, as torch has it."""
    slots: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Shaped):
            slots[name] = tensor_of(next(frames), DTYPES[value.dtype]).clone().view(value.shape)
        else:
            slots[name] = torch.tensor(value, dtype=torch.get_default_dtype())
    return slots


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it must see whole tensors; seen by trying it. One that needs several at once is refused.

    Raises:
        TaskError: It has optimizers inside it, draws random numbers, does not update what its groups hold, or its
            update of one tensor depends on others.
    """
    if isinstance(optimizer, Joined):
        return max(map(needs_whole, optimizer.members))  # which asks all of them: each may be refused
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
    """Return whether an optimizer updates every element by itself, seen by trying it."""
    return all(_agree(optimizer, group, _halves) for group in optimizer.param_groups)


def is_by_tensor(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates every tensor by itself, seen by trying it."""
    return all(_agree(optimizer, group, _alone) for group in optimizer.param_groups)


def draws_numbers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer draws random numbers from torch's generator, seen by trying it."""
    return any(_draws(optimizer, group) for group in optimizer.param_groups)


def _require_movable(optimizer: Optimizer) -> None:
    """Refuses an optimizer that servers cannot move onto their own tensors."""
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
    """Whether steps take numbers from torch's generator."""
    before = torch.get_rng_state()
    try:
        _tried(optimizer, group)
        return not torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(before)


def _moves(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether steps change the tensors that are put in its group, or fail on them."""
    found = _tried(optimizer, group)
    return found is None or not all(torch.equal(after, before) for before, after in zip(*found, strict=True))


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]] | None:
    """Matrices before and after a few steps; None where it cannot take them."""
    start, *gradients = _samples()
    try:
        return start, _walk(optimizer, group, start, gradients)
    except FAILURES:
        return None


def _samples() -> list[list[Tensor]]:
    """Two matrices, and their gradients in a few steps."""
    generator = torch.Generator().manual_seed(0)
    return [list(torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)) for _ in range(NUM_STEPS + 1)]


def _halves(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten()[:7], tensor.flatten()[7:]]


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _agree(optimizer: Optimizer, group: dict[str, Any], split: Callable[[Tensor], list[Tensor]]) -> bool:
    """Whether a few steps on parts end where the same steps on two whole matrices do."""
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
    # A schedule may begin with no learning rate, and then nothing could be seen.
    rate = {} if float(group.get("lr", 1.0)) else {"lr": 0.1}
    twin.param_groups = [{**group, **rate, "params": parameters}]
    # An optimizer that makes its slots at once, as Adagrad does, has them for its own tensors only.
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
