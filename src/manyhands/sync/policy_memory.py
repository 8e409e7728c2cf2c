"""The state that a sync policy keeps for a bucket from one step to the next: error feedback and scratch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class PolicyMemory:
    """The state of a sync policy for the parameters of one bucket: error feedback, shared state, scratch tensors."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        # Keep only the memory layout, not the parameters.
        self._parameters = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        """The shapes of the bucket's parameters, by name, in the order of their parts in the flat gradient."""
        self.sizes = [parameter.numel() for parameter in self._parameters.values()]
        first = next(iter(parameters.values()))
        self.feedback = torch.zeros(sum(self.sizes), dtype=wide(first.dtype), device=first.device)
        """Error feedback: the part of the gradients that this replica has not sent yet, added to its next gradient."""
        self.shared: dict[str, Tensor] = {}
        """Other state of the policy, by `key_of`; equal on all replicas."""
        self._buffers: dict[str, Tensor] = {}
        self.num_steps = 0
        """Number of steps, including those of the warm-up."""

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized scratch tensor, the same one in every step with the same arguments.

        On a CPU, allocating memory takes longer than using it.
        """
        held = self._buffers.get(name)
        if held is None or held.shape != torch.Size(shape) or held.dtype != dtype:
            held = self._buffers[name] = torch.empty(shape, dtype=dtype, device=self.feedback.device)
        return held

    def feedback_by_name(self) -> dict[str, Tensor]:
        """Return the error feedback of each parameter, in its shape; the tensors are views, not copies."""
        parts = zip(self._parameters.items(), self.feedback.split(self.sizes), strict=True)
        return {name: lay_like(parameter, part) for (name, parameter), part in parts}

    def take_over(self, feedback: Mapping[str, Tensor], shared: Mapping[str, Tensor], num_steps: int) -> None:
        """Restore state of these parameters by name, for example from buckets with other boundaries.

        Entries of other parameters, and feedback of another shape, are ignored.
        """
        self.num_steps = num_steps
        for name, mine in self.feedback_by_name().items():
            if name in feedback and feedback[name].shape == mine.shape:
                mine.copy_(feedback[name])
        self.shared |= {
            key: value.to(self.feedback.device) for key, value in shared.items() if _parameter(key) in self.shapes
        }


def key_of(kind: str, parameter: str) -> str:
    """Return the key in `PolicyMemory.shared` for one kind of state of a parameter.

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
    """Return a view of a part of a flat buffer, with the parameter's shape, and its strides if it is channels_last."""
    if parameter.is_contiguous(memory_format=torch.channels_last) and parameter.dim() == 4:
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view_as(parameter)
