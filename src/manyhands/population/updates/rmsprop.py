"""RMSprop, centred or with momentum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .update import Numbers, Slots, Update, along, decayed


class RmsProp(Update):
    """torch.optim.RMSprop."""

    numbers = ("lr", "momentum", "alpha", "eps", "weight_decay")
    flags = ("centered", "maximize", "momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if self.set["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.set["centered"] else ()))

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, numbers: Numbers, decays: bool
    ) -> None:
        rest = 1 - numbers["alpha"]
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            way = self.uphill(gradient)
            if decays:
                way = decayed(parameter, way, numbers["weight_decay"])
            square = slots["square_avg"][index]
            square.mul_(along(numbers["alpha"], way)).addcmul_(way * along(rest, way), way)
            if self.set["centered"]:
                mean = slots["grad_avg"][index].lerp_(way, along(rest, way))
                square = square.addcmul(mean, mean, value=-1)
            scale = square.sqrt().add_(along(numbers["eps"], way))
            if self.set["momentum"]:
                buffer = slots["momentum_buffer"][index]
                buffer.mul_(along(numbers["momentum"], way)).addcdiv_(way, scale)
                parameter.addcmul_(buffer, along(-numbers["lr"], way))
            else:
                parameter.addcdiv_(way * along(-numbers["lr"], way), scale)
