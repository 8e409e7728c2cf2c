"""A sharded network equals the whole one: losses, weights, validation, and the shards that ranks hold."""

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

from .problems import problem, token_loss
from .test_equality import trained

CASES = [("mlp", "sgd"), ("mlp", "adamw"), ("cnn", "adamw"), ("gpt", "sgd")]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folder `runs`, the default of `fit`, out of the repository."""
    monkeypatch.chdir(tmp_path)


def in_place(model: nn.Module, batch: Tensor) -> Any:
    """Changes the network's answer, which is a view, as many losses do."""

    def halved(tokens: Tensor) -> Tensor:
        logits = model(tokens)
        logits /= 2
        return logits

    return token_loss(halved, batch)


def tasks() -> dict[str, mh.Task]:
    made = {f"{name}-{optimizer}": problem(name, optimizer) for name, optimizer in CASES}
    return {**made, "gpt-sgd": made["gpt-sgd"].replace(loss=in_place)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    return {
        (precision, accumulate): trained(
            NullWorld(),
            tasks(),
            mh.Single(precision=precision, accumulate=accumulate, batch_stats="micro"),
            tmp_path_factory.mktemp("alone"),
        )
        for precision, accumulate in (("fp64", 1), ("fp64", 3), ("fp32", 1))
    }


SPECS = {
    "2 shards": (2, {"precision": "fp64"}),
    "3 shards, accumulated": (3, {"precision": "fp64", "accumulate": 3, "batch_stats": "micro"}),
    "2 by 2": (4, {"shards": 2, "replicas": 2, "precision": "fp64"}),
    "optimizer": (2, {"sharding": "optimizer", "precision": "fp64"}),
    "optimizer, 2 by 2, accumulated": (
        4,
        {
            "sharding": "optimizer",
            "shards": 2,
            "replicas": 2,
            "accumulate": 3,
            "precision": "fp64",
            "batch_stats": "micro",
        },
    ),
    "gradients": (2, {"sharding": "gradients", "precision": "fp64"}),
    "fp32": (2, {"precision": "fp32"}),
}


@pytest.mark.parametrize(("size", "settings"), SPECS.values(), ids=list(SPECS))
def test_sharded_equals_one_device(
    size: int, settings: dict[str, Any], alone: Any, run_ranks: Any, tmp_path: Path
) -> None:
    spec = mh.Sharded(**settings)
    results = run_ranks(partial(trained, tasks=tasks(), spec=spec, folder=tmp_path), size)[0]
    for name, (losses, weights) in alone[spec.precision, spec.accumulate].items():
        found, found_weights = results[name]
        np.testing.assert_allclose(found["loss"], losses["loss"], rtol=1e-5 if spec.precision == "fp32" else 1e-9)
        if spec.precision == "fp64":
            for key, value in weights.items():
                torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


@pytest.mark.parametrize("settings", [{"sharding": "optimizer"}, {"accumulate": 2}, {"sharding": "gradients"}], ids=str)
def test_sharded_gan_with_two_optimizers_equals_single_device(
    settings: dict[str, Any], run_ranks: Any, tmp_path: Path
) -> None:
    only = {"gan": problem("gan", "adamw")}
    spec = mh.Sharded(precision="fp64", **settings)
    losses, weights = trained(NullWorld(), only, mh.Single(precision="fp64"), tmp_path / "whole")["gan"]
    found, found_weights = run_ranks(partial(trained, tasks=only, spec=spec, folder=tmp_path / "parts"), 2)[0]["gan"]
    for key in ("critic", "generator"):
        np.testing.assert_allclose(found[key], losses[key], rtol=1e-9)
    for key, value in weights.items():
        torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-9, msg=key)


def held(world: World) -> tuple[int, int]:
    """Bytes of parameters and optimizer state that a rank holds, and that the whole network has."""
    task = problem("gpt", "adamw")
    hand = Hand(world, mh.Sharded().with_devices(world.size))
    hand.build(task)
    whole = sum(p.numel() * p.element_size() for p in hand.model.parameters())
    mine = sum(p.to_local().numel() * p.element_size() for p in hand.model.parameters())
    hand.close()
    return mine, whole


def test_sharded_rank_holds_only_its_shard(run_ranks: Any) -> None:
    parts = run_ranks(held, 2)
    assert all(mine < 0.6 * whole for mine, whole in parts)


def test_sharded_check_validation_and_start_from_match_single_device(tmp_path: Path) -> None:
    task = problem("cnn", "adamw")
    assert mh.check(task, mh.Sharded(), on="cpu*2")
    top = {"top": lambda out, batch: (out.argmax(1) == batch[1]).float().mean()}
    task = task.replace(valid=task.data, metrics=top, ema=0.9)
    single = mh.fit(
        task, mh.Single(precision="fp64"), on="cpu", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    split = mh.fit(
        task, "sharded,precision=fp64", on="cpu*3", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert split.metrics == pytest.approx(single.metrics, rel=1e-6)
    apart = mh.fit(
        task, "sharded,batch_stats=local", on="cpu*2", folder=tmp_path, options=mh.options.Display(progress=False)
    )
    assert np.isfinite(apart.metrics["valid_loss"])
    weights = tmp_path / "weights.safetensors"
    single.export(weights, weights_only=True)
    again = mh.fit(
        task,
        mh.Sharded(),
        on="cpu*2",
        steps=1,
        folder=tmp_path,
        options=[mh.options.Checkpoints(start_from=weights), mh.options.Display(progress=False)],
    )
    alone = mh.fit(
        task,
        mh.Single(),
        on="cpu",
        steps=1,
        folder=tmp_path,
        options=[mh.options.Checkpoints(start_from=weights), mh.options.Display(progress=False)],
    )
    np.testing.assert_allclose(again.losses, alone.losses, rtol=1e-5)


def test_invalid_shard_settings_are_rejected() -> None:
    with pytest.raises(StrategyError, match="needs a multiple of 3 devices, but got 4"):
        mh.Sharded(replicas=3).with_devices(4)
    with pytest.raises(StrategyError, match=r"needs 6 devices \(2 replicas x 3 shards\), but got 4"):
        mh.Sharded(3, replicas=2).with_devices(4)
    with pytest.raises(StrategyError, match="one of replicas and shards"):
        mh.Sharded(replicas=None)
    with pytest.raises(StrategyError, match="sharding must be one of"):
        mh.Sharded(sharding="some")
    with pytest.raises(StrategyError, match="shards with several optimizers must be synchronized in every step"):
        mh.fit(
            problem("gan"),
            "replicas=2,shards=2,sync=localsteps(2)",
            on="cpu*4",
            options=mh.options.Display(progress=False),
        )


def test_parameters_read_by_the_loss_are_gathered_or_rejected() -> None:
    task = problem("mlp").replace(loss=lambda model, batch: model(batch[0]).mean() + model[0].weight.square().sum())
    two = mh.fit(task, mh.Sharded(2), on="cpu*2", steps=3, options=mh.options.Display(progress=False))
    alone = mh.fit(task, mh.Single(), on="cpu", steps=3, options=mh.options.Display(progress=False))
    np.testing.assert_allclose(two.losses, alone.losses, rtol=1e-5)
    split = task.replace(loss=lambda model, batch: model(batch[0]).mean() * model[0].bias.sum())
    with pytest.raises(StrategyError, match=r"got 0.bias, which forward changes or which is sharded"):
        mh.fit(split, "stages=2,shards=2", on="cpu*4", steps=1, options=mh.options.Display(progress=False))
