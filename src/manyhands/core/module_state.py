"""Remember and restore what a network's forward may change: buffers, attributes, and the objects in them."""

from __future__ import annotations

import operator
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .errors import TaskError
from .iterators import copied_iterator, is_iterator, iterator_state

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_COPIED = 20_000_000
"""Maximum number of tensor elements that are copied; parameters and tensors beyond it are not restored."""
MOST_LOOKED = 10_000
"""Maximum number of objects that are inspected, for example in a long list of samples."""
MOST_NESTED = 4
"""Maximum depth of containers and objects inside of each other that are inspected."""
PLAIN = (int, float, str, bytes, bool, type(None))
CONTAINERS = (list, dict, set, deque)
_LIBRARIES = ("builtins", "torch", "numpy", "functools", "threading", "weakref", "logging", "types", "typing", "io")
"""Packages whose objects are not restored, except containers, modules, tensors, arrays and random generators."""


def remember_state(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a network's buffers, the attributes of its modules, and which parameters train.

    Parameters that a forward changes in place, as `nn.Embedding(max_norm=...)` does, are restored too, if the network
    has at most MOST_COPIED parameter values. Parameters that a forward freezes or unfreezes are always restored.
    """
    put_back_buffers, attributes = remember_buffers(model), Attributes(model)
    put_back_parameters = _remember_parameters(model)
    is_trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def put_back() -> None:
        put_back_buffers()
        put_back_parameters()
        for parameter, before in is_trained:
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)
        attributes.put_back()

    return put_back


def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a network's buffers, including those that have been replaced by other tensors."""
    import torch

    held = [
        (m._buffers, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]

    def put_back() -> None:
        with torch.no_grad():
            for own, name, buffer, before in held:
                own[name] = buffer
                buffer.copy_(before)

    return put_back


def _remember_parameters(model: nn.Module) -> Callable[[], None]:
    import torch

    parameters = [p for p in model.parameters() if not p.is_meta and not isinstance(p, torch.nn.UninitializedParameter)]
    if sum(parameter.numel() for parameter in parameters) > MOST_COPIED:
        return lambda: None
    held = [(parameter, parameter._version, parameter.detach().clone()) for parameter in parameters]

    def put_back() -> None:
        with torch.no_grad():
            for parameter, version, before in held:
                if parameter._version != version:
                    parameter.copy_(before)

    return put_back


def unsaved_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not in the network's state_dict."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def require_tensor_state(model: nn.Module) -> None:
    """Raise TaskError if `get_extra_state` of a module returns something that a checkpoint cannot store."""
    from torch import Tensor, nn

    for name, module in model.named_modules():
        if getattr(type(module), "get_extra_state", None) is nn.Module.get_extra_state:
            continue
        state = module.get_extra_state()
        if not isinstance(state, Tensor):
            raise TaskError(
                "the state of a network must consist of tensors, which checkpoints store",
                got=f"{type(state).__name__} from get_extra_state of {name or 'the network'} ({type(module).__name__})",
                remedy="register its values as buffers, or return a tensor",
            )


def saves_all(model: nn.Module) -> bool:
    """Return whether `state_dict`, which a network may override, contains every parameter and saved buffer."""
    unsaved = unsaved_buffers(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name not in unsaved]
    return set(names) <= set(model.state_dict())


def _overlapping(model: nn.Module) -> list[str]:
    """Return the names of two parameters that have memory in common, as after `head.weight.data = embed.weight.data`.

    Parameters that are one object, as tied weights usually are, do not count. Empty if there are none.
    """
    import torch

    memory: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not torch._C._has_storage(parameter) or not parameter.numel():
            continue
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        first = int(parameter.storage_offset()) * parameter.itemsize
        last = first + parameter.itemsize * sum(int((n - 1) * step) for n, step in steps)
        memory.setdefault(parameter.untyped_storage()._cdata, []).append((first, last, name))
    for held in memory.values():
        held.sort()
        for (_, last, name), (first, _, other) in pairwise(held):
            if first <= last:
                return [name, other]
    return []


def require_own_memory(model: nn.Module) -> None:
    """Raise if two parameters have memory in common, which is not so any more where they are split, sent or stacked."""
    if names := _overlapping(model):
        raise TaskError(
            "parameters that are split, sent or stacked must not have memory in common",
            got=f"{names[0]} and {names[1]}, two parameters with the same memory (.data = ...)",
            remedy="assign one parameter to both modules (head.weight = embed.weight), or use mh.Mirrored()",
        )


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module is TorchScript, whose forward and tensors Python code cannot replace."""
    return any(kind.__module__.startswith("torch.jit") for kind in type(module).__mro__)


def set_training(model: nn.Module) -> None:
    """Call `model.train()`, which a network may override, but keep layers in evaluation mode that are in it already.

    If the network itself is in evaluation mode, all of its layers are put into training mode.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    >>> set_training(model)
    >>> model[0].training, model[1].training
    (True, False)
    """
    frozen = [module for module in model.modules() if not module.training] if model.training else []
    model.train()
    for module in frozen:
        module.training = False


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Attributes:
    """A snapshot of the attributes of a network's modules: numbers, strings, tensors, containers and objects.

    >>> from torch import nn
    >>> layer = nn.Identity()
    >>> layer.calls = [1]
    >>> before = Attributes(layer)
    >>> layer.calls.append(2)
    >>> before.changed()
    ['calls']
    >>> before.put_back()
    >>> layer.calls
    [1]
    """

    def __init__(self, model: nn.Module) -> None:
        # Lazy modules, whose class changes, get their sizes in the first forward.
        self._modules = [(name, module, type(module)) for name, module in model.named_modules()]
        self._held = [dict(self._own(module)) for _, module, _ in self._modules]
        self._iterators = [
            {name: copied_iterator(value) for name, value in own.items() if is_iterator(value)} for own in self._held
        ]
        kinds = dict.fromkeys(kind for _, _, own in self._modules for kind in own.__mro__ if not _is_of_library(kind))
        self._of_classes = [
            (kind, name, value)
            for kind in kinds
            for name, value in vars(kind).items()
            if isinstance(value, int | float)
        ]
        values = [held for own in self._held for held in own.values()]
        self._contents = Contents(values, without=[*model.modules(), *model.parameters(), *model.buffers()])

    def changed(self) -> list[str]:
        """Return the paths of attributes that were set, changed, deleted or advanced since the snapshot."""
        found = [
            f"{kind.__name__}.{name}" for kind, name, value in self._of_classes if vars(kind).get(name) is not value
        ]
        for (path, module, kind), held in zip(self._modules, self._held, strict=True):
            names = {**held, **dict(self._own(module))} if type(module) is kind else {}
            found += [
                f"{path}.{name}".removeprefix(".")
                for name in names
                if not self._is_same(vars(module).get(name, self), held.get(name, self))
            ]
        return list(dict.fromkeys((*found, *self.advanced())))

    def advanced(self) -> list[str]:
        """Return the paths of random generators and iterators that have advanced since the snapshot."""
        found = []
        for (path, module, _), held, iterators in zip(self._modules, self._held, self._iterators, strict=True):
            for name, value in held.items():
                is_same = not _is_generator(value) or self._contents.is_same(value)
                if name in iterators:
                    is_same = iterator_state(vars(module).get(name)) == iterator_state(iterators[name])
                if not is_same:
                    found.append(f"{path}.{name}".removeprefix("."))
        return found

    def put_back(self) -> None:
        """Restore the attributes of the snapshot, and delete those that were added since."""
        for (_, module, kind), held, iterators in zip(self._modules, self._held, self._iterators, strict=True):
            if type(module) is not kind:
                continue
            for name in [name for name, _ in self._own(module) if name not in held]:
                del vars(module)[name]
            vars(module).update(held)
            vars(module).update({name: copied_iterator(value) for name, value in iterators.items()})
        self._contents.put_back()

    def _own(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, value in _variables(module).items():
            if isinstance(value, PLAIN) or _may_change(value) or is_iterator(value):
                yield name, value

    def _is_same(self, now: Any, before: Any) -> bool:
        if now is before:
            return self._contents.is_same(now)
        return isinstance(now, PLAIN) and isinstance(before, PLAIN) and type(now) is type(before) and now == before


class Contents:
    """A snapshot of the contents of containers, objects, tensors and random generators, and of what they contain.

    >>> from collections import deque
    >>> kept = {"losses": deque([0.5], maxlen=2)}
    >>> before = Contents([kept])
    >>> kept["losses"].append(0.25)
    >>> before.put_back()
    >>> kept
    {'losses': deque([0.5], maxlen=2)}
    """

    def __init__(self, values: Iterable[Any], without: Iterable[Any] = ()) -> None:
        self._seen = {id(value): value for value in without}
        self._held: dict[int, tuple[Any, Any]] = {}
        self._num_copied = 0
        for value in values:
            self._look(value, MOST_NESTED)

    def put_back(self) -> None:
        """Restore the contents in place, because other objects may refer to them."""
        for value, before in self._held.values():
            if not _holds(value, before):
                _restore(value, before)

    def is_same(self, value: Any) -> bool:
        """Return whether a value's contents are those of the snapshot; items of containers are compared by identity."""
        return id(value) not in self._held or _holds(*self._held[id(value)])

    def _look(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or len(self._seen) >= MOST_LOOKED or not _may_change(value):
            return
        self._seen[id(value)] = value
        count = _num_values(value)
        if count is None or self._num_copied + count > MOST_COPIED:
            return
        self._num_copied += count
        self._held[id(value)] = (value, _copy(value))
        for inner in _inside(value) if depth else ():
            self._look(inner, depth - 1)


def _may_change(value: Any) -> bool:
    """Return whether a value is a container, tensor, array, generator, module, or an object of a user's class."""
    import numpy as np
    from torch import Tensor, nn

    # isinstance takes a weak proxy for its object, which may be the module that contains this one.
    if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)) or type(value) in weakref.ProxyTypes:
        return False
    if isinstance(value, (Tensor, np.ndarray, nn.Module, tuple, *CONTAINERS)) or _is_generator(value):
        return True
    is_object = type(value).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, (type, Enum))
    # An instance of a user's subclass of a library's class, such as TorchFunctionMode, is not restored either.
    return is_object and hasattr(value, "__dict__") and not any(_is_of_library(kind) for kind in type(value).__mro__)


def _is_of_library(kind: type) -> bool:
    return kind is not object and kind.__module__.partition(".")[0] in _LIBRARIES


def _num_values(value: Any) -> int | None:
    """Return how many numbers a copy of a value has; None for tensors that cannot be compared or copied in place."""
    import numpy as np
    from torch import Tensor, nn, strided

    if not isinstance(value, Tensor):
        return value.size if isinstance(value, np.ndarray) else 0
    if type(value) not in (Tensor, nn.Parameter) or value.layout != strided or value.is_meta:
        return None
    return value.numel()


def _inside(value: Any) -> Iterable[Any]:
    import numpy as np
    from torch import Tensor, nn

    if isinstance(value, (Tensor, np.ndarray)) or _is_generator(value):
        return ()
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, nn.Module):
        return [*value.children(), value._buffers, value._parameters, *_variables(value).values()]
    return list(value) if isinstance(value, (tuple, *CONTAINERS)) else list(_variables(value).values())


def _variables(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without those that every nn.Module has."""
    from torch import nn

    own: dict[str, Any] = vars(value)
    if not isinstance(value, nn.Module):
        return own
    return {name: held for name, held in own.items() if name not in vars(_plain_module())}


@cache
def _plain_module() -> nn.Module:
    from torch import nn

    return nn.Module()


def _is_generator(value: Any) -> bool:
    """Return whether a value is a random generator: torch's, Python's or numpy's."""
    import numpy as np
    import torch

    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


def _state(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    for get in ("getstate", "get_state"):
        if hasattr(generator, get):
            return getattr(generator, get)()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    for put in ("setstate", "set_state"):
        if hasattr(generator, put):
            getattr(generator, put)(state)
            return
    generator.bit_generator.state = state


def _is_same_state(now: Any, before: Any) -> bool:
    """Return whether two states of a random generator are equal; states are nested tensors, arrays and numbers."""
    import numpy as np
    import torch

    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    if isinstance(now, dict):
        return all(_is_same_state(now[name], before[name]) for name in now)
    if isinstance(now, tuple):
        return all(map(_is_same_state, now, before))
    return bool(now == before)


def _copy(value: Any) -> Any:
    import numpy as np
    from torch import Tensor

    if _is_generator(value):
        return _state(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, *CONTAINERS)):
        return value.copy()
    return value if isinstance(value, tuple) else dict(_variables(value))


def _restore(value: Any, before: Any) -> None:
    import numpy as np
    import torch

    if _is_generator(value):
        _set_state(value, before)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, CONTAINERS):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(before)
    elif not isinstance(value, tuple):
        for name in _variables(value).keys() - before.keys():
            del vars(value)[name]
        vars(value).update(before)


def _holds(value: Any, before: Any) -> bool:
    """Return whether a value's contents equal their copy `before`; items of containers must be the same objects."""
    import numpy as np
    import torch

    if isinstance(value, tuple):
        return True
    if _is_generator(value):
        return _is_same_state(_state(value), before)
    if isinstance(value, torch.Tensor):
        return value.shape == before.shape and torch.equal(value.detach(), before)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, before)
    now = value if isinstance(value, CONTAINERS) else _variables(value)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))
    return all(map(operator.is_, now, before))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode within the context; restore the mode of each layer afterwards."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Layers may override train(), for example to remove adapters from the weights into which eval() merged them.
        model.train(modes[model])
        for layer, mode in modes.items():
            layer.training = mode
