"""Registry of the updates of stacked networks, by the optimizers that they replace."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from .adam import Adam, AdamW
from .lion import Lion
from .rmsprop import RmsProp
from .sgd import Sgd
from .update import Update

UPDATES: dict[type, type[Update]] = {
    optim.SGD: Sgd,
    optim.Adam: Adam,
    optim.AdamW: AdamW,
    optim.RMSprop: RmsProp,
}
KNOWN = "SGD, Adam, AdamW, RMSprop, Lion"
_LION = {"params", "lr", "betas", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "initial_lr"}
"""Keys of a Lion parameter group. torch has no Lion, so optimizers of that name with only these keys are accepted."""


def update_for(optimizer: Optimizer) -> type[Update] | None:
    """Return the Update class that computes the same as an optimizer, for stacked networks; None if there is none."""
    kind = type(optimizer)
    if kind in UPDATES:
        return UPDATES[kind]
    is_plain = not getattr(optimizer, "decoupled_wd", False)
    if kind.__name__ == "Lion" and is_plain and all(group.keys() <= _LION for group in optimizer.param_groups):
        return Lion
    return None
