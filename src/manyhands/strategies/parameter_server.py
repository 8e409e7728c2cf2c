"""ParameterServer: a worker's or the chief's network; servers hold its values and take the updates."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from ..cluster import World
from ..core import StrategySpec
from .replica import Replica


class ServedReplica(Replica):
    """A network whose values come from servers."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        self.slots: dict[str, Tensor] = {}
        """What rows of tables remember whose optimizer is of another kind than the task's, as checkpoints keep it."""

    def policy_state(self) -> dict[str, Tensor]:
        return self.slots

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        self.slots = dict(saved)
        return ""
