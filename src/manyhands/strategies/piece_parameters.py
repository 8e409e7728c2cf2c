"""How a rank holds the parameters of its pieces of a network; in the base class each of them is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Contexts
from .batch_stats import BatchStats


class Holding:
    """The parameters of pieces that a rank shares with no other rank; subclasses shard them."""

    layers: Sequence[str] = ()
    """Modules with their own implementation, which a trace keeps as one operation."""
    notes: Sequence[str] = ()
    stats: BatchStats | None = None
    """Batch statistics over all ranks that synchronize in every step; None for local statistics."""
    reports_loss = True
    """Whether this rank's loss counts, among the ranks that compute it."""

    def hold(self, model: nn.Module) -> None:
        """Keep only this rank's part of each parameter that has values."""

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of a parameter, as a plain parameter whose gradient is exchanged."""
        return parameter

    def copies(self, parameter: nn.Parameter) -> int:
        """Return how many of the ranks that share the pieces hold the same part of the parameter."""
        return 1

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which the pieces are computed."""
        return nullcontext()

    def back(self) -> AbstractContextManager[object]:
        """Return the context in which backward runs."""
        return nullcontext()

    def again(self, contexts: Contexts | None) -> Contexts:
        """Return the contexts for a block's first computation and for its recomputation."""
        return contexts or (nullcontext(), nullcontext())

    def open(self) -> None:
        """Prepare the tensors for computation. Collective over the ranks that share the pieces."""

    def work(self, tensor: Tensor) -> Tensor:
        """Return the tensor that forward uses instead of a parameter or a buffer."""
        return tensor

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the ranks that share the pieces, leaving each rank its part."""

    def link(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients of the original parameters to those of their parts."""

    def shut(self) -> None:
        """Release what `open` prepared."""

    def close(self) -> None:
        """Release what `open` prepared, and the gradients."""

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a result in the form that another rank or a loss takes."""
        return tensor

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        """Return a whole parameter, or a whole tensor with a parameter's layout, such as optimizer state."""
        return tensor

    def part_for(self, whole: Tensor, like: Tensor, name: str) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return whole

    def joined(self, part: Tensor, name: str) -> Tensor:
        """Join the ranks' plain parts of a tensor with a parameter's layout, such as optimizer state."""
        return part

    def shard_of(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's plain part of a whole tensor that is laid out like a parameter."""
        return whole

    def substitute(self, node: fx.Node, path: str) -> Callable[..., Any] | None:
        """Return a replacement for an operation of a module, or None."""
        return None
