"""State of a network that a forward may change: buffers and plain attributes, restored after a trial."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_COPIED = 20_000_000
"""Maximum number of values in parameters that are copied for a trial."""
PLAIN = (int, float, str, bytes, bool, type(None))


def remember_state(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a network's buffers and the plain attributes of its modules.

    Parameters that a forward changes in place, as `nn.Embedding(max_norm=...)` does, are restored in networks of which
    a copy is small.
    """
    put_back_buffers, attributes = remember_buffers(model), Attributes(model)
    put_back_parameters = _remember_parameters(model)

    def put_back() -> None:
        put_back_buffers()
        put_back_parameters()
        attributes.put_back()

    return put_back


def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a network's buffers, also those that were replaced by other tensors since."""
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
    """Raise for modules whose `get_extra_state` returns something that a checkpoint cannot store."""
    from torch import Tensor, nn

    for name, module in model.named_modules():
        if getattr(type(module), "get_extra_state", None) is nn.Module.get_extra_state:
            continue
        state = module.get_extra_state()
        if not isinstance(state, Tensor):
            raise TaskError(
                "the state of a network must consist of tensors, which checkpoints store",
                got=f"a {type(state).__name__} from get_extra_state of {name or 'the network'} "
                f"({type(module).__name__})",
                remedy="register its values as buffers, or return a tensor",
            )


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module is TorchScript, whose forward and tensors Python code cannot replace."""
    return any(kind.__module__.startswith("torch.jit") for kind in type(module).__mro__)


def set_training(model: nn.Module) -> None:
    """Call `model.train()`, which a network may override, and keep layers in evaluation mode that were built so.

    A network that is in evaluation mode as a whole is put into training mode as a whole.

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
    """The numbers, tensors and containers in attributes of a network's modules, as they were at one time.

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
        from torch import nn

        self._torchs_own = vars(nn.Module()).keys()
        # Lazy modules, whose class changes, get their sizes in the first forward.
        self._modules = [(name, module, type(module)) for name, module in model.named_modules()]
        self._held = [{name: (value, _copy(value)) for name, value in self._own(m)} for _, m, _ in self._modules]

    def changed(self) -> list[str]:
        """Return the paths of attributes that were set, changed or deleted since."""
        return [
            f"{path}.{name}".removeprefix(".")
            for (path, module, kind), held in zip(self._modules, self._held, strict=True)
            for name in {**held, **dict(self._own(module))}
            if type(module) is kind and not _is_same(vars(module).get(name, self), *held.get(name, (None, self)))
        ]

    def put_back(self) -> None:
        """Restore the attributes; those that were not there are deleted."""
        for (_, module, kind), held in zip(self._modules, self._held, strict=True):
            if type(module) is not kind:
                continue
            for name in [name for name, _ in self._own(module) if name not in held]:
                del vars(module)[name]
            for name, (value, before) in held.items():
                _restore(value, before)
                vars(module)[name] = value

    def _own(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        from torch import Tensor

        for name, value in vars(module).items():
            is_held = isinstance(value, (*PLAIN, Tensor, list, dict, set, tuple)) or _is_generator(value)
            if name not in self._torchs_own and is_held:
                yield name, value


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


def _copy(value: Any) -> Any:
    from torch import Tensor

    if _is_generator(value):
        return _state(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else value


def _restore(value: Any, before: Any) -> None:
    """Restore the content of a tensor or container in place, because other objects may refer to it."""
    import torch

    if _is_generator(value):
        _set_state(value, before)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)


def _is_same(now: Any, value: Any, before: Any) -> bool:
    import torch

    if now is not value:
        return isinstance(now, PLAIN) and isinstance(before, PLAIN) and type(now) is type(before) and now == before
    if _is_generator(now):
        return str(_state(now)) == str(before)
    if isinstance(now, torch.Tensor):
        return now.is_meta or bool(torch.equal(now.detach(), before))
    if isinstance(now, list | dict | set):
        items = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
        return len(now) == len(before) and all(a is b for a, b in zip(*items, strict=True))
    return True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the network into evaluation mode; restore each layer's mode afterwards, as the user may have frozen some."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Layers may override train(), for example to take adapters out of the weights that eval() merged them into.
        model.train(modes[model])
        for layer, mode in modes.items():
            layer.training = mode
