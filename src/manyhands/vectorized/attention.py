"""Attention of stacked networks: the heads of all members in one call of the device's attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_is_stacked: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


class Folded(TorchFunctionMode):
    """Context in which attention of stacked tensors is computed with the members as part of the batch.

    With vmap alone, torch's attention does not see that tensors require gradients, and saves too little for backward.

    >>> q = torch.randn(3, 2, 4, 5, 8)
    >>> with Folded():
    ...     found = torch.func.vmap(F.scaled_dot_product_attention)(q, q, q)
    >>> torch.allclose(found, F.scaled_dot_product_attention(q, q, q), atol=1e-6)
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    rest: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    is_alike = query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and query.dim() <= 4
    if dropout_p or not is_alike or not any(_is_stacked(t) for t in (query, key, value)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **rest)
    return _StackedAttention.apply(query, key, value, attn_mask, rest)  # type: ignore[no-any-return, no-untyped-call]


class _StackedAttention(torch.autograd.Function):
    """Attention with a vmap rule; it is called with stacked tensors only."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rest: dict[str, Any]) -> Tensor:
        raise AssertionError("attention of tensors that are not stacked")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rest: dict[str, Any],
    ) -> tuple[Tensor, int]:
        query, key, value = (
            _first(tensor, dim, info.batch_size) for tensor, dim in zip((query, key, value), dims, strict=False)
        )
        num_folded = max(1, query.dim() - 3)
        if mask is not None:
            mask = _first(mask, dims[3], info.batch_size)
            mask = mask.view(len(mask), *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(*query.shape[:num_folded], *mask.shape[num_folded:]).flatten(0, num_folded - 1)
        q, k, v = (tensor.flatten(0, num_folded - 1) for tensor in (query, key, value))
        found = _attention(q, k, v, mask, **rest)
        return found.unflatten(0, query.shape[:num_folded]), 0


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return the tensor with the member as its first dimension; `dim` is where it is, None if all members share it."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
