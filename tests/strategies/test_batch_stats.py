"""Batch statistics over replicas equal those of the whole batch, forward, backward and running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from manyhands.distributed import World
from manyhands.strategies.batch_stats import BatchStats
from manyhands.testing import run_threads

KINDS = {
    "1d": (lambda **k: nn.BatchNorm1d(3, **k), (10, 3)),
    "1d sequence": (lambda **k: nn.BatchNorm1d(3, **k), (10, 3, 5)),
    "2d": (lambda **k: nn.BatchNorm2d(3, **k), (10, 3, 4, 4)),
    "3d": (lambda **k: nn.BatchNorm3d(3, **k), (10, 3, 2, 2, 2)),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 0.5},
]


def step(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.square() * torch.arange(y.shape[1], dtype=y.dtype).view(1, -1, *[1] * (y.dim() - 2))).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_synchronized_batch_norm_on_uneven_shards_equals_full_batch(kind: str, settings: dict[str, Any]) -> None:
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 100).double()
    whole = make(**settings).double()
    expected = step(whole, x)

    def part(world: World) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor | None]]:
        layer = make(**settings).double()
        BatchStats(layer, world)
        mine = step(layer, x.tensor_split([3, 4])[world.rank])
        return mine, layer.state_dict(), [p.grad for p in layer.parameters()]

    parts = run_threads(part, 3)
    for index in range(2):
        torch.testing.assert_close(torch.cat([p[0][index] for p in parts]), expected[index], rtol=1e-9, atol=1e-9)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts[2][1][name], value, rtol=1e-9, atol=1e-9, msg=name)
    for index, parameter in enumerate(whole.parameters()):
        total = sum(p[2][index] for p in parts)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)


def test_padding_row_does_not_affect_batch_statistics_or_gradients() -> None:
    x = torch.randn(4, 3).double()
    whole = nn.BatchNorm1d(3).double()
    expected = whole(x)

    def part(world: World) -> torch.Tensor:
        layer = nn.BatchNorm1d(3).double()
        stats = BatchStats(layer, world)
        stats.is_padding = world.rank == 1
        mine = (x if world.rank == 0 else x[:1] * 100).clone().requires_grad_()
        y = layer(mine)
        torch.testing.assert_close(layer.running_var, whole.running_var)
        (y.square().sum() * (world.rank == 0)).backward()
        assert world.rank == 0 or not mine.grad.any(), "no gradient flows back to a padding row"
        return y

    torch.testing.assert_close(run_threads(part, 2)[0], expected)


def test_eval_uses_no_collective_and_close_restores_forward() -> None:
    def part(world: World) -> bool:
        layer = nn.BatchNorm1d(3)
        stats = BatchStats(layer, world)
        layer.eval()
        layer(torch.randn(2, 3))  # no collective: would be a broken meeting if only one rank called it
        stats.close()
        layer.train()
        layer(torch.randn(2, 3))
        return "forward" not in vars(layer)

    assert run_threads(lambda world: part(world) if world.rank == 0 else True, 2) == [True, True]


def test_synchronized_batch_norm_accepts_bfloat16_inputs() -> None:
    x = torch.randn(6, 3).bfloat16()
    expected = nn.BatchNorm1d(3)(x.float())

    def part(world: World) -> torch.Tensor:
        layer = nn.BatchNorm1d(3)
        BatchStats(layer, world)
        y = layer(x.chunk(2)[world.rank].requires_grad_())
        y.float().sum().backward()
        return y

    found = torch.cat(run_threads(part, 2)).float()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
