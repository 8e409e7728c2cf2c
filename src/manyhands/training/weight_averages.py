"""An exponential moving average (EMA) of the weights, used for validation and as the run's result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..distributed import World

HALF = (torch.bfloat16, torch.float16)


class Averages:
    """A moving average of the trained parameters and of the batch statistics that belong to them.

    After every step each average moves by `1 - decay` towards its weight; frozen weights and other buffers are those of
    the network. All tensors keep their memory and an update never synchronizes, so a step can be captured.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> averages = Averages(net, {"": dict(net.named_parameters())}, decay=0.5)
    >>> first = net.weight.item()
    >>> with torch.no_grad():
    ...     _ = net.weight.add_(1.0)
    >>> averages.update("")
    >>> round(averages.tensors["weight"].item() - first, 3)
    0.5
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, Mapping[str, Tensor]], decay: float) -> None:
        self.decay = decay
        held = {key: dict(group) for key, group in groups.items()}
        for name, statistic, key in _statistics(model, groups):
            held[key][name] = statistic
        self._live = {name: tensor for group in held.values() for name, tensor in group.items()}
        # Many small updates would be lost in half precision.
        self.tensors = {name: _wide(tensor.detach()).clone() for name, tensor in self._live.items()}
        """The averages by name; the same tensors are used for the whole run."""
        self._pairs = {
            key: ([self.tensors[name] for name in group], list(group.values())) for key, group in held.items()
        }
        names = {tensor: name for name, tensor in self._live.items()}
        self._names = {name: names[t] for name, t in model.state_dict(keep_vars=True).items() if t in names}

    @torch.no_grad()
    def update(self, key: str, mask: Tensor | None = None) -> None:
        """Update after a step of one optimizer; where the device flag `mask` is False, the step was skipped."""
        averages, tensors = (list(map(_here, side)) for side in self._pairs[key])
        values = [_wide(tensor) for tensor in tensors]
        if mask is None:
            torch._foreach_lerp_(averages, values, 1 - self.decay)
            return
        # Selected instead of multiplied by zero: values of a skipped step may not be finite.
        for average, moved in zip(averages, torch._foreach_lerp(averages, values, 1 - self.decay), strict=True):
            average.copy_(torch.where(mask, moved, average))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the plain module's names; a tied weight appears under each of its names."""
        return {name: self.tensors[own] for name, own in self._names.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the averages to the network's current weights."""
        self.load(self._live)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load averages, for instance from a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def align(self, world: World) -> None:
        """Broadcast the first replica's averages, where batch statistics are local to each replica."""
        for average in self.tensors.values():
            # Shards differ between the ranks of one network and never diverge between replicas.
            if _here(average) is average and not average.is_meta:
                world.broadcast(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the enclosed block with the averaged weights; the network's own are restored in the same memory."""
        own = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            tensor.copy_(tensors[name])


def _here(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a tensor, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _statistics(model: nn.Module, groups: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor, str]]:
    """Yield running statistics with their names and the optimizer of their layer.

    They belong to the weights they were measured with, so they are averaged too; other buffers must not be.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.running_var is not None:
            start = f"{path}." if path else ""
            owner = next((key for key, group in groups.items() if f"{start}weight" in group), next(iter(groups)))
            yield f"{start}running_mean", layer.running_mean, owner
            yield f"{start}running_var", layer.running_var, owner
