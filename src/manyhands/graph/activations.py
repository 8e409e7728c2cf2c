"""Activation memory: the bytes that forward keeps for backward, by module, and the peak of forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Life:
    """A storage (the memory of a tensor) that forward or backward allocated, and when it was allocated and freed.

    Times count allocations.
    """

    name: str
    """The name of the module that was running when the storage was allocated; empty outside of modules."""
    size: int
    born: int
    died: int | None = None
    is_kept: bool = False
    """Whether the storage still existed when forward returned."""
    in_backward: bool = False
    """Whether backward allocated the storage."""


def lives(model: nn.Module, forward: Callable[[], Any]) -> list[Life]:
    """Run `forward` and the backward of its result; return every storage that they allocate, in order.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> inputs = torch.zeros(16, 2)
    >>> [(life.name, life.size) for life in lives(net, lambda: net(inputs).sum()) if not life.in_backward]
    [('0', 512), ('1', 512), ('2', 64), ('', 4)]
    """
    watch = StorageWatch({module: name for name, module in model.named_modules()})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with watch.modules(), watch:
        loss = forward()
        watch.begin_backward()
        # The gradients are freed as if they had been added to existing ones.
        torch.autograd.grad(loss, parameters, allow_unused=True)
    return watch.lives


def kept_bytes(found: list[Life]) -> dict[str, int]:
    """Return the bytes that existed when forward returned, by the name of the module that allocated them.

    The empty name is for tensors that were computed outside of the model's modules. The result of forward is included,
    since backward starts from it.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> inputs = torch.zeros(16, 2)
    >>> kept_bytes(lives(net, lambda: net(inputs).sum()))
    {'1': 512, '': 4}
    """
    total: Counter[str] = Counter()
    for life in found:
        if life.is_kept:
            total[life.name] += life.size
    return dict(total)


def largest_sum(few: int, small: list[Life], many: int, large: list[Life], rows: int) -> int:
    """Return the peak bytes for `rows` rows, extrapolated from the storages for `few` and for `many` rows.

    Storages of backward whose size does not depend on the number of rows are gradients of parameters; they are not
    counted.
    """
    if [life.name for life in small] != [life.name for life in large]:
        few, small = 0, [replace(life, size=0) for life in large]
    changes: Counter[int] = Counter()
    for one, other in zip(small, large, strict=True):
        if not other.in_backward or other.size != one.size:
            size = max(0, round(one.size + (other.size - one.size) / (many - few) * (rows - few)))
            changes[2 * other.born] += size
            if other.died is not None:
                changes[2 * other.died - 1] -= size
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)


class StorageWatch(TorchDispatchMode):
    """Dispatch mode that records every storage that an operation allocates, and the module that was running.

    `names` has the names of the modules.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._inside: list[str] = [""]
        self._made: dict[int, tuple[StorageWeakRef, Life]] = {}
        self.lives: list[Life] = []
        self._time = 0
        self._in_backward = False

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Track within the context which module is running."""

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
            self._look()
            storage = tensor.untyped_storage()
            life = Life(self._inside[-1], storage.nbytes(), self._time, in_backward=self._in_backward)
            self._made[key] = (StorageWeakRef(storage), life)
            self.lives.append(life)

    def _look(self) -> None:
        """Record which storages have been freed since the last allocation."""
        self._time += 1
        for key in [key for key, (reference, _) in self._made.items() if reference.expired()]:
            self._made.pop(key)[1].died = self._time

    def begin_backward(self) -> None:
        """Record that forward has returned and backward begins."""
        self._look()
        for _, life in self._made.values():
            life.is_kept = True
        self._in_backward = True


def _key(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage; 0 for a sparse tensor, which has none."""
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)
