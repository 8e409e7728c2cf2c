"""Buffers: what a network remembers beside its parameters, put back after something was only tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """What puts a network's buffers back as they are now, also those that were replaced by other tensors since."""
    import torch

    held = [
        (m._buffers, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]

    def put_back() -> None:
        with torch.no_grad():
            for own, name, buffer, before in held:
                own[name] = buffer
                buffer.copy_(before)

    return put_back
