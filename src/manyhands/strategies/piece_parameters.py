"""How a rank holds the parameters of its pieces of a network. By itself it has all of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Contexts
from .batch_stats import BatchStats


class Holding:
    """A rank that shares its pieces with nobody."""

    layers: Sequence[str] = ()
    """Modules that are computed in a way of their own, so that a trace keeps them as one operation."""
    notes: Sequence[str] = ()
    stats: BatchStats | None = None
    """Batch statistics over all that go on together, where a rank's own do not count."""
    speaks = True
    """Whether this rank's loss counts, of those that compute it."""

    def hold(self, model: nn.Module) -> None:
        """Keeps this rank's part of each parameter that has values."""

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """What this rank has of a parameter, as a plain one that gradients are exchanged on."""
        return parameter

    def copies(self, parameter: nn.Parameter) -> int:
        """How many ranks that share the pieces hold the same part of it."""
        return 1

    def scope(self) -> AbstractContextManager[object]:
        """Where the pieces are computed."""
        return nullcontext()

    def back(self) -> AbstractContextManager[object]:
        """Where backward runs."""
        return nullcontext()

    def again(self, contexts: Contexts | None) -> Contexts:
        """What the first and the second time of computing a block happen in."""
        return contexts or (nullcontext(), nullcontext())

    def open(self) -> None:
        """Makes ready what is computed with; all ranks that share the pieces do so together."""

    def work(self, tensor: Tensor) -> Tensor:
        """What is computed with in the place of a parameter or a buffer."""
        return tensor

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients over the ranks that share the pieces, each its part."""

    def link(self, parameters: Sequence[nn.Parameter]) -> None:
        """Has parameters see the gradients of their parts."""

    def shut(self) -> None:
        """Lets go of what was made ready."""

    def close(self) -> None:
        """Lets go of gradients too."""

    def plain(self, tensor: Tensor) -> Tensor:
        """A result as another rank or a loss takes it."""
        return tensor

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        """All of a parameter, or of something that is laid out like it."""
        return tensor

    def part_for(self, whole: Tensor, like: Tensor, name: str) -> Tensor:
        """What this rank holds of a whole tensor."""
        return whole

    def joined(self, part: Tensor, name: str) -> Tensor:
        """All of something of which ranks have plain parts, laid out like a parameter."""
        return part

    def cut(self, whole: Tensor, name: str) -> Tensor:
        """This rank's plain part of something whole, laid out like a parameter."""
        return whole

    def substitute(self, node: fx.Node, path: str) -> Callable[..., Any] | None:
        """Another function for an operation of a module."""
        return None
