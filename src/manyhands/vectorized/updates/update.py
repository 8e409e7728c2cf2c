"""Update: what an optimizer does to one parameter group, for all members of a stack at once.

Numbers (learning rates, betas, decays) may differ between members: each is a tensor with one entry per member. They
are combined in float64, as torch does with Python's numbers, and take a parameter's dtype when they meet it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = Mapping[str, Tensor]
"""By name, one entry per member; `count` holds the updates that were taken before this one."""
Slots = Mapping[str, Sequence[Tensor]]
"""By name, one tensor per parameter."""


class Update(ABC):
    """One parameter group's update; all members have the same flags."""

    numbers: tuple[str, ...]
    """What may differ between members."""
    flags: tuple[str, ...] = ("maximize",)
    """What must not."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.set = {name: bool(group.get(name)) for name in self.flags}

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The state that it keeps of every parameter, by torch's own names."""

    @abstractmethod
    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        """What tensors are multiplied by in this update, from the numbers and the count of updates."""

    @abstractmethod
    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        """Changes parameters and slots in place; gradients stay. `decays`: some member's weights do.

        Factors are made before, and not element by element: a compiler would put their powers into the same loop.
        """

    @classmethod
    def numbers_of(cls, group: Mapping[str, Any]) -> dict[str, float]:
        """What a parameter group says of the numbers."""
        named = dict(group)
        if "betas" in group:
            named["beta1"], named["beta2"] = group["betas"]
        return {name: float(named[name]) for name in cls.numbers}

    def uphill(self, gradient: Tensor) -> Tensor:
        """A gradient to go down by, also where the loss is to be made large."""
        return -gradient if self.set["maximize"] else gradient


def along(number: Tensor, tensor: Tensor) -> Tensor:
    """A number of every member, ready to meet a tensor of them."""
    return number.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def decayed(parameter: Tensor, gradient: Tensor, decay: Tensor) -> Tensor:
    """A gradient with the weights' pull towards zero."""
    return torch.addcmul(gradient, parameter, along(decay, parameter))
