"""Static inputs: the tensors that a recorded step reads, filled anew before each replay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = (bool, int, float, str, bytes, type(None))


def shape_of(data: Any) -> Hashable | str:
    """What must be equal for two batches to be run by one recording; a text says why this one cannot be recorded.

    >>> shape_of({"x": torch.zeros(2)}) == shape_of({"x": torch.ones(2)})
    True
    >>> shape_of([object()])
    'the batch holds a object, which is neither a tensor nor a number'
    """
    leaves, nesting = tree_flatten(data)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            return f"the batch holds a {type(leaf).__name__}, which is neither a tensor nor a number"
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            return "the batch holds a sparse tensor"
    kinds = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves)
    return nesting, kinds


class Statics:
    """A copy of a batch whose tensors stay where they are."""

    def __init__(self, data: Any) -> None:
        leaves, nesting = tree_flatten(data)
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [leaf for leaf in copies if isinstance(leaf, Tensor)]
        self.data: Any = tree_unflatten(copies, nesting)

    def load(self, data: Any) -> None:
        """Fills the tensors with another batch of the same shape."""
        leaves = [leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]
        torch._foreach_copy_(self._tensors, leaves)
