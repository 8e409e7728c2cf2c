"""Static inputs: the tensors that a captured step reads, filled before each replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, bytes, type(None))


def shape_of(data: Any) -> Hashable | str:
    """Return a key that is equal for batches that can share a captured step, or a text why this one cannot be captured.

    >>> shape_of({"x": torch.zeros(2)}) == shape_of({"x": torch.ones(2)})
    True
    >>> shape_of([object()])
    'the batch holds a object, which is neither a tensor nor a number'
    """
    # This runs before every step, so it avoids a general tree traversal.
    if isinstance(data, Tensor):
        return (data.shape, data.dtype, data.device) if data.layout is torch.strided else "the batch is sparse"
    if isinstance(data, _PLAIN):
        return (data,)
    if not isinstance(data, (tuple, list, dict)):
        return f"the batch holds a {type(data).__name__}, which is neither a tensor nor a number"
    children = [shape_of(child) for child in (data.values() if isinstance(data, dict) else data)]
    if type(data) is not dict and isinstance(data, dict):
        children.append(shape_of(vars(data)))
    for child in children:
        if isinstance(child, str):
            return child
    return type(data), tuple(data) if isinstance(data, dict) else (), tuple(children)


class Statics:
    """A copy of a batch whose tensors keep their addresses.

    `map_leaves` and `tensors` traverse a batch in the same way as the feed that made it.
    """

    def __init__(
        self,
        data: Any,
        map_leaves: Callable[[Callable[[Any], Any], Any], Any],
        tensors: Callable[[Any], Iterable[Tensor]],
    ) -> None:
        self.data: Any = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, data)
        self._walk = tensors
        self._tensors = list(tensors(self.data))

    def load(self, data: Any) -> None:
        """Copy another batch of the same shape into the tensors."""
        if isinstance(data, Tensor):
            self.data.copy_(data)
        else:
            torch._foreach_copy_(self._tensors, list(self._walk(data)))
