"""Run elementwise optimizer updates on the local shards of DTensors.

Torch would dispatch every operation of the update as a DTensor operation, which takes longer than a small update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from ..capture import match_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BY_ELEMENT = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


@contextmanager
def on_own_parts(optimizer: Optimizer, *, by_element: bool) -> Iterator[None]:
    """Replace an elementwise optimizer's parameters, gradients and state by their local shards inside this context."""
    groups = optimizer.param_groups
    sharded: list[Any] = [
        p for group in groups for p in group["params"] if type(p) is not nn.Parameter and hasattr(p, "_local_tensor")
    ]
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    # A user's hook on the optimizer must see the DTensors.
    if not sharded or not by_element or any(hook is not match_strides for hook in hooks):
        yield
        return
    held, state = [group["params"] for group in groups], optimizer.state
    own = {parameter: _own(parameter) for parameter in sharded}
    before = {parameter: state.pop(parameter) for parameter in sharded if parameter in state}
    for parameter, slots in before.items():
        state[own[parameter]] = {name: own_part(slot) for name, slot in slots.items()}
    for group in groups:
        group["params"] = [own.get(parameter, parameter) for parameter in group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters
        for parameter in sharded:
            mine = own[parameter]
            if mine in state:
                known = before.get(parameter, {})
                slots = state.pop(mine).items()
                state[parameter] = {name: _kept(slot, known.get(name), parameter, mine) for name, slot in slots}


def own_part(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor, in the same memory; any other value is returned as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def parted(part: Tensor, like: Any) -> DTensor:
    """Wrap a local shard as a DTensor with the layout of another one."""
    whole = {"shape": like.shape, "stride": like.stride()}
    made: DTensor = type(like).from_local(part, like.device_mesh, like.placements, **whole)
    return made


def _own(parameter: Any) -> nn.Parameter:
    mine = nn.Parameter(own_part(parameter), requires_grad=parameter.requires_grad)
    mine.grad = own_part(parameter.grad)
    return mine


def _kept(slot: Any, known: Any, parameter: Any, mine: Tensor) -> Any:
    """Return an optimizer slot after an update, as a DTensor if it has one element per element of the shard."""
    if own_part(known) is slot:
        return known
    has_all = isinstance(slot, Tensor) and slot.shape == mine.shape and parameter.dim() > 0
    return parted(slot, parameter) if has_all else slot
