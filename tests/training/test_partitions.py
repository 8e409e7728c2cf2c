"""Impossible partitions are refused before processes start; others are drawn."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp

import manyhands as mh
from manyhands.core import DeviceError, StrategyError, TaskError
from tests.strategies.networks import task
from tests.training.problems import problem


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            return y
        return -y


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.layers(x)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folder `runs`, the default of `fit`, out of the repository."""
    monkeypatch.chdir(tmp_path)


def refused(made: mh.Task, spec: mh.StrategySpec | str, on: str = "cpu*2") -> str:
    """Return the error and where it was raised: an error of a rank would name the rank."""
    with pytest.raises((StrategyError, TaskError, DeviceError)) as caught:
        mh.fit(made, spec, on=on, options=mh.options.Display(progress=False))
    assert caught.value.__cause__ is None or "rank" not in str(caught.value.__cause__)
    return str(caught.value)


def test_unpartitionable_networks_are_rejected_with_the_reason() -> None:
    deep = task("deep")
    assert "'tower.*', where the parts are first, blocks" in refused(deep, mh.Placed({"tower.*": 0, "head": 1}))
    said = refused(deep, mh.Placed({"blocks.*": 0, "blocks.1": 1}))
    assert "must be placed on one device, but got blocks.1 on two, by 'blocks.*' and 'blocks.1'" in said
    assert "must be one of cpu#0, cpu#1, but got '2'" in refused(deep, mh.Placed({"blocks.0": 0, "blocks.1": 2}))
    assert "but got 'cuda:0'" in refused(deep, mh.Placed({"blocks.0": "cuda:0", "blocks.1": 1}))
    assert "a pipeline of 4 stages needs at least 4 layers, but got 3" in refused(
        task("mlp"), mh.Pipeline(4), on="cpu*4"
    )
    said = refused(deep.replace(model=Branching), mh.Placed({"layer": 1, "*": 0}))
    assert "must not depend on values" in said
    assert "test_partitions.py" in said
    assert "if y.sum() > 0" in said
    said = refused(deep.replace(model=Overwriting), mh.Pipeline(2))
    assert "must not change its inputs, but got add_ in place, in the network itself" in said
    twice = deep.replace(loss=lambda model, batch: (model.first(batch[0])).mean())
    assert "must call model(...) exactly once, but got 0 calls" in refused(twice, mh.Pipeline(2))
    assert "a task with loss=" in refused(problem("gan"), mh.Pipeline(2))
    assert "needs 4 devices (2 replicas x 2 stages), but got 3" in refused(deep, mh.Pipeline(2, replicas=2), on="cpu*3")
    assert "a multiple of 2 devices, but got 3" in refused(deep, mh.Pipeline(2, replicas=None), on="cpu*3")
    assert "a placed part runs on one device" in refused(deep, "stages=2,shards=2,place=auto", on="cpu*4")
    assert "a sharded stage must shard" in refused(deep, "stages=2,shards=2,sharding=optimizer", on="cpu*4")
    assert "needs 8 devices (2 shards x 2 tensor x 2 stages)" in refused(deep, "fsdp=2,tp=2,pp=2", on="cpu*4")
    with pytest.raises(StrategyError, match="schedule must be one of"):
        mh.Pipeline(2, schedule="best")
    with pytest.raises(StrategyError, match="does not split a batch"):
        mh.StrategySpec(stages=2, place="auto", microbatches=2)


def test_pipeline_loss_that_calls_the_model_twice_is_rejected() -> None:
    made = task("deep").replace(loss=lambda model, batch: (model(batch[0]) + model(batch[0])).square().mean())
    with pytest.raises(TaskError, match=r"exactly once, but got 2 calls"):
        mh.fit(made, mh.Pipeline(2), on="cpu*2", options=mh.options.Display(progress=False))


def test_partition_is_shown_as_text_svg_and_html(tmp_path: Path, capsys: Any) -> None:
    found = mh.partition(task("towers"), mh.Placed({"tower_a": 0, "tower_b": 1}), on="cpu*2")
    found.show()
    said = capsys.readouterr().out
    assert "2 devices" in said
    assert "cpu#1  tower_b" in said
    for name in ("partition.svg", "cut.html"):
        found.show(tmp_path / name)
        assert "tower_a" in (tmp_path / name).read_text()
    assert str(mh.explain(task("towers"), mh.Placed({"tower_a": 0, "tower_b": 1}), on="cpu*2")) == str(found)
    staged = mh.partition(task("deep"), mh.Pipeline(2, schedule="interleaved"), on="cpu*2")
    assert [box.rank for box in staged.boxes] == [0, 1, 0, 1]
    assert all(box.seconds > 0 for box in staged.boxes)
    assert "microbatches=1 keeps those of the batch" in str(mh.partition(task("residual"), mh.Pipeline(2), on="cpu*2"))
    found = mh.partition(task("shifting"), "stages=2", on="cpu*2")
    assert "with one microbatch the stages take turns" in str(found)
    assert "the loss itself reads scale: all devices hold that" in str(found)


def test_pipeline_and_placed_specs_parse_from_text() -> None:
    spec = mh.StrategySpec.parse("pp=4,microbatches=16,schedule=gpipe,dp=2")
    assert spec == mh.Pipeline(4, microbatches=16, schedule="gpipe", replicas=2)
    placed = mh.Placed({"a.*": "cuda:0", "b": "host2/cuda:1"}, replicas=2)
    assert mh.StrategySpec.parse(str(placed)) == placed
    assert str(mh.Placed()) == "stages=all,place=auto"
    assert mh.StrategySpec.parse("placed").with_devices(3).stages == 3
    assert (mh.Pipeline(2) * mh.Mirrored(3)).num_devices == 6


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(3)
        return self.layers(x + torch.randn(12, generator=own).to(x.dtype))


class Sloping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        out, slope = jvp(self.layers, (x,), (torch.ones_like(x),))
        return out + slope


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))
        return self.head(hidden)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x) if random.random() < 0.5 else x)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Drawing, r"that randn uses at test_partitions.py:\d+: return self.layers"),
        (Sloping, r"torch.func.jvp, but got a call of one in forward, at test_partitions.py:\d+: out, slope = jvp"),
    ],
)
def test_networks_whose_trace_is_incomplete_are_rejected_with_the_reason(model: Any, text: str) -> None:
    made = problem("mlp").replace(model=model)
    assert re.search(text, refused(made, mh.Placed(devices=2, deterministic=True)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Dropping, r"got forward of the network \(Dropping\), which draws from one of them"),
        (Clamping, r"got a hook, in test_partitions.py:\d+: hidden.register_hook"),
    ],
)
def test_network_that_a_trace_changes_rarely_is_rejected_with_the_reason(model: Any, text: str) -> None:
    # The first two steps may happen to take the branch of the trace, or to have no gradient that is clamped.
    made = problem("mlp").replace(model=model)
    with pytest.raises(StrategyError, match=text):
        mh.fit(made, mh.Placed(devices=2, deterministic=True), on="cpu*2", options=mh.options.Display(progress=False))
