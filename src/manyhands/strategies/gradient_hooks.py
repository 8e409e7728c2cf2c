"""Gradient hooks: the user's hooks on parameters see the complete gradient of a step, as they do on one device.

Autograd calls `parameter.register_hook` and `register_post_accumulate_grad_hook` with what one backward of one rank
adds: the gradient of a part of the batch, or of a part of the parameter. A hook that clamps or reads a norm would
give a different result on each part. So hooks are removed from the parameters and called on the complete gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import StrategyError

if TYPE_CHECKING:
    from .replica import Replica

Hooks = dict[int, Callable[[Tensor], Any]]
_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class GradientHooks:
    """The hooks of a network's parameters, by name; handles that torch returned still remove their hooks."""

    def __init__(self) -> None:
        self._before: dict[str, Hooks] = {}
        self._after: dict[str, Hooks] = {}

    def adopt(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Move the hooks from the parameters into this object."""
        for name, parameter in named:
            for held, attribute in ((self._before, _BEFORE), (self._after, _AFTER)):
                hooks = getattr(parameter, attribute, None)
                if hooks and not held.get(name) and not any(_is_ours(hook) for hook in hooks.values()):
                    held[name] = hooks
                    # None would leave torch's registration of the old hooks in place.
                    setattr(parameter, attribute, OrderedDict())

    @property
    def names(self) -> list[str]:
        """Names of the parameters with hooks."""
        return [name for held in (self._before, self._after) for name, hooks in held.items() if hooks]

    def call(self, replica: Replica, key: str) -> None:
        """Call the hooks of one optimizer's parameters that have a gradient. Collective: all ranks call it.

        Hooks that were registered since the last step are moved too; autograd has not called those on shards.
        """
        named = list(replica.groups[key].items())
        self.adopt((name, p) for name, p in named if hasattr(p, "_local_tensor"))
        for name in self.names:
            parameter = replica.groups[key].get(name)
            if parameter is not None and parameter.grad is not None:
                self._call(replica, name, parameter)
        self.adopt(named)

    def _call(self, replica: Replica, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = replica.whole(parameter.grad, name)
        for hook in list(self._before.get(name, {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        after = list(self._after.get(name, {}).values())
        if after:
            self._call_after(replica, name, parameter, gradient, after)
        else:
            parameter.grad = replica.part_for(gradient, parameter, name)

    def _call_after(
        self, replica: Replica, name: str, parameter: nn.Parameter, gradient: Tensor, hooks: list[Callable[..., Any]]
    ) -> None:
        """Call hooks with a parameter and its gradient; they may change both."""
        whole = replica.whole(parameter.detach(), name)
        is_own = whole.data_ptr() == parameter.data_ptr() and type(parameter) is nn.Parameter
        seen = parameter if is_own else nn.Parameter(whole, parameter.requires_grad)
        seen.grad = gradient
        for hook in hooks:
            hook(seen)
        parameter.grad = None if seen.grad is None else replica.part_for(seen.grad, parameter, name)
        if seen is not parameter:
            with torch.no_grad():
                parameter.copy_(replica.part_for(seen.detach(), parameter, name))


def refuse_hooks(hooks: GradientHooks) -> None:
    """Raise for hooks on parameters if no process has a step's complete gradient before the update."""
    if hooks.names:
        raise StrategyError(
            "under parameter servers, parameters must not have gradient hooks, because a worker has a part of "
            "the gradient only",
            got=f"a hook on {hooks.names[0]}",
            remedy="change the gradient in the optimizer's step, or use mh.Mirrored() or mh.Sharded()",
        )


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("manyhands.")
