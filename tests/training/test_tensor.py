"""Tensor-parallel layers give the losses and weights of one device, for many kinds of networks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError
from manyhands.distributed import NullWorld, World
from manyhands.training import Hand

from ..grouped_options import fit_options
from .networks import network
from .problems import problem
from .test_equality import trained

MATRIX = {
    "2 ranks": ((2, mh.TensorParallel(2)), ("mlp", "cnn", "gpt", "own", "translator", "towers")),
    "4 ranks": ((4, mh.TensorParallel(4)), ("mlp", "own")),
    "times replicas": ((4, mh.TensorParallel(2, replicas=2)), ("cnn", "own")),
    "times shards": ((4, mh.Sharded(2) * mh.TensorParallel(2)), ("own", "towers")),
    "accumulated, recomputed": ((2, mh.TensorParallel(2, accumulate=3, recompute="blocks")), ("own",)),
    "tokens in parts": ((2, mh.TensorParallel(2, layout={"*": "sequence"})), ("gpt", "own", "translator")),
    "random": ((2, mh.TensorParallel(2, deterministic=True)), ("dropout",)),
}
OWN = ("own", "dropout", "translator", "towers")


def tasks(names: tuple[str, ...]) -> dict[str, mh.Task]:
    return {name: network(name) if name in OWN else problem(name, "adamw", rows=24) for name in names}


@pytest.mark.parametrize(("layout", "names"), MATRIX.values(), ids=list(MATRIX))
def test_tensor_parallel_equals_single_device(
    layout: Any, names: tuple[str, ...], run_ranks: Any, tmp_path: Path
) -> None:
    size, spec = layout
    spec = spec * mh.Single(precision="fp64")
    alone = mh.Single(precision="fp64", accumulate=spec.accumulate, deterministic=spec.deterministic)
    whole = trained(NullWorld(), tasks(names), alone, tmp_path / "whole")
    parts = run_ranks(lambda world: trained(world, tasks(names), spec, tmp_path / "parts"), size)[0]
    for name, (losses, weights) in whole.items():
        np.testing.assert_allclose(parts[name][0]["loss"], losses["loss"], rtol=1e-9, err_msg=name)
        for key, value in weights.items():
            torch.testing.assert_close(parts[name][1][key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


class Squeeze(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.renorm(2, 0, 1.0)  # an operation without a rule for parts


class Odd(nn.Module):
    """Something in the middle that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 5)
        self.body = nn.ModuleList(nn.ModuleDict({"recurrent": nn.GRU(24, 24, batch_first=True)}) for _ in range(2))
        self.squeeze = Squeeze()

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(self.first(x))
        for block in self.body:
            x = block["recurrent"](x.unsqueeze(1))[0].squeeze(1)
        return self.last(self.squeeze(x))


def ways(world: World, names: dict[str, str]) -> dict[str, Any]:
    """Return how layers were split, what ranks hold, and the notices."""
    told: list[str] = []
    world.channel.taps[:] = [lambda entry: told.append(entry["text"]) if entry["kind"] == "notice" else None]
    found: dict[str, Any] = {}
    for name, layout in names.items():
        task = problem("mlp").replace(model=Odd) if name == "odd" else network(name)
        hand = Hand(world, mh.TensorParallel(world.size, layout=layout))
        hand.build(task)
        local = {n: tuple(p.to_local().shape) for n, p in hand.model.named_parameters()}
        whole = {n: tuple(p.shape) for n, p in hand.model.named_parameters()}
        hand.close()
        found[name] = {n: (local[n], whole[n]) for n in whole}
    return {"told": told, **found}


def test_layers_are_split_in_column_row_pairs_and_whole_layers_are_named(run_ranks: Any) -> None:
    rank = run_ranks(partial(ways, names={"own": "*.1.attention*:replicate", "odd": ""}), 2)[0]
    held = rank["own"]
    assert held["blocks.0.attention.qkv.weight"] == ((24, 16), (48, 16))
    assert held["blocks.0.attention.out.weight"] == ((16, 8), (16, 16))
    assert held["blocks.0.mlp.up.weight"] == ((32, 16), (64, 16))
    assert held["blocks.0.mlp.down.weight"] == ((16, 16), (16, 32))
    assert held["tokens.weight"] == ((12, 16), (23, 16))
    assert held["blocks.1.attention.qkv.weight"] == ((48, 16), (48, 16)), "the user's layout"
    assert held["blocks.1.mlp.up.weight"] == ((32, 16), (64, 16))
    assert rank["odd"]["first.weight"] == ((12, 12), (24, 12))
    assert rank["odd"]["body.0.recurrent.weight_ih_l0"] == ((72, 24), (72, 24))
    assert any(text.startswith("squeeze works on whole tensors") and "renorm" in text for text in rank["told"]), rank[
        "told"
    ]


def test_tensor_parallel_run_resumes_and_predicts_under_other_layouts(tmp_path: Path) -> None:
    task = network("own", rows=24)
    task = task.replace(
        valid=task.data, ema=0.9, metrics={"top": lambda out, batch: out.argmax(-1).eq(1).double().mean()}
    )
    settings: dict[str, Any] = {"folder": tmp_path, "progress": False, "timeout": 60}
    tensor = mh.TensorParallel(2, precision="fp64")
    single = mh.Single(precision="fp64")
    whole = mh.fit(task, single, **fit_options(on="cpu", epochs=2, name="whole", **settings))
    mh.fit(task, tensor, **fit_options(on="cpu*2", steps=2, name="run", **settings))
    mh.fit(
        task, mh.Sharded(2, precision="fp64"), **fit_options(on="cpu*2", steps=3, name="run", resume=True, **settings)
    )
    run = mh.fit(task, mh.Sharded(2) * tensor, **fit_options(on="cpu*4", epochs=2, name="run", resume=True, **settings))
    np.testing.assert_allclose(run.losses, whole.losses, rtol=1e-9)
    assert run.metrics == pytest.approx(whole.metrics, rel=1e-9)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(run.state_dict()[key], value, rtol=0, atol=1e-9, msg=key)
    rows = task.data[:6, :-1]
    torch.testing.assert_close(
        mh.predict(run, rows, tensor, on="cpu*2"), mh.predict(whole, rows, on="cpu"), atol=1e-9, rtol=0
    )


def test_check_reports_dropout_as_equal_under_tensor_parallel() -> None:
    verdict = mh.check(network("dropout"), mh.TensorParallel(2), on="cpu*2")
    assert verdict, verdict.why


def test_unknown_layer_layout_is_rejected() -> None:
    with pytest.raises(StrategyError, match="the split of a layer in layout must be one of column, row"):
        mh.TensorParallel(2, layout={"*.mlp": "diagonal"})
