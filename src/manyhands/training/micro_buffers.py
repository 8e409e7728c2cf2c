"""Buffers under accumulation: what the forward of each micro-batch changes, joined to what the whole batch would do.

Every micro-batch starts from the buffers that the step started from. What comes out is averaged by samples, which is
exact where a buffer follows a mean over samples (a running mean) or no samples at all (the vectors of a spectral norm,
a counter of steps). Batch statistics of torch's own layers are left alone: they follow one micro-batch after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SMALL = 1 << 14
"""Elements up to which a buffer is copied in every step."""


@dataclass
class _Buffer:
    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    first: Tensor
    """Its value when the step began."""
    total: Tensor | None = None
    """The sum over micro-batches, weighed by their samples; the last value of a buffer that holds no fractions."""

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() <= SMALL

    @property
    def is_changed(self) -> bool:
        return self.owner.get(self.name) is not self.tensor or self.tensor._version != self.version


class MicroBuffers:
    """The buffers of a network during the micro-batches of one step after another.

    >>> net = nn.Module()
    >>> net.register_buffer("mean", torch.zeros(1))
    >>> buffers = MicroBuffers(net)
    >>> buffers.begin()
    >>> for value, size in ((2.0, 1), (8.0, 2)):
    ...     _ = net.mean.add_(value)
    ...     buffers.end(size)
    >>> buffers.settle()
    >>> net.mean
    tensor([6.])
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if not isinstance(layer, _BatchNorm)]
        self._places = [
            (layer._buffers, name) for layer in layers for name, buffer in layer._buffers.items() if buffer is not None
        ]
        self._held: list[_Buffer] = []
        self._samples = 0

    def begin(self) -> None:
        """Remember the buffers at the beginning of a step."""
        self._samples = 0
        self._held = []
        for owner, name in self._places:
            tensor = owner[name]
            if tensor is not None and not tensor.is_meta:
                self._held.append(_Buffer(owner, name, tensor, tensor._version, tensor.clone()))

    @torch.no_grad()
    def end(self, size: int) -> None:
        """Take what a micro-batch of so many samples made of them, and put back what the step began with."""
        changed = [held for held in self._held if held.is_changed]
        if not self._samples and size:
            # Large buffers are mostly constants, so the next steps copy only those of them that this one has changed.
            self._places = [(held.owner, held.name) for held in self._held if held.is_changed or held.is_small]
        self._samples += size
        for held in changed:
            value = held.owner[held.name]
            if size and value is not None:
                held.total = _added(held.total, value, size)
            held.owner[held.name] = held.tensor
            held.tensor.copy_(held.first)
            held.version = held.tensor._version

    @torch.no_grad()
    def settle(self) -> None:
        """Give the buffers the values of the whole batch."""
        for held in self._held:
            if held.total is not None:
                is_mean = held.total.is_floating_point() or held.total.is_complex()
                held.tensor.copy_(held.total / self._samples if is_mean else held.total)
        self._held = []


def _added(total: Tensor | None, value: Tensor, size: int) -> Tensor:
    if not (value.is_floating_point() or value.is_complex()):
        return value.clone()
    return value * size if total is None else total + value * size
