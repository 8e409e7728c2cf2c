"""Update of stacked networks by SGD: plain, with momentum or with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .update import Numbers, Slots, Update, along, decayed


class Sgd(Update):
    """Computes the update of torch.optim.SGD for stacked networks."""

    numbers = ("lr", "momentum", "dampening", "weight_decay")
    flags = ("nesterov", "maximize", "momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.set["momentum"] else ()

    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        return {
            "momentum": numbers["momentum"],
            "decay": numbers["weight_decay"],
            # As in torch, dampening does not apply to the first gradient.
            "taken": torch.where(numbers["count"] == 0, 1.0, 1.0 - numbers["dampening"]),
            "size": -numbers["lr"],
        }

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            way = self.uphill(gradient)
            if decays:
                way = decayed(parameter, way, factors["decay"])
            if self.set["momentum"]:
                buffer, momentum = slots["momentum_buffer"][index], along(factors["momentum"], parameter)
                buffer.mul_(momentum).addcmul_(way, along(factors["taken"], way))
                way = torch.addcmul(way, buffer, momentum) if self.set["nesterov"] else buffer
            parameter.addcmul_(way, along(factors["size"], way))
