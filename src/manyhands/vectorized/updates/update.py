"""Update: what an optimizer does to one parameter group, for all members of a stack at once.

Numbers (learning rates, betas, decays) may differ between members: each is a tensor with one entry per member. They
are combined in float64, as torch does with Python numbers, and cast to a parameter's dtype on use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = Mapping[str, Tensor]
"""By name, one entry per member; `count` holds the number of updates before this one."""
Slots = Mapping[str, Sequence[Tensor]]
"""By name, one tensor per parameter."""


class Update(ABC):
    """One parameter group's update; all members have the same flags."""

    numbers: tuple[str, ...]
    """Names of the hyperparameters that may differ between members."""
    flags: tuple[str, ...] = ("maximize",)
    """Names of the flags that must be equal for all members."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.set = {name: bool(group.get(name)) for name in self.flags}

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The state kept for every parameter, by torch's names."""

    @abstractmethod
    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        """Return the multipliers of this update, from the numbers and the count of updates."""

    @abstractmethod
    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        """Update parameters and slots in place; gradients do not change. `decays`: whether any member has weight decay.

        Factors are computed before, because a compiler would otherwise compute their powers for every element.
        """

    @classmethod
    def numbers_of(cls, group: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of the numbers in a parameter group."""
        named = dict(group)
        if "betas" in group:
            named["beta1"], named["beta2"] = group["betas"]
        return {name: float(named[name]) for name in cls.numbers}

    def uphill(self, gradient: Tensor) -> Tensor:
        """Return the gradient for descent: negated if the loss is to be maximized."""
        return -gradient if self.set["maximize"] else gradient


def along(number: Tensor, tensor: Tensor) -> Tensor:
    """Reshape a number per member so that it broadcasts with a stacked tensor."""
    return number.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def decayed(parameter: Tensor, gradient: Tensor, decay: Tensor) -> Tensor:
    """Return a gradient with L2 weight decay added."""
    return torch.addcmul(gradient, parameter, along(decay, parameter))
