"""The state that a policy keeps for a bucket from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class PolicyMemory:
    """Error feedback and other state of some parameters, laid out like their gradients."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        # Keep only the memory layout, not the parameters.
        self._parameters = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        """The shapes of the parameters whose gradients are concatenated in the flat one."""
        self.sizes = [parameter.numel() for parameter in self._parameters.values()]
        first = next(iter(parameters.values()))
        self.feedback = torch.zeros(sum(self.sizes), dtype=wide(first.dtype), device=first.device)
        """Error feedback: what this replica has not sent yet, added to its next gradient; lossy policies set it."""
        self.shared: dict[str, Tensor] = {}
        """Other state of a policy, by name; equal on all replicas."""
        self._buffers: dict[str, Tensor] = {}
        self.num_steps = 0
        """Number of steps, including those of the warm-up."""

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a scratch tensor, reused in every step: on a CPU, allocating memory costs more than using it."""
        held = self._buffers.get(name)
        if held is None or held.shape != torch.Size(shape) or held.dtype != dtype:
            held = self._buffers[name] = torch.empty(shape, dtype=dtype, device=self.feedback.device)
        return held

    def feedback_by_name(self) -> dict[str, Tensor]:
        """Return the feedback in the shapes of the parameters: views, not copies."""
        parts = zip(self._parameters.items(), self.feedback.split(self.sizes), strict=True)
        return {name: lay_like(parameter, part) for (name, parameter), part in parts}

    def take_over(self, feedback: Mapping[str, Tensor], shared: Mapping[str, Tensor], num_steps: int) -> None:
        """Restore the state of the same parameters from another memory, whatever their layout there."""
        self.num_steps = num_steps
        for name, mine in self.feedback_by_name().items():
            if name in feedback and feedback[name].shape == mine.shape:
                mine.copy_(feedback[name])
        self.shared |= {
            key: value.to(self.feedback.device) for key, value in shared.items() if _parameter(key) in self.shapes
        }


def key_of(kind: str, parameter: str) -> str:
    """Return the name of shared state that belongs to a parameter.

    >>> key_of("q", "layer.weight")
    'q/layer.weight'
    """
    return f"{kind}/{parameter}"


def _parameter(key: str) -> str:
    return key.partition("/")[2]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which policies compute: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def lay_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a part of a flat buffer in the shape of a parameter, with its strides if it is channels_last."""
    if parameter.is_contiguous(memory_format=torch.channels_last) and parameter.dim() == 4:
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view_as(parameter)
