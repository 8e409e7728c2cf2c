"""Activations: what a forward keeps for backward, in bytes, by the module that made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def activation_bytes(model: nn.Module, forward: Callable[[], Any]) -> dict[str, int]:
    """Bytes that are still held when `forward` has returned, by the name of the module in which they were made.

    What is computed outside of the model is under the empty name. The result itself is held too, since backward
    starts from it.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> inputs = torch.zeros(16, 2)
    >>> activation_bytes(net, lambda: net(inputs).sum())
    {'1': 512, '': 4}
    """
    watch = _Watch({module: name for name, module in model.named_modules()})
    with watch.modules(), watch:
        result = forward()
        held = watch.held()
    del result
    return held


class _Watch(TorchDispatchMode):
    """Notes every storage that an operation makes, and whose it is."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._inside: list[str] = [""]
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follows which module is running."""

        def enter(module: nn.Module, *_: Any) -> None:
            self._inside.append(self._names.get(module, self._inside[-1]))

        def leave(*_: Any) -> None:
            self._inside.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in old:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        key = _key(tensor)
        known = self._made.get(key)
        if key and (known is None or known[0].expired()):
            storage = tensor.untyped_storage()
            self._made[key] = (StorageWeakRef(storage), storage.nbytes(), self._inside[-1])

    def held(self) -> dict[str, int]:
        """Bytes of what is still alive."""
        total: Counter[str] = Counter()
        for reference, size, name in self._made.values():
            if not reference.expired():
                total[name] += size
        return dict(total)


def _key(tensor: Tensor) -> int:
    """What tells storages apart; 0 for a sparse tensor, which has none of its own."""
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)
