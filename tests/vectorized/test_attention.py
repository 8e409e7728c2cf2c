"""Attention of stacked networks equals attention of each, forward and backward, with masks of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from manyhands.vectorized.attention import Folded

Q, KV = (3, 2, 4, 5, 8), (3, 2, 4, 6, 8)
CASES: dict[
    str, tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...], tuple[int, ...] | None, dict[str, Any]]
]
CASES = {
    "plain": (Q, KV, (0, 0, 0, None), None, {}),
    "causal": (Q, Q, (0, 0, 0, None), None, {"is_causal": True}),
    "members within": (Q, Q, (1, 1, 1, None), None, {"scale": 0.3}),
    "queries in common": (Q[1:], KV, (None, 0, 0, None), None, {}),
    "a mask for all": (Q, KV, (0, 0, 0, None), (5, 6), {}),
    "a mask for each sample": (Q, KV, (0, 0, 0, None), (2, 1, 5, 6), {}),
    "a mask for each member": (Q, KV, (0, 0, 0, 0), (3, 2, 1, 1, 6), {}),
    "no batch": ((3, 4, 5, 8), (3, 4, 6, 8), (0, 0, 0, None), (5, 6), {}),
    "no heads": ((3, 5, 8), (3, 6, 8), (0, 0, 0, None), None, {}),
    "grouped": ((3, 2, 4, 5, 8), (3, 2, 2, 5, 8), (0, 0, 0, None), None, {"enable_gqa": True}),
}


def attention(tensors: list[Tensor], dims: tuple[int | None, ...], rest: dict[str, Any]) -> tuple[Tensor, ...]:
    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **rest)

    found = vmap(one, in_dims=dims)(*tensors)
    return found, *torch.autograd.grad(found.square().sum(), tensors[:3])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", CASES)
def test_stacked_attention_equals_attention_of_each_member(case: str) -> None:
    query, key, dims, mask, rest = CASES[case]
    generator = torch.Generator().manual_seed(0)
    tensors: list[Any] = [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in (query, key, key)
    ]
    tensors.append(None if mask is None else torch.randn(mask, dtype=torch.float64, generator=generator))
    wanted = attention(tensors, dims, rest)
    with Folded():
        found = attention(tensors, dims, rest)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_multihead_attention_layer_runs_under_vmap() -> None:
    layer, inputs = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 2, 5, 8)

    def one(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    with Folded():
        found = vmap(one)(inputs)
    torch.testing.assert_close(found, torch.stack([one(x) for x in inputs]))
