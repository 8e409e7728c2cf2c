"""Offload: optimizer state, gradients and activations in host memory, so that a device can train a larger network.

State is moved to the device a few parameters at a time during the update. On a single device gradients are offloaded
too, each as soon as backward has computed it; replicas and shards need theirs for the all-reduce. On a CPU this
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec
from ..distributed import World
from .local_updates import own_part
from .replica import Replica

AT_ONCE = 256 << 20
"""Bytes of parameters whose state is on the device at the same time."""
SMALL = 1 << 20
"""Activations smaller than this many bytes stay on the device."""

Bring = Callable[[nn.Parameter], Tensor | None]


class Parking:
    """An optimizer whose state is in host memory."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._homes: dict[tuple[Tensor, str], Tensor] = {}

    def step(self, bring: Bring) -> None:
        """Update all parameters, a few at a time; `bring` returns the gradient of a parameter."""
        for some in self._chunks():
            for parameter in some:
                parameter.grad = bring(parameter)
                self._fetch(parameter)
            self._optimizer.step()
            for parameter in some:
                parameter.grad = None
                self._park(parameter)
        if self._device.type == "cuda":
            # The state is read next on the host, which must wait for the copies.
            torch.cuda.current_stream(self._device).synchronize()

    def _chunks(self) -> Iterator[list[nn.Parameter]]:
        some: list[nn.Parameter] = []
        size = 0
        for parameter in _parameters(self._optimizer):
            here = own_part(parameter)
            some.append(parameter)
            size += here.numel() * here.element_size()
            if size >= AT_ONCE:
                yield some
                some, size = [], 0
        if some:
            yield some

    def _fetch(self, parameter: nn.Parameter) -> None:
        self._replace(parameter, lambda _, slot: slot.to(self._device, non_blocking=True))

    def _park(self, parameter: nn.Parameter) -> None:
        def home(name: str, slot: Tensor) -> Tensor:
            place = self._homes.get((parameter, name))
            if place is None or place.shape != slot.shape or place.dtype != slot.dtype:
                place = self._homes[parameter, name] = host_like(slot)
            return place.copy_(slot, non_blocking=True)

        self._replace(parameter, home)

    def _replace(self, parameter: nn.Parameter, function: Callable[[str, Tensor], Tensor]) -> None:
        """Replace a parameter's slots by the function's results; scalars stay unchanged."""
        state = self._optimizer.state.get(parameter, {})
        for name, slot in state.items():
            if isinstance(slot, Tensor) and slot.dim():
                moved = function(name, own_part(slot))
                if hasattr(slot, "_local_tensor"):
                    # Keep the DTensor and replace its shard: a new one would be moved to the device of its mesh.
                    slot._local_tensor = moved
                else:
                    state[name] = moved


class OffloadedReplica(Replica):
    """A network on one device, whose gradients are in host memory until the update."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        self._homes: dict[Tensor, Tensor] = {}
        self._offloaded: dict[Tensor, Tensor] = {}
        """Gradients of the current step, by parameter."""
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """The norm and the largest absolute value of each gradient."""
        self._factors: dict[str, Tensor] = {}
        """The factor of gradients when they return to the device."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._leave) for p in self.names if p.requires_grad]

    def _leave(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        if parameter in self._offloaded:
            gradient.add_(self._offloaded[parameter].to(gradient.device, non_blocking=True))
        self._norms[parameter] = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(gradient, float("inf"))
        if parameter not in self._homes:
            self._homes[parameter] = host_like(gradient)
        self._offloaded[parameter] = self._homes[parameter].copy_(gradient, non_blocking=True)
        parameter.grad = None

    def forget(self) -> None:
        super().forget()
        self._offloaded.clear()
        self._norms.clear()
        self._factors.clear()

    def finish(self, key: str, count: Tensor | None) -> None:
        if count is not None:
            self._factors[key] = 1 / count

    def _numbers(self, key: str, which: int) -> Tensor:
        """Return the norms of one optimizer's gradients, or their largest absolute values."""
        found = [self._norms[p][which] for p in self.groups[key].values() if p in self._norms]
        return torch.stack(found) if found else torch.zeros(1, device=self.world.device)

    def clip(self, key: str, max_norm: float) -> Tensor:
        factor = self._factors.get(key, torch.ones((), device=self.world.device))
        norm: Tensor = torch.linalg.vector_norm(self._numbers(key, 0)) * factor
        self._factors[key] = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def is_finite(self, key: str) -> Tensor:
        finite: Tensor = self._numbers(key, 1).isfinite().all()
        return finite

    def bringing(self, key: str) -> Bring:
        factor, stayed = self._factors.pop(key, None), super().bringing(key)
        offloaded = {parameter: self._offloaded.pop(parameter, None) for parameter in self.groups[key].values()}
        for parameter in offloaded:
            self._norms.pop(parameter, None)

        def bring(parameter: nn.Parameter) -> Tensor | None:
            host = offloaded[parameter]
            gradient = stayed(parameter) if host is None else host.to(self.world.device, non_blocking=True)
            return gradient if gradient is None or factor is None else gradient * factor

        return bring

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()


def keeping_on_host(device: torch.device) -> torch.autograd.graph.saved_tensors_hooks:
    """Keep tensors saved for backward in host memory inside this context, except parameters and small tensors."""

    def leave(tensor: Tensor) -> Any:
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.device.type == "cpu" or is_parameter or tensor.numel() * tensor.element_size() < SMALL:
            return tensor
        return host_like(tensor).copy_(tensor, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(leave, lambda kept: kept.to(device, non_blocking=True))


def host_like(tensor: Tensor) -> Tensor:
    """Allocate a tensor in host memory, pinned if the given one is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
