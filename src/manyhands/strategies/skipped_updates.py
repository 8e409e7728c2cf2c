"""Optimizer updates that a flag on the device can skip, without synchronizing with the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..graph import CAPTURABLE, skips_on_device


def step_where(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Run an optimizer's step if the flag is set; otherwise leave parameters and state unchanged."""
    if flag is None:
        optimizer.step()
    elif flag.device.type != "cpu" and skips_on_device(optimizer):
        # Fused updates read these two attributes, which torch's gradient scaler sets.
        optimizer.found_inf, optimizer.grad_scale = (~flag).float(), None  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif flag.device.type == "cpu" or type(optimizer) not in CAPTURABLE or not optimizer.state:
        if flag:
            optimizer.step()
    else:
        held = list(_tensors(optimizer))
        before = [tensor.clone() for tensor in held]
        optimizer.step()
        keep_where(flag, held, before)


def keep_where(flag: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Keep the current values of tensors if the flag is set; otherwise restore the previous ones."""
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(flag, tensor, old))


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.detach()
            yield from (slot for slot in optimizer.state[parameter].values() if isinstance(slot, Tensor))
