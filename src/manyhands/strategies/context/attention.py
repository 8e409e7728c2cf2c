"""Attention between a rank's queries and the keys and values of the whole sequence.

Keys and values travel around the ranks as a ring, and each rank adds what a part gives to its own queries (online
softmax), so that no rank holds all of them. Where a ring cannot be used, they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ...core import attention_weights
from .elements import aligned, drawing
from .exchange import ContextRanks, as_bytes
from .findings import count_attention
from .partition import SequencePartition
from .split_tensor import SequenceDim, SplitTensor, resplit, take, whole, whole_shape

_ATEN = torch.ops.aten
_TAG = 7000
"""First tag of the ring's messages."""


def attention(
    func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute `scaled_dot_product_attention` for this rank's queries, heads or samples."""
    num_dims = len(whole_shape(query))
    if type(query) is not SplitTensor or num_dims < 3 or (is_causal and attn_mask is not None):
        return NotImplemented
    if any(len(whole_shape(tensor)) != num_dims for tensor in (key, value)):
        return NotImplemented
    place, ranks = query.place, query.ranks
    if place.dim < num_dims - 2:
        if any(type(t) is not SplitTensor or t.place != place for t in (key, value)):
            return NotImplemented
        if enable_gqa and place.dim == num_dims - 3:
            return NotImplemented
        mask = aligned(attn_mask, place, num_dims, ranks)
        settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        local = _dropped(ranks, query.local, key.local, value.local, mask, dropout_p, **settings)
        return SplitTensor.of(local, place, ranks)
    if place.dim != num_dims - 2 or not place.is_plain:
        return NotImplemented
    count_attention()
    mask = None if attn_mask is None else _rows(attn_mask, place, ranks)
    if _can_travel(query, key, value, mask, dropout_p, num_dims, ranks):
        return SplitTensor.of(_around(query, key, value, mask, is_causal, scale), place, ranks)
    keys, values = whole(key), whole(value)
    if is_causal:
        rows = place.partition.positions(ranks.rank).to(keys.device)
        mask = rows[:, None] >= torch.arange(keys.shape[-2], device=keys.device)
    local = _dropped(ranks, query.local, keys, values, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)
    return SplitTensor.of(local, place, ranks)


def _rows(mask: Tensor, place: SequenceDim, ranks: ContextRanks) -> Tensor:
    """Return the rows of a mask for this rank's queries, with all columns."""
    shape = whole_shape(mask)
    if len(shape) < 2 or (shape[-2] == 1 and place.size != 1):
        return whole(mask)  # type: ignore[no-any-return]
    if shape[-2] == 1 and not isinstance(mask, SplitTensor):
        return mask
    return resplit(mask, place.at(len(shape) - 2), ranks)


def _dropped(
    ranks: ContextRanks, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """Compute attention on local tensors; dropout draws different random numbers on every rank."""
    with drawing(ranks, query.device) if dropout_p else nullcontext():
        if query.numel() and key.numel():
            return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **settings)
        # Kernels may not accept empty tensors, but gradients must flow on every rank.
        weights, value = attention_weights(query, key, value, mask, **settings)
        return weights.to(value.dtype) @ value


def _can_travel(
    query: Any, key: Any, value: Any, mask: Tensor | None, dropout_p: float, num_dims: int, ranks: ContextRanks
) -> bool:
    """Return whether keys and values can travel around the ranks; the same answer on all of them."""
    if ranks.size == 1 or ranks.world.is_capturable or dropout_p or num_dims > 4:
        # NCCL runs the sends of two ranks to each other one after the other, which may block.
        return False
    if type(key) is not SplitTensor or type(value) is not SplitTensor or key.place != value.place:
        return False
    sizes = [whole_shape(tensor) for tensor in (query, key, value)]
    if sizes[1][:-1] != sizes[2][:-1] or sizes[0][:-3] != sizes[1][:-3] or sizes[0][-3] % sizes[1][-3]:
        return False
    is_split_by_token = key.place.dim == num_dims - 2 and key.place.is_plain
    return is_split_by_token and not (mask is not None and mask.requires_grad)


def _around(
    query: SplitTensor, key: SplitTensor, value: SplitTensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    q, k, v = query.local, key.local, value.local
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (q, k, v))
    is_single = q.dim() == 3
    if is_single:
        q, k, v = q[None], k[None], v[None]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    ring = _Ring(query.ranks, query.place.partition, key.place.partition, is_causal, factor)
    with torch.autocast(kind, enabled=False):
        found: Tensor = _RingAttention.apply(q, k, v, mask, ring)  # type: ignore[no-untyped-call]
    return found[0] if is_single else found


@dataclass(frozen=True)
class _AttentionBlock:
    """Rows and columns of the attention matrix that are computed at a time, as slices of local tensors."""

    rows: slice
    columns: slice
    is_diagonal: bool = False
    allowed: Tensor | None = None


@dataclass(frozen=True)
class _Ring:
    """The ring of an attention: which rank holds which queries, keys and values."""

    ranks: ContextRanks
    queries: SequencePartition
    keys: SequencePartition
    is_causal: bool
    scale: float

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this rank has in a step."""
        return (self.ranks.rank + step) % self.ranks.size

    def blocks(self, source: int, device: torch.device) -> Iterator[_AttentionBlock]:
        """Yield the blocks of this rank's queries and a rank's keys that are not masked completely."""
        if not (self.queries.counts[self.ranks.rank] and self.keys.counts[source]):
            return
        if not self.is_causal:
            yield _AttentionBlock(slice(None), slice(None))
            return
        for first, last, rows in _pieces(self.queries, self.ranks.rank):
            for start, stop, columns in _pieces(self.keys, source):
                if last <= start:
                    continue
                if stop - 1 <= first:
                    yield _AttentionBlock(rows, columns)
                elif (first, last) == (start, stop):
                    yield _AttentionBlock(rows, columns, is_diagonal=True)
                else:
                    positions = torch.arange(first, last, device=device)[:, None]
                    yield _AttentionBlock(rows, columns, allowed=positions >= torch.arange(start, stop, device=device))

    def columns(self, mask: Tensor | None, source: int) -> Tensor | None:
        """Return a mask's columns for a rank's keys."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        return take(mask, SequenceDim(mask.dim() - 1, self.keys), _At(source))  # type: ignore[arg-type]

    def pass_on(self, flat: Tensor, size: int, tag: int) -> tuple[Tensor, Any]:
        """Send a buffer to the previous rank and receive one of another size from the next; return it and a wait."""
        ranks, world = self.ranks, self.ranks.world
        into = flat.new_empty(size)
        pending = []
        if flat.numel():
            pending.append(world.start_send(as_bytes(flat), (ranks.rank - 1) % ranks.size, _TAG + tag))
        if size:
            pending.append(world.start_receive(as_bytes(into), (ranks.rank + 1) % ranks.size, _TAG + tag))

        def wait() -> None:
            for each in pending:
                each.wait()

        return into, wait


@dataclass(frozen=True)
class _At:
    """Another rank, for functions that look up the items of a rank."""

    rank: int


def _pieces(partition: SequencePartition, rank: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the ranges of a rank, and where each is in its local tensor."""
    at = 0
    for start, stop in partition.ranges[rank]:
        yield start, stop, slice(at, at + stop - start)
        at += stop - start


def _as_many_heads(tensor: Tensor, heads: int) -> Tensor:
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _as_few_heads(tensor: Tensor, heads: int) -> Tensor:
    groups = tensor.shape[1] // heads
    return tensor if groups == 1 else tensor.unflatten(1, (heads, groups)).sum(2)


class _RingAttention(Function):
    """Attention over keys and values that travel; backward lets them travel again, with their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        total = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        flat = torch.cat([k.flatten(), v.flatten()])
        for step in range(ring.ranks.size):
            source = ring.source(step)
            following, wait = _next_keys(ring, flat, step, k, v)
            keys, values = _unpacked(flat, k, v, ring.keys.counts[source])
            columns = ring.columns(mask, source)
            for block in ring.blocks(source, q.device):
                part, log_sum = _forward(q, keys, values, columns, block, ring.scale)
                _add(out[:, :, block.rows], total[:, :, block.rows], part, log_sum)
            wait()
            flat = following
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, mask, out, total = ctx.saved_tensors
        ring: _Ring = ctx.ring
        gradient = gradient.contiguous()
        wide = total.dtype
        d_q = torch.zeros_like(q, dtype=wide)
        flat = torch.cat([k.flatten(), v.flatten()])
        mine, sums, arrived = flat, flat, _nothing
        for step in range(ring.ranks.size):
            source = ring.source(step)
            count = ring.keys.counts[source]
            following, wait = _next_keys(ring, flat, step, k, v)
            keys, values = _unpacked(flat, k, v, count)
            own = flat.new_zeros(flat.shape, dtype=wide)
            into = (d_q, *_unpacked(own, k, v, count))
            columns = ring.columns(mask, source)
            for block in ring.blocks(source, q.device):
                parts = _backward(gradient, q, keys, values, columns, block, out, total, ring.scale)
                places = (block.rows, block.columns, block.columns)
                for tensor, at, part in zip(into, places, parts, strict=True):
                    tensor[:, :, at] += _as_few_heads(part, tensor.shape[1])
            wait()
            if step == 0:
                mine = own
            else:
                # Gradients of these keys from the ranks that had them before; they arrived during the computation.
                arrived()
                own += sums if step > 1 else 0
                size = _num_items(k, v, ring.keys.counts[ring.source(step + 1)])
                sums, arrived = ring.pass_on(own, size, 2 * step + 1)
            flat = following
        arrived()
        d_k, d_v = _unpacked(mine.add_(sums), k, v, ring.keys.counts[ring.ranks.rank])
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _nothing() -> None:
    """Wait for nothing."""


def _num_items(k: Tensor, v: Tensor, count: int) -> int:
    return k.shape[0] * k.shape[1] * count * (k.shape[3] + v.shape[3])


def _next_keys(ring: _Ring, flat: Tensor, step: int, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    """Start to exchange keys and values for those of the next step; nothing to do in the last step."""
    if step == ring.ranks.size - 1:
        return flat, _nothing
    return ring.pass_on(flat, _num_items(k, v, ring.keys.counts[ring.source(step + 1)]), 2 * step)


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a buffer."""
    shapes = [(tensor.shape[0], tensor.shape[1], count, tensor.shape[3]) for tensor in (k, v)]
    at = k.shape[0] * k.shape[1] * count * k.shape[3]
    return flat[:at].view(shapes[0]), flat[at:].view(shapes[1])


def _is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: _AttentionBlock) -> bool:
    """Return whether torch's fused kernel for CPUs can compute a block."""
    return q.device.type == "cpu" and mask is None and block.allowed is None and q.shape[-1] == v.shape[-1]


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, block: _AttentionBlock, scale: float, wide: torch.dtype
) -> Tensor:
    scores = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)
    allowed = block.allowed
    if block.is_diagonal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: _AttentionBlock, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of a block and the logarithm of its sum of exponentials."""
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    q, k, v = q[:, :, block.rows], k[:, :, block.columns], v[:, :, block.columns]
    k, v = _as_many_heads(k, q.shape[1]), _as_many_heads(v, q.shape[1])
    if _is_fused(q, k, v, mask, block):
        part, log_sum = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, block.is_diagonal, scale=scale)
        return part, log_sum.to(wide)
    scores = _scores(q, k, mask, block, scale, wide)
    log_sum = scores.logsumexp(-1)
    return _weights(scores, log_sum) @ v.to(wide), log_sum


def _weights(scores: Tensor, log_sum: Tensor) -> Tensor:
    """Return the softmax by a known logarithm of the sum; zeros where everything is masked."""
    return (scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _add(out: Tensor, total: Tensor, part: Tensor, log_sum: Tensor) -> None:
    """Add the attention of a block to the sum over the earlier blocks, in place."""
    joint = torch.logaddexp(total, log_sum)
    known = joint.masked_fill(joint == -torch.inf, 0.0)
    out.mul_((total - known).exp().unsqueeze(-1)).add_(part * (log_sum - known).exp().unsqueeze(-1))
    total.copy_(joint)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: _AttentionBlock, out: Tensor,
    total: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a block's queries, and of its keys and values for each query head."""
    gradient, q, out, total = (tensor[:, :, block.rows] for tensor in (gradient, q, out, total))
    k, v = (_as_many_heads(tensor[:, :, block.columns], q.shape[1]) for tensor in (k, v))
    if _is_fused(q, k, v, mask, block):
        found: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, total, 0.0, block.is_diagonal, scale=scale
        )
        return found
    wide = total.dtype
    weights = _weights(_scores(q, k, mask, block, scale, wide), total)
    gradient, out = gradient.to(wide), out.to(wide)
    d_v = weights.transpose(-2, -1) @ gradient
    d_scores = weights * (gradient @ v.to(wide).transpose(-2, -1) - (gradient * out).sum(-1, keepdim=True))
    return d_scores @ k.to(wide) * scale, d_scores.transpose(-2, -1) @ q.to(wide) * scale, d_v
