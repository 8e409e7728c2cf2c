"""ParameterServer: a worker's or the chief's network; servers hold its values and take the updates."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategySpec, TaskError
from ..distributed import World
from .embedding import Embedding
from .replica import Replica


class ServedReplica(Replica):
    """A network whose values come from servers."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        _require_trained(model, self._untrained)
        for parameter in self._untrained.values():
            # Servers tell by this what is updated, and what is only held.
            parameter.requires_grad_(False)
        self.slots: dict[str, Tensor] = {}
        """What rows of tables remember whose optimizer is of another kind than the task's, as checkpoints keep it."""

    def policy_state(self) -> dict[str, Tensor]:
        return self.slots

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        self.slots = dict(saved)
        return ""


def _require_trained(model: nn.Module, untrained: Mapping[str, Tensor]) -> None:
    """Rows of tables take their settings from the group of the optimizer that holds their table."""
    for name, part in model.named_modules():
        if isinstance(part, Embedding) and any(part.weight is parameter for parameter in untrained.values()):
            raise TaskError(
                "a table on parameter servers is in one of the optimizer's groups",
                got=f"{name}.weight in none",
                remedy="pass it to the optimizer",
            )
