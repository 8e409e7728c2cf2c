"""Call: the arguments that a network, or a part of it, was called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_TENSOR = "(a tensor)"


@dataclass(frozen=True)
class Call:
    """The arguments of a network's call: tensors, and the structure around them."""

    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    """The leaves that are no tensors, and a placeholder for each tensor."""
    structure: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Return the call of a network with these arguments."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the same structure with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.rest]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    @property
    def key(self) -> Any:
        """Return a key that is equal for calls that can share a trace, apart from their sizes."""
        kinds = tuple((tensor.dtype, tensor.dim()) for tensor in self.tensors)
        return self.structure, tuple(map(repr, self.rest)), kinds

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of its tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)
