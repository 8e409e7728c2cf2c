"""Adam and AdamW, with or without AMSGrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .update import Numbers, Slots, Update, along, decayed


class Adam(Update):
    """torch.optim.Adam; AdamW is the same with weights that decay by themselves."""

    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay")
    flags = ("amsgrad", "maximize", "decoupled_weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.set["amsgrad"] else ()))

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, numbers: Numbers, decays: bool
    ) -> None:
        rate, beta1, beta2, count = numbers["lr"], numbers["beta1"], numbers["beta2"], numbers["count"] + 1
        size = rate / (1 - beta1**count)
        root = (1 - beta2**count).sqrt()
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            first, second = slots["exp_avg"][index], slots["exp_avg_sq"][index]
            way = self.uphill(gradient)
            if decays and self.set["decoupled_weight_decay"]:
                parameter.mul_(along(1 - rate * numbers["weight_decay"], parameter))
            elif decays:
                way = decayed(parameter, way, numbers["weight_decay"])
            first.lerp_(way, along(1 - beta1, way))
            second.mul_(along(beta2, way)).addcmul_(way * along(1 - beta2, way), way)
            if self.set["amsgrad"]:
                largest = slots["max_exp_avg_sq"][index]
                second = largest.copy_(torch.maximum(largest, second))
            scale = second.sqrt().div_(along(root, way)).add_(along(numbers["eps"], way))
            parameter.addcdiv_(first * along(-size, way), scale)


class AdamW(Adam):
    """torch.optim.AdamW."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__({**group, "decoupled_weight_decay": True})
