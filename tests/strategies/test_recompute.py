"""Recomputation: the same training with less memory; what is selected, stored and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError
from manyhands.distributed import NullWorld, World
from manyhands.graph import kept_bytes, lives
from manyhands.storage import CheckpointStore
from manyhands.strategies import keep_all, recompute
from manyhands.strategies.recompute import SMALL
from manyhands.training import CHECKPOINTS, Job, train

from ..training.problems import problem
from ..training.test_deterministic import Gpt
from ..training.test_equality import keep

WAYS = ("blocks", "selective", "*.mlp")


class Residual(nn.Module):
    """A block with BatchNorm and a buffer that its output depends on and that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.mlp = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = x + self.mlp(F.relu(self.norm(self.conv(x)))) * scale * (1 + self.seen)
        if self.training:
            self.seen += 0.25
        return y


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x.mean((2, 3)))


def tasks() -> dict[str, mh.Task]:
    return {
        "cnn": problem("cnn", "adamw").replace(model=Cnn),
        "gpt": problem("gpt", "adamw").replace(model=lambda: Gpt(0.2)),
    }


def trained(world: World, ways: list[str], folder: Path, deterministic: bool) -> dict[tuple[str, str], Any]:
    """Losses and weights of every task in every way, in one set of ranks."""
    results = {}
    for way in ways:
        for name, task in tasks().items():
            losses: dict[str, list[float]] = {}
            world.channel.taps[:] = [partial(keep, into=losses)]
            spec = mh.Mirrored(world.size, precision="fp64", recompute=way, deterministic=deterministic)
            where = folder / f"{name}-{world.size}-{way.replace('*', 'all')}"
            train(world, Job(task=task, spec=spec, folder=where, epochs=2))
            world.barrier()
            results[way, name] = (losses.get("loss"), CheckpointStore(where / CHECKPOINTS).load().model)
    return results


@pytest.mark.parametrize(("size", "deterministic"), [(1, False), (1, True), (2, False), (2, True)])
def test_recompute_does_not_change_losses_or_weights(
    size: int, deterministic: bool, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Dropout by either kind of generator, running statistics, a buffer that changes, tied weights, two replicas."""
    work = partial(trained, ways=["", *WAYS], folder=tmp_path, deterministic=deterministic)
    results = work(NullWorld()) if size == 1 else run_ranks(work, size)[0]
    for (_, name), (losses, weights) in results.items():
        expected, expected_weights = results["", name]
        assert len(losses) == 6
        np.testing.assert_allclose(losses, expected, rtol=1e-11)
        assert weights.keys() == expected_weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, expected_weights[key], rtol=0, atol=1e-9, msg=f"{name} {key}")
    assert results["", "cnn"][1]["blocks.0.norm.num_batches_tracked"] == 6


def held(way: str, rows: int = 8) -> int:
    """Bytes that a deep network keeps for backward, without its inputs and loss."""
    net = nn.Sequential(*(_Mlp() for _ in range(6)))
    inputs = torch.randn(rows, 32)
    recompute(net, way)
    kept = kept_bytes(lives(net, lambda: net(inputs).sum()))
    return sum(size for name, size in kept.items() if name)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(F.gelu(self.up(x))))


def test_recompute_reduces_activation_memory_held_for_backward() -> None:
    """Plain: what gelu takes and tanh gives, and the tensors between blocks; with blocks only the latter."""
    row = 8 * 4
    assert held("") == (6 * 2 * 128 + 5 * 32) * row
    assert held("blocks") == 5 * 32 * row
    assert held("blocks") < held("selective") < held("")
    assert held("", 16) == 2 * held("", 8)


def test_recompute_selects_modules_by_mode_or_pattern() -> None:
    assert recompute(Cnn(), "blocks") == ["blocks.0", "blocks.1"]
    assert recompute(Cnn(), "selective") == ["blocks.0", "blocks.1"]
    assert recompute(Cnn(), "*.mlp") == ["blocks.0.mlp", "blocks.1.mlp"]
    assert recompute(Cnn(), "blocks.*") == ["blocks.0", "blocks.1"], "the outermost ones, each once"
    assert recompute(Cnn(), "") == []
    nested = nn.Sequential(nn.Linear(1, 1), nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(3))))
    assert recompute(nested, "blocks") == ["1.0", "1.1", "1.2"]
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    assert recompute(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "blocks") == ["layers.0", "layers.1"]


def test_deepcopied_recompute_model_uses_own_weights_and_can_be_reset() -> None:
    net = Cnn()
    recompute(net, "blocks")
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(3, 1, 4, 4)
    assert twin(x).abs().max() == 0
    twin(x).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    keep_all(net)
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_keep_all_restores_instance_level_forward() -> None:
    net = Cnn()
    seven = MethodType(lambda self, x: x * 0 + 7, net.blocks[0])
    net.blocks[0].forward = seven
    recompute(net, "blocks")
    assert net.blocks[0](torch.ones(1, requires_grad=True)) == 7
    keep_all(net)
    assert net.blocks[0].forward is seven
    assert "forward" not in net.blocks[1].__dict__


class Late(nn.Module):
    """Starts to count its calls some steps after the first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(size))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count += 1
        return torch.tanh(self.layer(x)) * (1 + self.count[0])


@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_recompute_updates_late_changing_buffer_once_per_step(size: int) -> None:
    net, x = nn.Sequential(Late(size), Late(size)), torch.ones(1, 2)
    plain = copy.deepcopy(net)
    recompute(net, "blocks")
    for step in range(6):
        for model in (net, plain):
            model.zero_grad()
            for block in model:
                block.counts = step >= 3
            model(x).sum().backward()
        assert net[0].count[-1] == plain[0].count[-1] == max(0, step - 2)
        # Of a large one the old value is not there yet when it changes for the first time.
        if size == 1 or step != 3:
            torch.testing.assert_close(net[0].layer.weight.grad, plain[0].layer.weight.grad)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("blocks", r"needs blocks that are repeated .* got 'blocks' for Sequential with the modules 0, 1, 2"),
        ("*.attention", r"must match the name of a module, but got '\*\.attention' .*. Name them by a pattern"),
    ],
)
def test_recompute_pattern_without_matching_module_is_rejected(way: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        mh.fit(
            problem("mlp"),
            mh.Single(recompute=way),
            on="cpu",
            folder=tmp_path,
            options=mh.options.Display(progress=False),
        )
    with pytest.raises(StrategyError, match="but got True"):
        mh.Single(recompute=True)  # type: ignore[arg-type]
