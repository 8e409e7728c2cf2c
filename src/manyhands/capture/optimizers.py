"""Optimizers: fused updates where torch has them, and updates that can be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

FUSED = (optim.Adam, optim.AdamW, optim.SGD)
"""Optimizers with a fused update, which can also be skipped on the device."""
FUSED_ON_CPU = (optim.Adam, optim.AdamW, optim.Adagrad)
"""Optimizers that are faster with a fused update on a CPU.

SGD gains little, and its update cannot be fused if only some of the parameters have been updated before.
"""
CAPTURABLE = (*FUSED, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adadelta)
"""Optimizers that read their learning rate and step counters on the device, so that they can be captured.

The other optimizers of torch would fix a value in the graph: ASGD and Rprop the learning rate, Adagrad the counter.
"""


def make_capturable(optimizer: Optimizer) -> str:
    """Prepare an optimizer's update for CUDA graph capture; return why that is impossible, or "".

    The mathematics stay the same: learning rates become tensors, step counters move to the device, and the fused update
    is used unless the user chose another one.
    """
    reason = _reason_against(optimizer)
    if reason:
        return reason
    fused = isinstance(optimizer, FUSED) and _fuses(optimizer)
    for group in (*optimizer.param_groups, optimizer.defaults):
        if fused:
            group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            group["capturable"] = True
        group["lr"] = _on_device(group["lr"], optimizer)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = _on_device(state["step"], optimizer)
    return ""


def fuse_on_cpu(optimizer: Optimizer) -> None:
    """Enable an optimizer's fused update on the CPU, which reads and writes each parameter once.

    Nothing changes if the optimizer has none, if its parameters do not allow it, or if the user chose an update.
    """
    if type(optimizer) not in FUSED_ON_CPU:
        return
    groups = optimizer.param_groups
    if any(group["fused"] is not None or group["foreach"] is not None or group["differentiable"] for group in groups):
        return
    parameters = [p for group in groups for p in group["params"]]
    # A sharded tensor is not a plain parameter.
    if all(type(p) is nn.Parameter and p.device.type == "cpu" and p.is_floating_point() for p in parameters):
        for group in groups:
            group["fused"] = True
        optimizer.register_step_pre_hook(match_strides)


def match_strides(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give gradients and state the strides of their parameter, as the fused update iterates over memory.

    A hook that runs before each step of a fused optimizer. If strides cannot be matched, the group is not fused.
    """
    for group in optimizer.param_groups:
        if not group["fused"]:
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or not (parameter.is_contiguous() or _is_dense(parameter)):
                group["fused"] = None
                break
            if gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            for name, slot in optimizer.state[parameter].items():
                if isinstance(slot, Tensor) and slot.dim() and slot.stride() != parameter.stride():
                    optimizer.state[parameter][name] = torch.empty_like(parameter, dtype=slot.dtype).copy_(slot)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a contiguous part of memory in some order, without overlap."""
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether a flag on the device can make an optimizer skip its update, as is possible with fused updates."""
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


def _reason_against(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if type(optimizer) not in CAPTURABLE:
        return f"the update of {name} is not known to work in a CUDA graph"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has custom hooks around its update"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.device.type != "cuda" for p in parameters):
        return "a parameter is not on the GPU"
    if type(optimizer) is optim.SGD and not _fuses(optimizer):
        return "SGD reads its learning rate on the host unless it is fused"
    return ""


def _fuses(optimizer: Optimizer) -> bool:
    """Return whether the fused update can be used: the user chose no other one, and it supports the parameters."""
    chosen = [group.get("fused") is not False and not group.get("foreach") for group in optimizer.param_groups]
    kinds = [p.is_floating_point() and not p.is_complex() for group in optimizer.param_groups for p in group["params"]]
    return all(chosen) and all(kinds)


def _on_device(value: Any, optimizer: Optimizer) -> Tensor:
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    return torch.full((), float(value), dtype=torch.float32, device=device)
