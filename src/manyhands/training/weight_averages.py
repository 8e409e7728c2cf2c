"""An exponential moving average of the weights beside the network, which validation and the run's end use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..distributed import World

HALF = (torch.bfloat16, torch.float16)


class Averages:
    """A moving average of what the optimizers train, and of the batch statistics that belong to it.

    After every step each average moves by `1 - decay` towards its weight; frozen weights and other buffers are those
    of the network. All tensors stay where they are, and a step waits for nothing, so that it can be captured.

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
        # The average of many small moves is lost in half precision.
        self.tensors = {name: _wide(tensor.detach()).clone() for name, tensor in self._live.items()}
        """The averages by name; these very tensors are kept for the whole run."""
        self._pairs = {
            key: ([self.tensors[name] for name in group], list(group.values())) for key, group in held.items()
        }
        names = {tensor: name for name, tensor in self._live.items()}
        self._names = {name: names[t] for name, t in model.state_dict(keep_vars=True).items() if t in names}

    @torch.no_grad()
    def update(self, key: str, mask: Tensor | None = None) -> None:
        """Follows a step of one optimizer; where the flag `mask` on the device is not set, the step was left out."""
        averages, tensors = (list(map(_here, side)) for side in self._pairs[key])
        values = [_wide(tensor) for tensor in tensors]
        if mask is None:
            torch._foreach_lerp_(averages, values, 1 - self.decay)
            return
        # Chosen and not multiplied by zero: what was left out may not be finite.
        for average, moved in zip(averages, torch._foreach_lerp(averages, values, 1 - self.decay), strict=True):
            average.copy_(torch.where(mask, moved, average))

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of the plain module, where a tied weight stands under each of its names."""
        return {name: self.tensors[own] for name, own in self._names.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begins anew from the network's present weights."""
        self.load(self._live)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes averages from elsewhere, such as a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def align(self, world: World) -> None:
        """Gives every replica the first one's averages, where batch statistics are its own."""
        for average in self.tensors.values():
            # Parts of parameters differ between ranks that share one network, and never drift apart.
            if _here(average) is average and not average.is_meta:
                world.broadcast(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network with its averaged weights; its own come back afterwards, in the same memory."""
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
    """What this rank holds of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _statistics(model: nn.Module, groups: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor, str]]:
    """Running statistics with their names and the optimizer of their layer.

    They describe the weights they were measured with, so they are averaged alike; a mask or a table must not be.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.running_var is not None:
            start = f"{path}." if path else ""
            owner = next((key for key, group in groups.items() if f"{start}weight" in group), next(iter(groups)))
            yield f"{start}running_mean", layer.running_mean, owner
            yield f"{start}running_var", layer.running_var, owner
