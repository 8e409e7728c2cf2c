"""Heads: tensor-parallel nn.MultiheadAttention, in which each rank computes some of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard
from torch.overrides import _get_current_function_mode_stack

from ...core import LayoutFree
from .axis import WHOLE, Axis
from .layers import Call, LayerSplit


class AttentionHeads(LayerSplit):
    """Project and attend for this rank's heads; the output projections are summed over the ranks."""

    name = "heads"

    def placements(self, layer: nn.Module) -> dict[str, Placement]:
        inner = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {**dict.fromkeys(inner, Shard(0)), "out_proj.weight": Shard(1)}

    def sections_of(self, layer: Any) -> dict[str, Sequence[int]]:
        return dict.fromkeys(("in_proj_weight", "in_proj_bias"), [layer.embed_dim] * 3)

    def run(
        self, axis: Axis, layer: Any, call: Call, query: Tensor, key: Tensor, value: Tensor,
        key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        """Compute what the layer's own forward does."""
        same = {id(tensor): axis.whole(tensor, sums_gradient=True) for tensor in (query, key, value)}
        inputs = [same[id(tensor)] for tensor in (query, key, value)]
        is_single = query.dim() == 2
        if is_single:
            inputs = [tensor.unsqueeze(0) for tensor in inputs]
        elif not layer.batch_first:
            inputs = [tensor.transpose(0, 1) for tensor in inputs]
        rows, length, _ = inputs[0].shape
        heads = [
            part.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for part in self._projected(axis, layer, inputs)
        ]
        q, k, v = (axis.sharded(part, 1, layer.num_heads) for part in heads)
        mask = _mask(axis, layer, rows, key_padding_mask, attn_mask, q.dtype)
        dropout = layer.dropout if layer.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            weights = _dropped(axis, _attention(axis, q, k, mask), dropout)
            found: Tensor = axis.sharded(axis.part(weights, 1) @ heads[2], 1, layer.num_heads)
        else:
            found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
        local = axis.part(found, 1).transpose(1, 2).reshape(rows, length, -1)
        bias = layer.out_proj.bias
        share = None if bias is None else axis.local(bias, sums_gradient=True) / axis.size
        result = F.linear(local, axis.local(layer.out_proj.weight), share)
        if is_single:
            result = result.squeeze(0)
        elif not layer.batch_first:
            result = result.transpose(0, 1)
        if weights is not None:
            weights = _returned(axis, weights, layer.num_heads if average_attn_weights else 0)
            weights = weights.squeeze(0) if is_single else weights
        return axis.summed(result, self.target(axis, result)), weights

    @staticmethod
    def _projected(axis: Axis, layer: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        if layer._qkv_same_embed_dim:
            weights: Sequence[Tensor] = axis.local(layer.in_proj_weight).chunk(3)
        else:
            weights = [axis.local(getattr(layer, f"{name}_proj_weight")) for name in "qkv"]
        biases = [None] * 3 if layer.in_proj_bias is None else axis.local(layer.in_proj_bias).chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def fits(layer: nn.Module, axis: Axis) -> bool:
    """Return whether a layer is multi-head attention whose heads can be distributed over the ranks."""
    if not isinstance(layer, nn.MultiheadAttention) or type(layer).forward is not nn.MultiheadAttention.forward:
        return False
    return layer.num_heads % axis.size == 0 and layer.bias_k is None and not layer.add_zero_attn


def _attention(axis: Axis, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention weights of this rank's heads."""
    local_q, local_k = axis.part(q, 1), axis.part(k, 1)
    scores = local_q @ local_k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        is_by_head = mask.dim() == 4 and mask.shape[1] > 1
        scores = scores + (axis.part(mask, 1) if is_by_head else mask)
    return axis.sharded(scores.softmax(-1), 1, q.shape[1])


def _dropped(axis: Axis, weights: Tensor, p: float) -> Tensor:
    """Apply dropout to attention weights, with the numbers that torch's own code draws if draws are layout-free."""
    if p == 0.0 or not any(isinstance(mode, LayoutFree) for mode in _get_current_function_mode_stack()):
        return F.dropout(weights, p)
    # In torch's code samples and heads share a dim, and layout-free numbers depend on the position in that shape.
    rows, heads, *sizes = weights.shape
    whole = F.dropout(torch.ones(rows * heads, *sizes, dtype=weights.dtype, device=weights.device), p)
    return weights * axis.as_parted(whole.view(weights.shape)).redistribute(placements=[Shard(1)])


def _returned(axis: Axis, weights: Tensor, num_averaged: int) -> Tensor:
    """Return the whole attention weights: of each head, or their mean over `num_averaged` heads."""
    if not num_averaged:
        return axis.as_parted(weights).redistribute(placements=[WHOLE])
    return axis.summed(axis.part(weights, 1).sum(1) / num_averaged)


def _mask(
    axis: Axis, layer: Any, rows: int, padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Combine both masks into one additive mask, with an entry for every head if a mask has one per head."""
    added = [None if m is None else _added(axis.whole(m), dtype) for m in (padding, mask)]
    by_row = None if added[0] is None else added[0].view(rows, 1, 1, -1)
    by_pair = added[1]
    if by_pair is not None:
        by_pair = by_pair.view(rows, layer.num_heads, *by_pair.shape[1:]) if by_pair.dim() == 3 else by_pair[None, None]
    if by_row is None or by_pair is None:
        return by_pair if by_row is None else by_row
    return by_row + by_pair


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
