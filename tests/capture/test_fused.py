"""Fused optimizer updates on the CPU: the same numbers, for any memory layout of gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from manyhands.capture import fuse_on_cpu

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.1, weight_decay=0.1),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1),
}


def gradient(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def parameters() -> list[nn.Parameter]:
    plain, pictures = gradient(7, 6, 8), gradient(8, 4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [nn.Parameter(plain), nn.Parameter(pictures)]


@pytest.mark.parametrize("name", MAKERS)
def test_fused_update_supports_other_memory_layouts(name: str) -> None:
    plain, fused = parameters(), parameters()
    optimizers = [MAKERS[name](plain), MAKERS[name](fused)]
    fuse_on_cpu(optimizers[1])
    assert all(group["fused"] for group in optimizers[1].param_groups)
    for step in range(4):
        for mine in (plain, fused):
            mine[0].grad = gradient(step, 8, 6).t()
            mine[1].grad = gradient(step, 4, 3, 5, 5)
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            for slots in optimizers[1].state.values():
                slots.update({key: slot.contiguous() for key, slot in slots.items() if isinstance(slot, Tensor)})
            # Their parameter lies otherwise from here on.
            fused[0].data = fused[0].data.t().contiguous().t()
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_explicit_optimizer_options_are_kept() -> None:
    mine = parameters()
    for chosen in ({"foreach": True}, {"fused": False}, {"foreach": False}):
        optimizer = optim.AdamW(mine, lr=0.1, **chosen)
        fuse_on_cpu(optimizer)
        assert not optimizer.param_groups[0]["fused"]
    for optimizer in (optim.RMSprop(mine), optim.SGD(mine, lr=0.1, momentum=0.9)):
        fuse_on_cpu(optimizer)
        assert not optimizer.param_groups[0].get("fused")


def test_sparse_gradients_and_strided_parameters_are_not_fused() -> None:
    table, gaps = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.ones(4, 6)[:, ::2])
    for mine in ([table.weight], [gaps]):
        optimizer = optim.Adagrad(mine, lr=0.1)
        fuse_on_cpu(optimizer)
        (table(torch.tensor([1])).sum() if mine[0] is table.weight else (2 * gaps).sum()).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is None
    torch.testing.assert_close(gaps.detach(), torch.full((4, 3), 0.9))
