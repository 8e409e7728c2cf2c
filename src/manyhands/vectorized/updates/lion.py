"""Update of stacked networks by Lion: the sign of a mixture of momentum and gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .update import Numbers, Slots, Update, along


class Lion(Update):
    """Computes the update of Lion for stacked networks, as in its authors' code and in the common packages."""

    numbers = ("lr", "beta1", "beta2", "weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def factors(self, numbers: Numbers) -> dict[str, Tensor]:
        rate = numbers["lr"]
        return {
            "kept": 1 - rate * numbers["weight_decay"],
            "size": -rate,
            "rest1": 1 - numbers["beta1"],
            "rest2": 1 - numbers["beta2"],
        }

    def apply(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], slots: Slots, factors: Numbers, decays: bool
    ) -> None:
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            momentum, way = slots["exp_avg"][index], self.uphill(gradient)
            if decays:
                parameter.mul_(along(factors["kept"], parameter))
            sign = momentum.lerp(way, along(factors["rest1"], way)).sign_()
            parameter.addcmul_(sign, along(factors["size"], way))
            momentum.lerp_(way, along(factors["rest2"], way))
