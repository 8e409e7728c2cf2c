"""The channels_last memory layout, which makes convolutions faster."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def has_convolutions(model: nn.Module) -> bool:
    """Return whether channels_last may make a network faster: it has 2-D convolutions and contiguous 4-D parameters.

    >>> has_convolutions(nn.Conv2d(3, 8, 3)), has_convolutions(nn.Linear(3, 8))
    (True, False)
    """
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    return bool(found) and all(p.is_contiguous() for p in model.parameters() if p.dim() == 4)


def lay_out(model: nn.Module, optimizers: Iterable[Optimizer], *, channels_last: bool) -> None:
    """Convert 4-D parameters and their optimizer state to channels_last, or to the contiguous format, in place.

    >>> net = nn.Conv2d(3, 8, 3)
    >>> lay_out(net, [], channels_last=True)
    >>> net.weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=wanted)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, slot in state.items():
                if isinstance(slot, Tensor) and slot.dim() == 4:
                    state[name] = slot.contiguous(memory_format=wanted)
