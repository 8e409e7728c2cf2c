"""Watch: values in Python that a step depends on. A recording would go on with those of its first time."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, tuple)
_RATES = ("lr", "initial_lr")
"""These are tensors, or put back to be: a recording reads them anew."""
MAX_FUNCTIONS = 100
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Watch:
    """Looks at numbers, flags and lengths that a network, a loss function and optimizers hold.

    >>> class Net(nn.Module):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x
    >>> net = Net()
    >>> watch = Watch(net, lambda model, batch: model(batch), [])
    >>> net(torch.zeros(1)).shape
    torch.Size([1])
    >>> watch.changed()
    'Net.calls'
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], optimizers: Iterable[Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        forwards = {type(module).forward for module in model.modules() if _is_theirs(type(module))}
        self._functions = _reached([function, *forwards])
        self._seen = self._values()
        self._drawn = _drawn()
        self._hold()

    def changed(self) -> str:
        """The first value that is not what it was at the last look, by name; "" where none is."""
        before, self._seen = self._seen, self._values()
        self._hold()
        if self._seen == before:
            return ""
        names = [name for name in {**before, **self._seen} if before.get(name, "") != self._seen.get(name, "")]
        return names[0]

    def is_same(self) -> bool:
        """A quick look, for every step: the flags and numbers of modules, parameters and optimizers."""
        for values, size, held in self._held:
            if len(values) != size:
                return False
            for key, value in held:
                if values.get(key) is not value:
                    return False
        return [p.requires_grad for p in self._parameters] == self._flags

    def _hold(self) -> None:
        owners = [vars(module) for module in self._model.modules()]
        owners += [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._held = [
            (owner, len(owner), [(k, v) for k, v in owner.items() if isinstance(v, _SCALARS) and k not in _RATES])
            for owner in owners
        ]
        self._parameters = list(self._model.parameters())
        self._flags = [p.requires_grad for p in self._parameters]

    def drew(self) -> str:
        """Which generator on the host gave numbers since the last look; "" if none."""
        before, self._drawn = self._drawn, _drawn()
        return next((name for name in before if before[name] != self._drawn[name]), "")

    def hooked(self) -> str:
        """A module with a hook of the person's own, which a recording would not run; "" if there is none."""
        for name, module in self._model.named_modules():
            hooks = [hook for kind in _HOOKS for hook in (getattr(module, kind, None) or {}).values()]
            if any(_is_theirs(hook) for hook in hooks):
                return name or type(module).__name__
        return ""

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            prefix = f"{type(module).__name__}{f' {name!r}' if name else ''}."
            for key, value in vars(module).items():
                if not key.startswith("_"):
                    values.update(_facts(prefix + key, value))
        values.update((f"{n}.requires_grad", p.requires_grad) for n, p in self._model.named_parameters())
        for function in self._functions:
            for name, value in _names_of(function):
                values.update(_facts(name, value, deep=True))
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key not in ("params", *_RATES):
                        values.update(_facts(f"optimizer {number}, group {index}: {key}", value))
        return values


def _facts(name: str, value: Any, *, deep: bool = False) -> Iterator[tuple[str, Any]]:
    """What can be compared cheaply: scalars, lengths, and the scalars of a small object."""
    if isinstance(value, _SCALARS):
        yield name, value
    elif isinstance(value, _CONTAINERS):
        yield f"{name} (its length)", len(value)
        items = value.items() if isinstance(value, dict) else enumerate(value) if len(value) <= 64 else ()
        if not isinstance(value, set):
            yield from ((f"{name}[{key!r}]", item) for key, item in items if isinstance(item, _SCALARS))
    elif deep and not isinstance(value, (nn.Module, torch.Tensor, types.ModuleType)) and hasattr(value, "__dict__"):
        yield from ((f"{name}.{key}", item) for key, item in vars(value).items() if isinstance(item, _SCALARS))


def _reached(functions: list[Any]) -> list[Any]:
    """These functions and those of the person's own that they call by a global name."""
    found: list[Any] = []
    waiting = list(functions)
    while waiting and len(found) < MAX_FUNCTIONS:
        function = waiting.pop(0)
        if function not in found:
            found.append(function)
            waiting += [value for _, value in _names_of(function, calls=True)]
    return found


def _is_theirs(value: Any) -> bool:
    """Whether a class or function is the person's own."""
    home = getattr(value, "__module__", "") or ""
    return home.split(".")[0] not in ("torch", "manyhands", "builtins", "numpy", "random", "math")


def _names_of(function: Any, *, calls: bool = False) -> Iterator[tuple[str, Any]]:
    """The values that a function reaches by closure, global name, or as a method of an object; or what it calls."""
    function = getattr(function, "func", function)
    owner = getattr(function, "__self__", None)
    if owner is not None and not calls:
        yield "self", owner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    scope: Mapping[str, Any] = getattr(function, "__globals__", {})
    reached = [(name, scope[name]) for name in _global_names(code) if name in scope]
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            reached.append((name, cell.cell_contents))
        except ValueError:  # a variable that is not set yet
            continue
    for name, value in reached:
        is_call = isinstance(value, types.FunctionType | types.MethodType)
        if is_call == calls and (not callable(value) or _is_theirs(value)):
            yield name, value


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _drawn() -> dict[str, Any]:
    """Where the generators on the host stand."""
    return {
        "random": hash(random.getstate()),
        "numpy.random": hash(str(np.random.get_state())),
        "torch's generator on the CPU": hash(torch.get_rng_state().numpy().tobytes()),
    }
