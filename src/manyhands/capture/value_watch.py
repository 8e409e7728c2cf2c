"""Detection of changes of the Python values that a step depends on, which a captured step would not notice."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, dict, set, tuple)
_RATES = ("lr", "initial_lr")
"""Keys of learning rates, which are not watched: they are tensors, whose current values a captured step reads."""
_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every nn.Module: submodules, parameters, buffers and hooks, which are checked separately."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in _HOOKS)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MAX_FUNCTIONS = 100
MAX_ITEMS = 64
"""Maximum size of containers and CPU tensors that are compared by content; larger ones by length or address only."""

Facts = Iterator[tuple[str, Any]]


class ValueWatch:
    """Detect changes of values on which a captured step depends, and which it would not notice.

    These are numbers, flags and lengths in a network, a loss function and optimizers, and the addresses of tensors.

    Args:
        model: The network.
        function: The loss function, or the custom step.
        optimizers: The optimizers.
        settings: Returns further values by name.

    >>> class Net(nn.Module):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x
    >>> net = Net()
    >>> watch = ValueWatch(net, lambda model, batch: model(batch), [])
    >>> net(torch.zeros(1)).shape
    torch.Size([1])
    >>> watch.changed()
    'Net.calls'
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        optimizers: Iterable[Optimizer],
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._optimizers, self._settings = list(optimizers), settings
        forwards = {type(module).forward for module in model.modules() if _is_theirs(type(module))}
        self._functions = _reached([function, *forwards])
        # A loss module with its own state is as much part of the step as the network.
        criteria = [value for f in self._functions for _, value in _names_of(f) if isinstance(value, nn.Module)]
        self._models = list(dict.fromkeys([model, *criteria]))
        self._seen = self._facts()
        self._drawn = _drawn()
        self._hold()

    def changed(self) -> str:
        """Return the name of a value that changed since the last call, or ""; compares all values."""
        before, self._seen = self._seen, self._facts()
        self._hold()
        if self._seen == before:
            return ""
        missing = object()
        names = [n for n in {**before, **self._seen} if before.get(n, missing) != self._seen.get(n, missing)]
        return names[0]

    def is_same(self) -> bool:
        """Return whether nothing changed since the last call of `changed`, by a check quick enough for every step.

        It compares numbers and flags of modules and optimizers, and addresses of tensors.
        """
        for values, size, held in self._held:
            if len(values) != size:
                return False
            for key, value in held:
                if values.get(key) is not value:
                    return False
        if [p.requires_grad for p in self._parameters] != self._flags or dict(self._settings()) != self._set:
            return False
        return self._places() == self._lying

    def drew(self) -> str:
        """Return the name of a random generator on the host that was used since the last call, or ""."""
        before, self._drawn = self._drawn, _drawn()
        return next((name for name in before if before[name] != self._drawn[name]), "")

    def hooked(self) -> str:
        """Return the name of a module or parameter with a user's hook, which a captured step would not run, or ""."""
        for model in self._models:
            for name, module in model.named_modules():
                if _has_hook(module, _HOOKS):
                    return name or type(module).__name__
            for name, parameter in model.named_parameters():
                if _has_hook(parameter, _PARAMETER_HOOKS):
                    return name
        return "every module" if _has_hook(torch_module, _GLOBAL_HOOKS) else ""

    def _hold(self) -> None:
        """Store the values with which `is_same` compares."""
        owners = [vars(module) for model in self._models for module in model.modules()]
        owners += [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._held = [
            (owner, len(owner), [(k, v) for k, v in owner.items() if isinstance(v, _SCALARS) and k not in _RATES])
            for owner in owners
        ]
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._flags = [p.requires_grad for p in self._parameters]
        self._set = dict(self._settings())
        self._lying = self._places()

    def _places(self) -> list[int]:
        """Return the addresses of the tensors that a captured step reads and writes."""
        return [tensor.data_ptr() for _, tensor in self._tensors()]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for model in self._models:
            yield from model.named_parameters()
            yield from model.named_buffers()
        for number, optimizer in enumerate(self._optimizers):
            for index, state in enumerate(optimizer.state.values()):
                for key, slot in state.items():
                    if isinstance(slot, Tensor):
                        yield f"optimizer {number}: {key} of parameter {index}", slot

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        seen: set[int] = set()
        for model in self._models:
            for name, module in model.named_modules():
                prefix = f"{type(module).__name__}{f' {name!r}' if name else ''}."
                for key, value in vars(module).items():
                    if key not in _OWN:
                        facts.update(_look(prefix + key, value, seen))
            facts.update((f"{n}.requires_grad", p.requires_grad) for n, p in model.named_parameters())
        for function in self._functions:
            for name, value in _names_of(function):
                facts.update(_look(name, value, seen))
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key not in ("params", *_RATES):
                        facts.update(_look(f"optimizer {number}, group {index}: {key}", value, seen))
        facts.update((f"{name} (its place in memory)", tensor.data_ptr()) for name, tensor in self._tensors())
        facts.update(self._settings())
        return facts


def _look(name: str, value: Any, seen: set[int]) -> Facts:
    """Yield names and values of facts that are cheap to compare: scalars, lengths, tensor addresses, and attributes."""
    if isinstance(value, _SCALARS):
        yield name, value
    elif isinstance(value, Tensor):
        yield from _tensor_facts(name, value)
    elif isinstance(value, _CONTAINERS):
        yield from _container_facts(name, value)
    elif _is_plain_object(value) and id(value) not in seen:
        seen.add(id(value))
        for key, item in list(vars(value).items()):
            if isinstance(item, _SCALARS):
                yield f"{name}.{key}", item
            elif isinstance(item, Tensor):
                yield from _tensor_facts(f"{name}.{key}", item)
            elif isinstance(item, _CONTAINERS):
                yield from _container_facts(f"{name}.{key}", item)


def _tensor_facts(name: str, tensor: Tensor) -> Facts:
    """Yield the values of a small CPU tensor, because Python code may read them; the address of any other tensor."""
    if isinstance(tensor, nn.Parameter):
        return
    if tensor.device.type == "cpu" and tensor.numel() <= MAX_ITEMS and not tensor.is_sparse:
        yield name, tensor.detach().tolist()
    elif tensor.layout is torch.strided:
        yield f"{name} (its place in memory)", tensor.data_ptr()


def _container_facts(name: str, value: Any) -> Facts:
    yield f"{name} (its length)", len(value)
    if isinstance(value, set) or len(value) > MAX_ITEMS:
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, _SCALARS):
            yield f"{name}[{key!r}]", item


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of a user's class, with attributes that may change."""
    if isinstance(value, (nn.Module, Optimizer, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return hasattr(value, "__dict__") and (not isinstance(value, type) or _is_theirs(value))


def _reached(functions: list[Any]) -> list[Any]:
    """Return functions, and the user's functions that they call by name, directly or indirectly."""
    found: list[Any] = []
    waiting = list(functions)
    while waiting and len(found) < MAX_FUNCTIONS:
        function = waiting.pop(0)
        if function not in found:
            found.append(function)
            waiting += [value for _, value in _names_of(function, calls=True)]
    return found


def _is_theirs(value: Any) -> bool:
    """Return whether a class or function is user code, not that of a library."""
    home = getattr(value, "__module__", "") or ""
    return home.split(".")[0] not in ("torch", "manyhands", "builtins", "numpy", "random", "math")


def _has_hook(owner: Any, kinds: Iterable[str]) -> bool:
    return any(_is_theirs(hook) for kind in kinds for hook in (getattr(owner, kind, None) or {}).values())


def _names_of(function: Any, *, calls: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield names and values that a function can read: globals, closure variables, its `self`, arguments of a partial.

    With `calls`, yield the functions among them, else everything but functions.
    """
    reached: list[tuple[str, Any]] = []
    if hasattr(function, "func") and hasattr(function, "keywords"):
        reached += [(f"argument {i}", value) for i, value in enumerate(function.args)]
        reached += list(function.keywords.items())
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__") and callable(function):
        reached.append((type(function).__name__, function))
        function = type(function).__call__
    if (owner := getattr(function, "__self__", None)) is not None:
        reached.append((type(owner).__name__, owner))
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        scope: Mapping[str, Any] = getattr(function, "__globals__", {})
        reached += [(name, scope[name]) for name in _global_names(code) if name in scope]
        reached += _closed_over(function, code)
    for name, value in reached:
        is_call = isinstance(value, types.FunctionType | types.MethodType)
        if is_call == calls and (not callable(value) or _is_theirs(value)):
            yield name, value


def _closed_over(function: Any, code: types.CodeType) -> list[tuple[str, Any]]:
    found = []
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # the variable has no value yet
            continue
    return found


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _drawn() -> dict[str, Any]:
    """Return hashes of the states of the global random generators on the host, by name."""
    return {
        "random": hash(random.getstate()),
        "numpy.random": hash(str(np.random.get_state())),
        "torch's generator on the CPU": hash(torch.get_rng_state().numpy().tobytes()),
    }
