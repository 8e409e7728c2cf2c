"""What a policy remembers of a bucket from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class PolicyMemory:
    """Feedback and other state of some parameters, laid out as their gradients are."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        # Only how they lie is kept, not they.
        self._parameters = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
        self.shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        """The shapes of the parameters whose gradients lie one after another in the flat one."""
        self.sizes = [parameter.numel() for parameter in self._parameters.values()]
        first = next(iter(parameters.values()))
        self.feedback = torch.zeros(sum(self.sizes), dtype=wide(first.dtype), device=first.device)
        """What this replica has not sent yet; it is added to its next gradient. A lossy policy must set it."""
        self.shared: dict[str, Tensor] = {}
        """Whatever else a policy keeps, by name; equal on all replicas."""
        self._rooms: dict[str, Tensor] = {}
        self.num_steps = 0
        """Steps that were taken, those of the warm-up included."""

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to compute in, the same in every step: on a CPU fresh memory costs more than what is done in it."""
        held = self._rooms.get(name)
        if held is None or held.shape != torch.Size(shape) or held.dtype != dtype:
            held = self._rooms[name] = torch.empty(shape, dtype=dtype, device=self.feedback.device)
        return held

    def feedback_by_name(self) -> dict[str, Tensor]:
        """The feedback in the shapes of the parameters: views, not copies."""
        parts = zip(self._parameters.items(), self.feedback.split(self.sizes), strict=True)
        return {name: lay_like(parameter, part) for (name, parameter), part in parts}

    def take_over(self, feedback: Mapping[str, Tensor], shared: Mapping[str, Tensor], num_steps: int) -> None:
        """Goes on from what another memory knew of the same parameters, however they lie there."""
        self.num_steps = num_steps
        for name, mine in self.feedback_by_name().items():
            if name in feedback and feedback[name].shape == mine.shape:
                mine.copy_(feedback[name])
        self.shared |= {
            key: value.to(self.feedback.device) for key, value in shared.items() if _parameter(key) in self.shapes
        }


def key_of(kind: str, parameter: str) -> str:
    """The name of something shared that belongs to a parameter.

    >>> key_of("q", "layer.weight")
    'q/layer.weight'
    """
    return f"{kind}/{parameter}"


def _parameter(key: str) -> str:
    return key.partition("/")[2]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which policies compute: at least single."""
    return torch.promote_types(dtype, torch.float32)


def lay_like(parameter: Tensor, part: Tensor) -> Tensor:
    """A part of a flat buffer in the shape of a parameter, and laid out like it where that fills the part."""
    if parameter.is_contiguous(memory_format=torch.channels_last) and parameter.dim() == 4:
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view_as(parameter)
