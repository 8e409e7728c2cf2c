"""Check that a stored program changes only memory that it has allocated, and computes only small numbers.

A request that could change a weight would change the answers to other requests. Therefore in-place operators are
allowed only on values that the program itself has created: not on inputs, weights, or views of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from ..core import ArchiveError
from . import operators

MAX_BITS = 4096
"""Maximum bits of a number that a program computes from sizes; repeated products would grow without limit."""
_SIZE_BITS = 63


class Purity:
    """Tracks which values of a program may be foreign memory (inputs, weights, views), and how large numbers can be."""

    def __init__(self) -> None:
        self._held: set[fx.Node] = set()
        self._bits: dict[fx.Node, int] = {}

    def hold(self, nodes: Iterable[fx.Node]) -> None:
        """Mark the values of these nodes as foreign memory."""
        self._held.update(nodes)

    def require(self, name: str, function: Callable[..., Any], node: fx.Node) -> None:
        """Track the result of a call; raise ArchiveError if it changes foreign memory or its number is too large."""
        schema = operators.arguments(function)
        if schema is None:
            if function is not operator.getitem:
                self._count(name, node)
            elif self.is_held(node.args[0]):
                self._held.add(node)
            return
        given = dict(zip((key for key, _ in schema), node.args, strict=False)) | node.kwargs
        operators.require_stateless(name, given)
        for key in operators.written(function):
            if self.is_held(given.get(key)):
                raise ArchiveError(
                    "a prediction must not change the model or its inputs",
                    got=f"{name}, which changes a weight or an input in place",
                    remedy="export a model that works on a copy",
                )
        shared = operators.shared(function)
        if any(self.is_held(value) for key, value in given.items() if shared is None or key in shared):
            self._held.add(node)

    def matching(self, nodes: Sequence[fx.Node], operands: Sequence[Any]) -> list[fx.Node]:
        """Return the inputs of a nested graph that may be foreign memory: their operand is, or they have no operand."""
        return [node for i, node in enumerate(nodes) if i >= len(operands) or self.is_held(operands[i])]

    def is_held(self, value: Any) -> bool:
        """Return whether a value, or one in a list of values, may be foreign memory."""
        if isinstance(value, list | tuple):
            return any(map(self.is_held, value))
        return isinstance(value, fx.Node) and value in self._held

    def _count(self, name: str, node: fx.Node) -> None:
        bits = [self._bits_of(value) for value in node.args]
        grown = sum(bits) if name == "operator.mul" else max(bits, default=0) + 1
        if name == "operator.pow":
            # The loader accepts only literal exponents.
            grown = bits[0] * int(str(node.args[1]))
        if grown > MAX_BITS:
            raise ArchiveError(
                f"numbers in a program must have at most {MAX_BITS} bits",
                got=f"{name} with a result of up to {grown} bits",
                remedy="compute large numbers as tensors, and export the model again",
            )
        self._bits[node] = grown

    def _bits_of(self, value: Any) -> int:
        if isinstance(value, list | tuple):
            return sum(map(self._bits_of, value))
        return self._bits.get(value, _SIZE_BITS) if isinstance(value, fx.Node) else _SIZE_BITS
