"""Which update belongs to which optimizer."""

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
"""Keys of a Lion parameter group; torch has no Lion, so it is recognized by its name and these keys."""


def update_for(optimizer: Optimizer) -> type[Update] | None:
    """Return the update that computes what this optimizer does; None if none is known."""
    kind = type(optimizer)
    if kind in UPDATES:
        return UPDATES[kind]
    is_plain = not getattr(optimizer, "decoupled_wd", False)
    if kind.__name__ == "Lion" and is_plain and all(group.keys() <= _LION for group in optimizer.param_groups):
        return Lion
    return None
