"""Base class of updates: an optimizer's update of one parameter group, for all stacked networks (members) at once.

Hyperparameters that are numbers (learning rates, betas, decays) may differ between members: each is a tensor with one
entry per member. They are combined in float64, as torch does with Python numbers, and cast to the parameter's dtype on
use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = Mapping[str, Tensor]
"""Hyperparameters by name, as tensors with one entry per member; `count` is the number of earlier updates."""
Slots = Mapping[str, Sequence[Tensor]]
"""Optimizer state by name, as one stacked tensor per parameter."""


class Update(ABC):
    """Base class of updates of one parameter group of stacked networks, with the flags of `group`."""

    numbers: tuple[str, ...]
    """Names of the hyperparameters that may differ between members."""
    flags: tuple[str, ...] = ("maximize",)
    """Names of the flags that must be equal for all members."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.set = {name: bool(group.get(name)) for name in self.flags}

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the state that is kept for every parameter, as in torch's optimizer."""

    @abstractmethod
    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        """Return the factors of this update (tensors with one entry per member) from the hyperparameters.

        They are computed outside of `apply`, because a compiler would otherwise compute powers for every element.
        """

    @abstractmethod
    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        """Update parameters and optimizer state in place; gradients must not change.

        Args:
            parameters: Stacked parameters of the group.
            gradients: Their gradients.
            slots: Their optimizer state.
            factors: The result of `factors`.
            decays: Whether any member has weight decay.
        """

    @classmethod
    def numbers_of(cls, group: Mapping[str, Any]) -> dict[str, float]:
        """Return the hyperparameters named in `numbers` from an optimizer's parameter group."""
        named = dict(group)
        if "betas" in group:
            named["beta1"], named["beta2"] = group["betas"]
        return {name: float(named[name]) for name in cls.numbers}

    def uphill(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the quantity to minimize: negated if the optimizer has `maximize=True`."""
        return -gradient if self.set["maximize"] else gradient


def along(number: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with one number per member in the dtype of a stacked tensor, with which it then broadcasts."""
    return number.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def decayed(parameter: Tensor, gradient: Tensor, decay: Tensor) -> Tensor:
    """Return a gradient with L2 weight decay added."""
    return torch.addcmul(gradient, parameter, along(decay, parameter))
