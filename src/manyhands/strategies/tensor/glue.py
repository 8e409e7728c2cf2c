"""Glue: rules for the user's own operations between layers, on torch DTensors under tensor parallelism.

A DTensor has the shape of the whole tensor while each rank holds a shard. Some operations have a better rule here than
in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ...core import TaskError, attention_weights, without_own_check
from .axis import WHOLE, Axis, in_tensors, is_sharded
from .loss import cross_entropy, require_within

SECTIONS = "sections"
"""Attribute of a tensor whose last dim holds several separately sharded sections, as fused projections return."""
OF_LAYER = "of_layer"
"""Attribute of a layer's output that refers to the layer: operations on the output may reveal what it holds."""


class Glue(TorchFunctionMode):
    """Intercept the user's operations on sharded tensors; operations without a rule here are left to torch."""

    def __init__(
        self, axis: Axis, on_sections: Callable[[Any, Sequence[int]], None] | None = None, *, draws: bool = True
    ) -> None:
        super().__init__()
        self._axis, self._on_sections, self._draws = axis, on_sections, draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            result = rule(self, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if _changes_view(func, args):
            raise NotImplementedError(f"{func.__name__} must not change a view of a sharded tensor in place")
        if func not in _HARMLESS:
            args, kwargs = self._settled(args, kwargs)
        return func(*args, **kwargs)

    def _settled(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments in the element order of the whole tensor and in a form that autograd can differentiate."""
        leaves = [*args, *kwargs.values()]
        parted = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not parted and any(isinstance(leaf, (list, tuple)) for leaf in leaves):
            parted = [i for leaf in leaves if isinstance(leaf, (list, tuple)) for i in leaf if isinstance(i, DTensor)]
        if parted:
            return in_tensors(self._settle, (args, kwargs))  # type: ignore[no-any-return]
        return args, kwargs

    def _settle(self, tensor: Tensor) -> Tensor:
        if hasattr(tensor, SECTIONS):
            return in_order(self._axis, tensor, getattr(tensor, SECTIONS))
        if not isinstance(tensor, DTensor):
            return self._axis.of(tensor, WHOLE) if tensor.requires_grad else tensor
        # torch would add a number to every rank's partial sum, so the result would contain it once per rank.
        is_sum = tensor.placements[0].is_partial()
        return tensor.redistribute(placements=[WHOLE]) if is_sum else tensor

    # -- sections of a fused projection ---------------------------------------------------------------------------

    def split(self, func: Any, tensor: Tensor, size: Any = 1, dim: int = 0, **kwargs: Any) -> Any:
        """Split a tensor into its sections, each of which stays sharded."""
        count = tensor.shape[dim]
        if func in _CHUNKS:
            size = -(-count // size)
        sizes = [min(size, count - at) for at in range(0, count, size)] if isinstance(size, int) else list(size)
        return self._sections(tensor, dim, sizes)

    def view(self, func: Any, tensor: Tensor, *shape: Any, **kwargs: Any) -> Any:
        """Split the last dim into sections and their contents: (…, 3, heads, size)."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
        if not all(isinstance(size, int) for size in sizes) or not isinstance(tensor, DTensor):
            return NotImplemented
        if not (hasattr(tensor, SECTIONS) or hasattr(tensor, OF_LAYER)):
            return NotImplemented
        if sizes.count(-1) == 1:
            known = -torch.Size(sizes).numel()
            sizes[sizes.index(-1)] = tensor.numel() // max(1, known)
        lead = tensor.dim() - 1
        if len(sizes) < lead + 3 or sizes[:lead] != list(tensor.shape[:-1]) or sizes[lead] not in (2, 3):
            return NotImplemented
        inner = sizes[lead + 1 :]
        parts = self._sections(tensor, -1, [inner_size(inner)] * sizes[lead])
        if parts is NotImplemented:
            return NotImplemented
        return torch.stack([part.view(*sizes[:lead], *inner) for part in parts], lead)

    def unflatten(self, func: Any, tensor: Tensor, dim: int, sizes: Any) -> Any:
        """Apply the rule of `view` to an unflatten of the last dim."""
        if dim % tensor.dim() != tensor.dim() - 1:
            return NotImplemented
        return self.view(func, tensor, *tensor.shape[:-1], *sizes)

    def _sections(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Any:
        axis = self._axis
        if not isinstance(tensor, DTensor) or dim % tensor.dim() != tensor.dim() - 1 or len(sizes) < 2:
            return NotImplemented
        known: Sequence[int] | None = getattr(tensor, SECTIONS, None)
        if known is None and self._on_sections is not None and hasattr(tensor, OF_LAYER):
            # Layers are being inspected: report that this one's rows must be sharded section by section.
            self._on_sections(getattr(tensor, OF_LAYER), sizes)
            return tuple(axis.of(p, WHOLE).redistribute(placements=[Shard(tensor.dim() - 1)])
                         for p in axis.whole(tensor).split(list(sizes), -1))  # fmt: skip
        if known is None or list(known) != list(sizes):
            return NotImplemented
        widths = [axis.span(size)[1] for size in sizes]
        parts = tensor.to_local().split(widths, -1)
        return tuple(axis.sharded(part, -1, size) for part, size in zip(parts, sizes, strict=True))

    # -- attention and losses -------------------------------------------------------------------------------------

    def attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Compute attention on local shards where heads or samples are sharded."""
        tensors = (query, key, value)
        if not any(isinstance(tensor, DTensor) for tensor in (*tensors, attn_mask)):
            return NotImplemented
        if query.dim() not in (3, 4) or any(tensor.dim() != query.dim() for tensor in tensors):
            return NotImplemented
        axis = self._axis
        dims = (1, 0) if query.dim() == 4 else (0,)
        dim = next((d for d in dims if any(is_sharded(tensor, d) for tensor in tensors)), None)
        if dim is not None and any(tensor.shape[dim] % axis.size for tensor in tensors):
            dim = None
        place: Placement = WHOLE if dim is None else Shard(dim)
        q, k, v = (axis.as_parted(tensor).redistribute(placements=[place]).to_local() for tensor in tensors)
        mask = None if attn_mask is None else self._mask(attn_mask, dim, query.dim())
        settings = {"is_causal": is_causal, "scale": scale, **kwargs}
        if dropout_p and torch.overrides._get_current_function_mode() is not None:
            # Another mode draws the random numbers and must see the shape of the whole tensor.
            weights, v = attention_weights(q, k, v, mask, **settings)
            shape = [*query.shape[:-1], key.shape[-2]]
            local = F.dropout(axis.of(weights, place, shape), dropout_p).to_local().to(v.dtype) @ v  # type: ignore[attr-defined]
        else:
            with self.drawing(place, dropout_p > 0):
                local = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, **settings)
        return axis.of(local, WHOLE) if dim is None else axis.sharded(local, dim, query.shape[dim])

    def _mask(self, mask: Tensor, dim: int | None, num_dims: int) -> Tensor:
        """Return the mask for this rank: its shard if there is one entry per head or sample, else the whole mask."""
        place = -1 if dim is None else dim - num_dims + mask.dim()
        if place >= 0 and mask.shape[place] > 1:
            return self._axis.part(mask, place)
        return self._axis.whole(mask, sums_gradient=dim is not None)

    def cross_entropy(
        self, func: Any, input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        """Compute cross entropy without gathering sharded classes."""
        if not isinstance(input, DTensor):
            return NotImplemented
        dim = 1 if input.dim() > 1 else 0
        target = self._axis.whole(target)
        if (
            not is_sharded(input, dim)
            or target.is_floating_point()
            or weight is not None
            or (size_average, reduce)
            != (
                None,
                None,
            )
        ):
            settings = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
            settings |= {"size_average": size_average, "reduce": reduce, "reduction": reduction}
            return func(self._axis.whole(input), target, **settings)
        settings = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return cross_entropy(self._axis, input.to_local(), target, input.shape[dim], **settings)

    def cross_entropy_loss(
        self, func: Any, input: Tensor, target: Tensor, weight: Any = None, reduction: int = 1,
        ignore_index: int = -100, label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        """Compute `cross_entropy` in a traced network, where the reduction is an integer."""
        if not isinstance(input, DTensor):
            return NotImplemented
        named = ("none", "mean", "sum")[reduction]
        return self.cross_entropy(
            F.cross_entropy, input, target, weight, None, ignore_index, None, named, label_smoothing
        )

    def embedding(
        self, func: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Any:  # fmt: skip
        """Look up the rows that each rank holds, with zeros for the others, and sum the results over the ranks."""
        if sparse and isinstance(weight, DTensor) and weight.requires_grad:
            raise no_sparse_gradients("F.embedding with sparse=True")
        if not is_sharded(weight, 0):
            return NotImplemented
        if max_norm is not None or scale_grad_by_freq:
            raise NotImplementedError("an embedding with max_norm or scale_grad_by_freq cannot be sharded")
        axis, count = self._axis, weight.shape[0]
        rows = axis.whole(input)
        require_within(rows, count, "index out of range in self")
        begin, held = axis.span(count)
        mine = (rows >= begin) & (rows < begin + held)
        padding = -1 if padding_idx is None else padding_idx % count - begin
        own = padding if 0 <= padding < held else None
        local = F.embedding((rows - begin).where(mine, 0), axis.local(weight), own)
        return axis.summed(local * mine.unsqueeze(-1))

    def traced_embedding(
        self, func: Any, weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute `embedding` in a traced network, where -1 means no padding."""
        options = dict(zip(("scale_grad_by_freq", "sparse"), args, strict=False)) | kwargs
        return self.embedding(F.embedding, indices, weight, None if padding_idx < 0 else padding_idx, **options)

    def cat(self, func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Concatenate without empty tensors: torch skips them (key/value caches start empty), DTensor does not."""
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented
        filled = [self._settle(tensor) for tensor in tensors if tensor.shape != (0,)]
        return func(filled, *args, **kwargs)

    # -- products -------------------------------------------------------------------------------------------------

    def matmul(self, func: Any, input: Tensor, other: Tensor, **kwargs: Any) -> Any:
        """Multiply local shards of matrices that are sharded along a batch dim, such as heads."""
        if kwargs or not (isinstance(input, Tensor) and isinstance(other, Tensor)) or min(input.dim(), other.dim()) < 2:
            return NotImplemented
        if not (is_sharded(input) or is_sharded(other)):
            return NotImplemented
        most = max(input.dim(), other.dim())
        places = [t.placements[0].dim - t.dim() for t in (input, other) if is_sharded(t)]  # type: ignore[attr-defined]
        place = min(places)
        if place >= -2 or any(hasattr(tensor, SECTIONS) for tensor in (input, other)):
            return NotImplemented
        count = max(tensor.shape[place] for tensor in (input, other) if tensor.dim() >= -place)
        local = func(*(self._aligned(tensor, place, count) for tensor in (input, other)))
        return self._axis.sharded(local, most + place, count)

    def reversed_matmul(self, func: Any, input: Tensor, other: Tensor) -> Any:
        """Compute `other @ input` for `__rmatmul__`, where the left operand is usually a plain tensor."""
        return self.matmul(torch.matmul, other, input)

    def baddbmm(self, func: Any, input: Tensor, batch1: Tensor, batch2: Tensor, **kwargs: Any) -> Any:
        """Compute a batched matrix product plus a tensor on local shards."""
        if not (is_sharded(batch1, 0) or is_sharded(batch2, 0)) or "out" in kwargs:
            return NotImplemented
        count = batch1.shape[0]
        local = func(*(self._aligned(tensor, -3, count) for tensor in (input, batch1, batch2)), **kwargs)
        return self._axis.sharded(local, 0, count)

    def _aligned(self, tensor: Tensor, place: int, count: int) -> Tensor:
        """Return this rank's shard along a dim counted from the end, or the whole tensor if it is broadcast there."""
        if tensor.dim() >= -place and tensor.shape[place] == count:
            return self._axis.part(tensor, place)
        return self._axis.whole(tensor, sums_gradient=True)

    def linear(self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Apply a replicated weight matrix to a local shard of tokens."""
        if not is_sharded(input) or is_sharded(input, -1) or is_sharded(weight) or is_sharded(bias) or input.dim() < 3:
            return NotImplemented
        dim = input.placements[0].dim  # type: ignore[attr-defined]
        own = (None if tensor is None else self._axis.whole(tensor, sums_gradient=True) for tensor in (weight, bias))
        return self._axis.sharded(func(input.to_local(), *own), dim, input.shape[dim])

    def einsum(self, func: Any, equation: Any, *operands: Any) -> Any:
        """Compute an einsum on local shards of one sharded index; all-reduce if that index is summed over."""
        given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
        if not isinstance(equation, str) or not any(is_sharded(tensor) for tensor in given):
            return NotImplemented
        left, arrow, result = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if "." in equation or not arrow or len(terms) != len(given) or any(hasattr(t, SECTIONS) for t in given):
            return NotImplemented
        letters = {term[t.placements[0].dim] for term, t in zip(terms, given, strict=True) if is_sharded(t)}  # type: ignore[attr-defined]
        # Prefer an index that is in the result: it needs no sum over the ranks.
        letter = min(letters, key=lambda each: (each not in result, each))
        holders = [(term, tensor) for term, tensor in zip(terms, given, strict=True) if letter in term]
        counts = {tensor.shape[term.index(letter)] for term, tensor in holders}
        if any(term.count(letter) > 1 for term in (*terms, result)) or len(counts) > 1:
            return NotImplemented
        axis = self._axis
        local = func(equation, *(
            axis.part(tensor, term.index(letter)) if letter in term else axis.whole(tensor, sums_gradient=True)
            for term, tensor in zip(terms, given, strict=True)
        ))  # fmt: skip
        return axis.sharded(local, result.index(letter), counts.pop()) if letter in result else axis.summed(local)

    # -- randomness, and what works on samples and channels one by one --------------------------------------------

    def dropout(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Draw different random numbers for different shards, and the same on every rank for replicated tensors."""
        if not isinstance(input, DTensor) or torch.overrides._get_current_function_mode() is not None:
            return NotImplemented
        if not training or p == 0.0:
            return input
        place = input.placements[0]
        if not isinstance(place, (Shard, Replicate)):
            input, place = input.redistribute(placements=[WHOLE]), WHOLE
        with self.drawing(place):
            local = func(input.to_local(), p, training)
        return self._axis.of(local, place, input.shape)

    @contextmanager
    def drawing(self, place: Placement, is_drawn: bool = True) -> Iterator[None]:
        """Seed the generator differently per shard; afterwards all ranks continue with the same random state."""
        if not (self._draws and is_drawn and isinstance(place, Shard)):
            yield
            return
        seed = int(torch.empty((), dtype=torch.int64).random_()) ^ (self._axis.rank + 1) * 0x9E3779B97F4A7C1
        device = self._axis.mesh.device_type
        devices = [torch.get_device_module(device).current_device()] if device != "cpu" else []
        with torch.random.fork_rng(devices, device_type=device if devices else "cuda"):
            torch.manual_seed(seed % 2**63)
            yield

    def by_channel(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Apply pooling or resizing, which work per channel and sample, to the local shard."""
        if not is_sharded(input) or input.placements[0].dim > 1 or input.dim() < 3:  # type: ignore[attr-defined]
            return func(self._axis.whole(input), *args, **kwargs) if isinstance(input, DTensor) else NotImplemented
        dim = input.placements[0].dim  # type: ignore[attr-defined]
        local = func(input.to_local(), *args, **kwargs)
        return in_tensors(lambda tensor: self._axis.sharded(tensor, dim, input.shape[dim]), local)

    def looked_at(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read a Python value from the whole tensor, not from this rank's shard or partial sum."""
        return func(self._axis.whole(input), *args, **kwargs) if isinstance(input, DTensor) else NotImplemented

    def mean(self, func: Any, input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        """Compute a mean over a sharded dim as sum / count; torch's mean of means cannot be turned into a sum later."""
        dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
        if not is_sharded(input) or kwargs or not any(is_sharded(input, each) for each in dims):
            return NotImplemented
        count = inner_size([input.shape[each] for each in dims])
        total = torch.sum(input, list(dims), keepdim=keepdim)
        return total.redistribute(placements=[WHOLE]) / count  # type: ignore[attr-defined]

    def by_element(self, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute elementwise losses on local shards; torch's own mean of them has a different gradient there."""
        if not any(isinstance(leaf, DTensor) for leaf in (input, target, *args, *kwargs.values())):
            return NotImplemented
        if not is_sharded(input) or args or not kwargs.keys() <= {"reduction", "beta", "delta"}:
            return self.on_whole(func, input, target, *args, **kwargs)
        reduction = kwargs.pop("reduction", "mean")
        losses = func(input, self._settle(target), reduction="none", **kwargs)
        if reduction == "none":
            return losses
        total = torch.sum(losses).redistribute(placements=[WHOLE])  # type: ignore[attr-defined]
        return total / losses.numel() if reduction == "mean" else total

    def along(self, func: Any, input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        """Compute cumulative operations on the whole tensor if it is sharded along their dim."""
        if not is_sharded(input, dim):
            return NotImplemented
        return func(self._axis.whole(input), dim, *args, **kwargs)

    def walk(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run backward with these rules active: torch.utils.checkpoint recomputes forward during backward."""
        with self:
            return _WALKS[func](*args, **kwargs)

    def on_whole(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute losses that torch implements as one operation, with inner sums and constants, on whole tensors."""
        if not any(isinstance(leaf, DTensor) for leaf in (*args, *kwargs.values())):
            return NotImplemented
        args, kwargs = in_tensors(self._axis.whole, (args, kwargs))
        return func(*args, **kwargs)

    def with_own_statistics(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute norms that update running statistics on whole tensors and the original statistics."""
        if not isinstance(input, DTensor):
            return NotImplemented
        args, kwargs = in_tensors(self._axis.whole, (args, kwargs))
        return func(self._axis.whole(input), *args, **kwargs)


def no_sparse_gradients(got: str) -> TaskError:
    """Return the error for a layer whose gradient is sparse."""
    return TaskError(
        "gradients must be dense where several ranks compute a layer, because torch cannot shard sparse ones",
        got=got,
        remedy="build it with sparse=False and a dense optimizer such as torch.optim.Adam, or use mh.Single()",
    )


def in_order(axis: Axis, tensor: Any, sections: Sequence[int]) -> Tensor:
    """Gather a tensor whose sections are sharded separately, in the element order of the whole tensor."""
    widths = [axis.span(size)[1] for size in sections]
    parts = zip(tensor.to_local().split(widths, -1), sections, strict=True)
    return torch.cat([axis.sharded(p, -1, size).redistribute(placements=[WHOLE]) for p, size in parts], -1)


def _changes_view(func: Any, args: Any) -> bool:
    """Return whether an operation changes a DTensor in place through a view, which may be a copy of a shard."""
    name = getattr(func, "__name__", "")
    if not args or not isinstance(args[0], DTensor):
        return False
    if name == "__setitem__":
        return True
    is_in_place = name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))
    return is_in_place and args[0]._is_view()


@contextmanager
def replicating() -> Iterator[None]:
    """Treat plain tensors as replicated on every rank; unlike torch's context this one can be nested."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def plain(axis: Axis, tensor: Tensor) -> Tensor:
    """Return a result as on one device: the whole tensor on every rank."""
    sections = getattr(tensor, SECTIONS, None)
    return axis.whole(tensor if sections is None else in_order(axis, tensor, sections))


def inner_size(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()


@contextmanager
def glued(
    axis: Axis, on_sections: Callable[[Any, Sequence[int]], None] | None = None, *, draws: bool = True
) -> Iterator[None]:
    """Let the user's own operations, forward and backward, work on sharded tensors."""
    fast = torch.backends.mha.get_fastpath_enabled()
    # torch's fused encoder layer supports only whole tensors.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replicating(), Glue(axis, on_sections, draws=draws):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor", "mod")}
"""Names of Python's in-place operators."""
_ATEN = torch.ops.aten
_CHUNKS = {torch.chunk, Tensor.chunk, _ATEN.chunk.default}
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "data")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point,
}  # fmt: skip
"""Operations that only read a tensor's metadata."""
_POOLS = [
    getattr(where, f"{name}{n}d{tail}")
    for where in (F, torch)
    for name, tail in (
        ("max_pool", ""), ("avg_pool", ""), ("adaptive_avg_pool", ""), ("adaptive_max_pool", ""),
        ("max_pool", "_with_indices"),
    )
    for n in (1, 2, 3)
    if hasattr(where, f"{name}{n}d{tail}")
]  # fmt: skip
_LOSSES = (
    F.cosine_embedding_loss, F.cosine_similarity, F.gaussian_nll_loss, F.hinge_embedding_loss, F.kl_div,
    F.margin_ranking_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
    F.pairwise_distance, F.poisson_nll_loss, F.soft_margin_loss, F.triplet_margin_loss,
)  # fmt: skip
_LOSSES_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip
_RUNNING = [
    getattr(where, name)
    for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    for where in (torch, Tensor)
]
_WALKS = {func: without_own_check(func) for func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_WALKS, Glue.walk),
    F.scaled_dot_product_attention: Glue.attention,
    F.cross_entropy: Glue.cross_entropy,
    F.dropout: Glue.dropout,
    F.embedding: Glue.embedding,
    torch.embedding: Glue.traced_embedding,
    F.linear: Glue.linear,
    torch._weight_norm: Glue.on_whole,
    F.multi_head_attention_forward: Glue.on_whole,
    torch.einsum: Glue.einsum,
    Tensor.__rmatmul__: Glue.reversed_matmul,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), Glue.matmul),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), Glue.baddbmm),
    torch.cat: Glue.cat,
    torch.dropout: Glue.dropout,
    F.interpolate: Glue.by_channel,
    **dict.fromkeys(
        (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__), Glue.looked_at
    ),
    **dict.fromkeys((F.batch_norm, F.instance_norm), Glue.with_own_statistics),
    **dict.fromkeys(_LOSSES, Glue.on_whole),
    **dict.fromkeys(_LOSSES_BY_ELEMENT, Glue.by_element),
    **dict.fromkeys(_RUNNING, Glue.along),
    **dict.fromkeys((torch.mean, Tensor.mean, _ATEN.mean.default, _ATEN.mean.dim), Glue.mean),
    **dict.fromkeys(_POOLS, Glue.by_channel),
    **dict.fromkeys((torch.split, Tensor.split, torch.chunk, Tensor.chunk), Glue.split),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), Glue.view),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten), Glue.unflatten),
    # The corresponding operators in a traced network.
    _ATEN.scaled_dot_product_attention.default: Glue.attention,
    _ATEN.cross_entropy_loss.default: Glue.cross_entropy_loss,
    _ATEN.dropout.default: Glue.dropout,
    _ATEN.embedding.default: Glue.traced_embedding,
    _ATEN.linear.default: Glue.linear,
    _ATEN.baddbmm.default: Glue.baddbmm,
    _ATEN.einsum.default: Glue.einsum,
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.bmm.default), Glue.matmul),
    _ATEN.cat.default: Glue.cat,
    _ATEN.unflatten.int: Glue.unflatten,
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default), Glue.split),
    **dict.fromkeys((_ATEN.view.default, _ATEN.reshape.default), Glue.view),
    **{getattr(_ATEN, pool.__name__).default: Glue.by_channel for pool in _POOLS if hasattr(_ATEN, pool.__name__)},
}
