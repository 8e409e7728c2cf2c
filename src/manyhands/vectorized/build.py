"""Build the network and optimizer of a stacked task, with the same initial values as if the task were trained alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core import (
    Task,
    TaskError,
    is_scripted,
    mix,
    random_state,
    require_own_memory,
    require_tensor_state,
    restore_random_state,
    seed_all,
    set_training,
)
from .dropout_rates import chances
from .stack import (
    AVERAGES,
    BUFFERS,
    CHANCES,
    CLIP,
    COUNT,
    DECAY,
    FROZEN,
    PARAMETERS,
    SEED,
    STEP,
    VALID_SEED,
    Row,
    turned,
)
from .updates import KNOWN, Update, update_for

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Built:
    """The network of a task, and its optimizer as data: the parameters, settings and update of each parameter group."""

    task: Task
    model: nn.Module
    kind: str
    """The name of the optimizer's class."""
    groups: tuple[tuple[str, ...], ...]
    """The names of the trainable parameters of every parameter group."""
    held: tuple[tuple[str, ...], ...]
    """The names of all parameters of every parameter group, including frozen ones."""
    settings: tuple[dict[str, Any], ...]
    """The hyperparameters of every parameter group."""
    updates: tuple[Update, ...]
    """The update of every parameter group."""

    @property
    def decays(self) -> bool:
        """Whether any parameter group has weight decay."""
        return any(group.get("weight_decay") for group in self.settings)


def build(task: Task, dtype: torch.dtype | None = None) -> Built:
    """Build a task's network and optimizer on the CPU, seeded as if the task were trained alone.

    The random generators are restored. `dtype` is the dtype of the network, by default that of the task.

    Raises:
        TaskError: The network or the optimizer cannot be stacked.
    """
    states = random_state(CPU)
    try:
        seed_all(mix(task.seed, 0))
        model = _made(task, dtype)
        _require_ready(model)
        optimizer = task.make_optimizer(model)
    finally:
        restore_random_state(states, CPU)
    kind = update_for(optimizer)
    if kind is None:
        got = type(optimizer).__name__
        raise TaskError(
            f"optimizers of stacked tasks must be {KNOWN}", got=got, remedy="use one of them, or train the task alone"
        )
    _require_no_hooks(model, optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = tuple(tuple(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups)
    frozen = {name for parameter, name in names.items() if not parameter.requires_grad}
    groups = tuple(tuple(name for name in group if name not in frozen) for group in held)
    settings = tuple(_settings(group) for group in optimizer.param_groups)
    updates = tuple(kind(group) for group in settings)
    return Built(task, model, type(optimizer).__name__, groups, held, settings, updates)


def build_model(task: Task, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a task's network on the CPU with its initial values; the random generators are restored."""
    states = random_state(CPU)
    try:
        seed_all(mix(task.seed, 0))
        return _made(task, dtype)
    finally:
        restore_random_state(states, CPU)


def _made(task: Task, dtype: torch.dtype | None) -> nn.Module:
    model = task.model()
    if dtype is not None:
        # Convert complex tensors to complex, because nn.Module.to would drop the imaginary part.
        wide = dtype.to_complex()
        model._apply(lambda t: t.to(wide if t.is_complex() else dtype if t.is_floating_point() else t.dtype))
    require_tensor_state(model)
    set_training(model)
    return model


def _require_no_hooks(model: nn.Module, optimizer: Any) -> None:
    """Raise TaskError if there are hooks on gradients or on the optimizer, which stacked steps would not call."""
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        hooked.append(f"the step of {type(optimizer).__name__}")
    if hooked:
        raise TaskError(
            "a stacked network must not have hooks on its gradients or its optimizer",
            got=f"a hook on {hooked[0]}",
            remedy="remove the hook, or train the task alone",
        )


@torch.no_grad()
def row_of(built: Built) -> Row:
    """Return all tensors of a member before its first step: its row of a stack."""
    task, model = built.task, built.model
    trained = [name for group in built.groups for name in group]
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    row: Row = {(PARAMETERS, name): parameters[name] for name in trained}
    row |= {(FROZEN, name): tensor for name, tensor in parameters.items() if name not in set(trained)}
    row |= {(BUFFERS, name): buffer for name, buffer in model.named_buffers()}
    for index, (names, update) in enumerate(zip(built.groups, built.updates, strict=True)):
        row |= {(slot, name): torch.zeros_like(parameters[name]) for slot in update.slots for name in names}
        numbers = update.numbers_of(built.settings[index])
        row |= {(name, str(index)): _number(value) for name, value in numbers.items()}
    row |= {(CHANCES, name): _number(chance) for name, chance in chances(model).items()}
    row |= {SEED: _count(mix(task.seed, 0)), VALID_SEED: _count(mix(task.seed, 1)), STEP: _count(0), COUNT: _count(0)}
    row[CLIP] = _number(float("inf") if task.clip is None else task.clip)
    if task.ema is not None:
        row[DECAY] = _number(task.ema)
        row |= {(AVERAGES, name): _wide(tensor) for name, tensor in averaged(built).items()}
    layers = _matrices(model)
    return {key: turned(tensor) if key[1] in layers and tensor.dim() == 2 else tensor for key, tensor in row.items()}


def _matrices(model: nn.Module) -> set[str]:
    """Return the names of parameters that only nn.Linear layers use.

    Their gradients are often transposed in memory. If parameters and state have the same memory order as gradients,
    an update takes half the time.
    """
    holders: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(type(module))
    return {name for name, parameter in model.named_parameters() if holders[id(parameter)] == {nn.Linear}}


def averaged(built: Built) -> dict[str, Tensor]:
    """Return the tensors of which a moving average (ema) is kept: trainable parameters and batch statistics."""
    own = dict(built.model.named_parameters())
    found = {name: own[name].detach() for group in built.groups for name in group}
    for path, layer in built.model.named_modules():
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.running_var is not None:
            start = f"{path}." if path else ""
            found |= {f"{start}running_mean": layer.running_mean, f"{start}running_var": layer.running_var}
    return found


def _require_ready(model: nn.Module) -> None:
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise TaskError(
            "a stacked network must have all its parameters from the start",
            got="lazy layers",
            remedy="pass the input sizes to its lazy layers, or train the task alone",
        )
    require_own_memory(model)
    scripted = [name for name, part in model.named_modules() if is_scripted(part)]
    if scripted:
        raise TaskError(
            "a stacked network must consist of Python modules",
            got=f"{scripted[0] or 'the network'}, which is TorchScript",
            remedy="return the module before it is traced or scripted, or train the task alone",
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in plain.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _count(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)
