"""Compare two networks or functions: are they the same program, so that only their tensor values differ?"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from .dropout_rates import chances

Seen = dict[tuple[int, int], tuple[Any, Any]]
"""Pairs of objects whose comparison has begun, by their ids; the references keep the ids unique."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_OF_MODULES = {"_parameters", "_buffers", "_modules", "training", "_version"}
"""Attributes of a module that are compared separately, or that do not affect its results."""


def network_difference(first: nn.Module, second: nn.Module) -> str:
    """Describe why two networks are different programs; empty if only their tensors or dropout rates differ.

    >>> network_difference(nn.LeakyReLU(0.1), nn.LeakyReLU(0.5))
    'negative_slope is 0.1 in one and 0.5 in another'
    >>> network_difference(nn.Linear(2, 2), nn.Linear(2, 2)), network_difference(nn.Dropout(0.1), nn.Dropout(0.5))
    ('', '')
    """
    return _network_difference(first, second, {})


def _network_difference(first: nn.Module, second: nn.Module, seen: Seen) -> str:
    one, two = dict(first.named_modules()), dict(second.named_modules())
    free = chances(first).keys() & chances(second).keys()
    if list(one) != list(two):
        return f"their layers are not the same: {_some(set(one) ^ set(two))}"
    # Layers may hold bound methods of themselves, and references to each other.
    seen |= {(id(layer), id(two[path])): (layer, two[path]) for path, layer in one.items()}
    for path, layer in one.items():
        found = _layer_difference(path, layer, two[path], free, seen)
        if found:
            return found
    return ""


def _layer_difference(path: str, layer: nn.Module, other: nn.Module, free: Set[str], seen: Seen) -> str:
    named = f"{path}." if path else ""
    # torch creates a separate class for every layer with parametrized weights.
    mine, theirs = type_before_parametrizations(layer), type_before_parametrizations(other)
    if mine is not theirs or is_parametrized(layer) is not is_parametrized(other):
        return f"{path or 'the network'} is of type {type(layer).__name__} in one and {type(other).__name__} in another"
    for own, its in ((layer._parameters, other._parameters), (layer._buffers, other._buffers)):
        if list(own) != list(its):
            return f"{path or 'the network'} has {_some(set(own) ^ set(its))} in one only"
        for name in own:
            shapes = [_outline(tensors[name]) for tensors in (own, its)]
            if shapes[0] != shapes[1]:
                return f"{named}{name} is {shapes[0]} in one and {shapes[1]} in another"
    first, second = (_attributes(module) for module in (layer, other))
    alike = [name for name in first if f"{named}{name}" not in free]
    for name in sorted(set(first) ^ set(second)):
        return f"{named}{name} is set in one only"
    for name in alike:
        found = _difference(first[name], second[name], seen)
        if found:
            return f"{named}{name} {found}"
    return ""


def difference(first: Any, second: Any) -> str:
    """Describe how two Python values, such as loss functions, differ; empty if they are equal.

    Functions are compared by their code and by the values that they refer to.

    >>> def scaled(by): return lambda x: by * x
    >>> difference(scaled(2), scaled(2)), difference(scaled(2), scaled(3))
    ('', 'uses by, which is 2 in one and 3 in another')
    """
    return _difference(first, second, {})


def _difference(first: Any, second: Any, seen: Seen) -> str:
    if first is second or (id(first), id(second)) in seen:
        return ""
    seen[id(first), id(second)] = first, second
    if type(first) is not type(second):
        return f"is of type {type(first).__name__} in one and {type(second).__name__} in another"
    if isinstance(first, _PLAIN):
        same = first == second or (first != first and second != second)
        return "" if same else f"is {first!r} in one and {second!r} in another"
    if isinstance(first, Tensor | np.ndarray):
        return "" if _equal(first, second) else "holds other numbers in one than in another"
    if isinstance(first, types.FunctionType):
        return _function_difference(first, second, seen)
    if isinstance(first, types.MethodType):
        return _difference((first.__func__, first.__self__), (second.__func__, second.__self__), seen)
    if isinstance(first, functools.partial):
        one, two = ((part.func, part.args, part.keywords) for part in (first, second))
        return _difference(one, two, seen)
    if isinstance(first, Mapping):
        if list(first) != list(second):
            return f"has {_some(set(map(str, first)) ^ set(map(str, second)))} in one only"
        return _first(_difference(first[key], second[key], seen) for key in first)
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return f"has {len(first)} entries in one and {len(second)} in another"
        return _first(_difference(a, b, seen) for a, b in zip(first, second, strict=True))
    if isinstance(first, set | frozenset):
        return "" if first == second else "is another set in one than in another"
    if isinstance(first, nn.Module):
        # Networks to which values (such as a loss function) refer must have equal tensors too.
        mine, its = (dict(module.state_dict()) for module in (first, second))
        return _network_difference(first, second, seen) or _difference(mine, its, seen)
    return _object_difference(first, second, seen)


def _function_difference(first: Any, second: Any, seen: Seen) -> str:
    if first.__code__ != second.__code__:
        return f"is {first.__qualname__} in one and {second.__qualname__} in another"
    cells = [
        dict(zip(f.__code__.co_freevars, map(_content, f.__closure__ or ()), strict=True)) for f in (first, second)
    ]
    for name in cells[0]:
        found = _difference(cells[0][name], cells[1][name], seen)
        if found:
            return f"uses {name}, which {found}"
    one, two = ((f.__defaults__, f.__kwdefaults__) for f in (first, second))
    return _difference(one, two, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _object_difference(first: Any, second: Any, seen: Seen) -> str:
    one, two = (getattr(value, "__dict__", None) for value in (first, second))
    if one is not None and two is not None:
        return _difference(one, two, seen)
    try:
        same = bool(first == second)
    except Exception:
        same = False
    return "" if same else f"is of type {type(first).__name__} and differs between them"


def _attributes(layer: nn.Module) -> dict[str, Any]:
    # The older weight_norm and spectral_norm compute an attribute of the hook's name before every call.
    computed = {getattr(hook, "name", None) for hook in layer._forward_pre_hooks.values()}
    if isinstance(layer, nn.RNNBase):
        computed |= {"_flat_weights", "_flat_weight_refs"}  # aliases of its parameters
    # The results of torch.compile for a layer do not change what the layer computes.
    computed |= {n for n in vars(layer) if n == "_compiled_call_impl" or n.startswith("_torchdynamo")}
    held = {n: v for n, v in vars(layer).items() if n not in computed | _OF_MODULES and "state_dict" not in n}
    # Hooks are keyed by a counter of all hooks in the process, so only their values are compared.
    return {n: list(v.values()) if "_hooks" in n and isinstance(v, Mapping) else v for n, v in held.items()}


def _outline(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = "" if tensor.dtype is torch.float32 else f" of {tensor.dtype}".replace("torch.", "")
    frozen = " and frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{tuple(tensor.shape)}{kind}{frozen}"


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        same = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
        return same and bool(torch.equal(first, second))
    return first.dtype == second.dtype and bool(np.array_equal(first, second))


def _first(texts: Any) -> str:
    return next((text for text in texts if text), "")


def _some(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (" …" if len(shown) > 3 else "")
