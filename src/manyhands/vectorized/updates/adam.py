"""Updates of stacked networks by Adam and AdamW, with or without AMSGrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .update import Numbers, Slots, Update, along, decayed


class Adam(Update):
    """Computes the update of torch.optim.Adam for stacked networks; with `decoupled_weight_decay`, that of AdamW."""

    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay")
    flags = ("amsgrad", "maximize", "decoupled_weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.set["amsgrad"] else ()))

    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        rate, beta1, beta2, count = numbers["lr"], numbers["beta1"], numbers["beta2"], numbers["count"] + 1
        decay = numbers["weight_decay"]
        return {
            "kept": 1 - rate * decay,
            "decay": decay,
            "rest1": 1 - beta1,
            "beta2": beta2,
            "rest2": 1 - beta2,
            "root": (1 - beta2**count).sqrt(),
            "eps": numbers["eps"],
            "size": -rate / (1 - beta1**count),
        }

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            first, second = slots["exp_avg"][index], slots["exp_avg_sq"][index]
            way = self.uphill(gradient)
            if decays and self.set["decoupled_weight_decay"]:
                parameter.mul_(along(factors["kept"], parameter))
            elif decays:
                way = decayed(parameter, way, factors["decay"])
            first.lerp_(way, along(factors["rest1"], way))
            second.mul_(along(factors["beta2"], way)).addcmul_(way * along(factors["rest2"], way), way)
            if self.set["amsgrad"]:
                largest = slots["max_exp_avg_sq"][index]
                second = largest.copy_(torch.maximum(largest, second))
            scale = second.sqrt().div_(along(factors["root"], way)).add_(along(factors["eps"], way))
            parameter.addcdiv_(first * along(factors["size"], way), scale)


class AdamW(Adam):
    """Computes the update of torch.optim.AdamW for stacked networks: Adam with decoupled weight decay."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__({**group, "decoupled_weight_decay": True})
