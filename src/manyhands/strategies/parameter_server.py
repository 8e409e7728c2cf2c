"""ParameterServer strategy: the network of a worker or of the coordinator; servers hold its values and update them.

Servers, workers and their coordinator are in the package `parameter_server`; this replica is here because
`make_replica` builds the replicas of all strategies.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import StrategyError, StrategySpec, TaskError
from ..distributed import World
from .embedding import Embedding
from .replica import GradientHooks, Replica


class ServedReplica(Replica):
    """A network whose values come from parameter servers."""

    def __init__(self, spec: StrategySpec, world: World, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(spec, world, model, optimizers)
        _require_trained(model, self._untrained)
        for parameter in self._untrained.values():
            # By this flag servers distinguish parameters to update from values that they only hold.
            parameter.requires_grad_(False)
        self.slots: dict[str, Tensor] = {}
        """Optimizer slots of table rows whose optimizer differs from the task's, in the form of checkpoints."""

    def policy_state(self) -> dict[str, Tensor]:
        return self.slots

    def load_policy_state(self, saved: Mapping[str, Tensor]) -> str:
        self.slots = dict(saved)
        return ""


def refuse_hooks(hooks: GradientHooks) -> None:
    """Raise for hooks on parameters if no process has a step's complete gradient before the update."""
    if hooks.names:
        raise StrategyError(
            "under parameter servers, parameters must not have gradient hooks, because a worker has a part of "
            "the gradient only",
            got=f"a hook on {hooks.names[0]}",
            remedy="change the gradient in the optimizer's step, or use mh.Mirrored() or mh.Sharded()",
        )


def _require_trained(model: nn.Module, untrained: Mapping[str, Tensor]) -> None:
    """Raise for a table in no optimizer: its rows take their settings from the parameter group that holds it."""
    for name, part in model.named_modules():
        if isinstance(part, Embedding) and any(part.weight is parameter for parameter in untrained.values()):
            raise TaskError(
                "an mh.strategies.Embedding on parameter servers must be in one of the optimizer's parameter groups",
                got=f"{name}.weight in none",
                remedy="pass it to the optimizer",
            )
