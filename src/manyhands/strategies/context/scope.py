"""The scope in which a network and its loss run on split sequences: where tokens are split, and users' Functions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ...core import without_own_check
from .exchange import ContextRanks
from .findings import note_gathered
from .partition import SequencePartition
from .rules import refuse_backward
from .split_tensor import SequenceDim, all_whole, is_split, split

_WALKS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_HOOKS = (Tensor.register_hook,)
_EMBEDDINGS = (F.embedding, torch.embedding)
_WATCHED = frozenset((*_WALKS, *_HOOKS, *_EMBEDDINGS))


class SequenceSplit(TorchFunctionMode):
    """Split sequences over the ranks: tokens where they are looked up, and embedded inputs where the loss gets them.

    Every operation has the same result as on one device wherever a tensor is split, so this choice decides only what
    is computed in parallel.
    """

    def __init__(self, ranks: ContextRanks, dim: int = 0) -> None:
        """Split `dim` of the inputs; 0 looks for it, which is next to the dim of the samples."""
        super().__init__()
        self.ranks, self._dim = ranks, dim
        self.num_samples: int | None = None
        """Samples of the current batch; None outside of a loss, where nothing is split."""
        self.is_backward = False
        """Whether gradients are computed by the strategy itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _EMBEDDINGS and self.num_samples is not None:
            args = self._with_split_tokens(func, args, kwargs)
        elif func in _WALKS:
            # A Function that runs a backward within its own gets partial gradients for its parameters, or whole ones.
            if not self.is_backward or torch._C._current_graph_task_id() != -1:
                refuse_backward(func)
            # torch.utils.checkpoint computes forward again during backward.
            with self:
                return without_own_check(func)(*args, **kwargs)
        elif func in _HOOKS and self.num_samples is not None and not self.is_backward:
            refuse_backward(func)
        return func(*args, **kwargs)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run operations by these rules inside this context."""
        with whole_functions(self.ranks), self:
            yield

    @contextmanager
    def in_backward(self, num_samples: int | None) -> Iterator[None]:
        """Allow gradients and repeated forwards inside this context, for a batch of `num_samples` samples."""
        self.num_samples, self.is_backward = num_samples, True
        try:
            yield
        finally:
            self.num_samples, self.is_backward = None, False

    def inputs(self, batch: Any) -> Any:
        """Return a batch with its embedded sequences split."""
        self.num_samples = num_samples(batch)
        return tree_map(self._split_embedded, batch)

    def _split_embedded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or is_split(leaf) or not leaf.is_floating_point():
            return leaf
        is_sequence = leaf.dim() > self._dim if self._dim else leaf.dim() == 3
        dim = self._dim_of(leaf) if is_sequence else None
        return leaf if dim is None else self._split(leaf, dim)

    def _with_split_tokens(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an embedding with its tokens split, if they are those of the samples."""
        place = 0 if func is F.embedding else 1
        changes_table = kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq")
        if len(args) <= place or len(args) > 3 or changes_table:
            return args
        tokens = args[place]
        if not isinstance(tokens, Tensor) or is_split(tokens) or tokens.dim() < 2 or tokens.is_floating_point():
            return args
        dim = self._dim_of(tokens)
        return args if dim is None else (*args[:place], self._split(tokens, dim), *args[place + 1 :])

    def _dim_of(self, tensor: Tensor) -> int | None:
        """Return the dim of the sequence: next to the samples, or before them in tensors that begin with it."""
        if self._dim:
            return self._dim if tensor.dim() > self._dim and tensor.shape[0] == self.num_samples else None
        if tensor.shape[0] == self.num_samples:
            return 1
        return 0 if tensor.shape[1] == self.num_samples else None

    def _split(self, tensor: Tensor, dim: int) -> Tensor:
        if tensor.shape[dim] < 2:
            return tensor
        partition = SequencePartition.balanced(tensor.shape[dim], self.ranks.size)
        return split(tensor, SequenceDim(dim, partition), self.ranks)


def num_samples(batch: Any) -> int | None:
    """Return how many samples a batch has: the size that most tensors begin with.

    >>> num_samples({"tokens": torch.zeros(4, 6), "labels": torch.zeros(4)})
    4
    """
    counts = Counter(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return counts.most_common(1)[0][0] if counts else None


_lock = threading.Lock()
_num_scopes = 0
_own_apply = Function.__dict__["apply"]
_here = threading.local()


@contextmanager
def whole_functions(ranks: ContextRanks) -> Iterator[None]:
    """Give the user's autograd Functions whole tensors and whole gradients inside this context, in this thread."""
    global _num_scopes, _own_apply
    with _lock:
        if not _num_scopes:
            _own_apply = Function.__dict__["apply"]
            Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
        _num_scopes += 1
    before = getattr(_here, "ranks", None)
    _here.ranks = ranks
    try:
        yield
    finally:
        _here.ranks = before
        with _lock:
            _num_scopes -= 1
            if not _num_scopes:
                Function.apply = _own_apply  # type: ignore[method-assign]


def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    own = _own_apply.__get__(None, kind)
    ranks: ContextRanks | None = getattr(_here, "ranks", None)
    has_split = any(map(is_split, (*args, *kwargs.values())))
    is_theirs = not kind.__module__.startswith(("torch.", "manyhands."))
    if ranks is None or not (has_split or is_theirs):
        return own(*args, **kwargs)
    if has_split:
        note_gathered(f"{kind.__name__}.apply")
        args, kwargs = all_whole((args, kwargs))
    if not is_theirs:
        return own(*args, **kwargs)

    def shared(value: Any) -> Any:
        return ranks.with_shared_gradient(value) if _is_trained(value) else value

    given, settings = tree_map(shared, (args, kwargs))
    results = own(*given, **settings)
    # A backward that is not linear needs the whole gradient.
    return tree_map(lambda value: ranks.with_whole_gradient(value) if _is_trained(value) else value, results)


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
