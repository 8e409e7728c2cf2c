"""Update of stacked networks by RMSprop, also centred or with momentum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .update import Numbers, Slots, Update, along, decayed


class RmsProp(Update):
    """Computes the update of torch.optim.RMSprop for stacked networks."""

    numbers = ("lr", "momentum", "alpha", "eps", "weight_decay")
    flags = ("centered", "maximize", "momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if self.set["momentum"] else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.set["centered"] else ()))

    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        names = {"alpha": "alpha", "eps": "eps", "momentum": "momentum", "decay": "weight_decay"}
        return {
            **{mine: numbers[name] for mine, name in names.items()},
            "rest": 1 - numbers["alpha"],
            "size": -numbers["lr"],
        }

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            way = self.uphill(gradient)
            if decays:
                way = decayed(parameter, way, factors["decay"])
            square = slots["square_avg"][index]
            square.mul_(along(factors["alpha"], way)).addcmul_(way * along(factors["rest"], way), way)
            if self.set["centered"]:
                mean = slots["grad_avg"][index].lerp_(way, along(factors["rest"], way))
                square = square.addcmul(mean, mean, value=-1)
            scale = square.sqrt().add_(along(factors["eps"], way))
            if self.set["momentum"]:
                buffer = slots["momentum_buffer"][index]
                buffer.mul_(along(factors["momentum"], way)).addcdiv_(way, scale)
                parameter.addcmul_(buffer, along(factors["size"], way))
            else:
                parameter.addcdiv_(way * along(factors["size"], way), scale)
