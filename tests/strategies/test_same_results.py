"""Every network has one of two outcomes under a strategy: the result of one device, or a refusal before training."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.core import UsageError
from manyhands.distributed import NullWorld, World
from manyhands.storage import CheckpointStore
from manyhands.training import CHECKPOINTS, Job, train

from ..training.test_equality import keep
from .odd_networks import TASKS

FP64: dict[str, Any] = {"precision": "fp64"}
SAME = {
    "mirrored": (mh.Mirrored(2, **FP64), "hooks buffers penalty complex noisy"),
    "sharded": (
        mh.Sharded(2, **FP64),
        "experts penalty in_place complex hooks buffers translator adafactor noisy by_element by_tensor by_all",
    ),
    "optimizer": (mh.Sharded(2, sharding="optimizer", **FP64), "complex hooks adafactor noisy by_element"),
    "replicas of shards": (mh.Sharded(2, replicas=2, **FP64), "buffers hooks"),
    "tensor": (
        mh.TensorParallel(2, **FP64),
        "distance queries cross translator hooks in_place own_batch_norm buffers adafactor by_all",
    ),
    "replicas of tensor": (mh.TensorParallel(2, replicas=2, **FP64), "experts buffers"),
    "context": (mh.ContextParallel(2, **FP64), "cross translator"),
    "replicas of contexts": (mh.ContextParallel(2, replicas=2, **FP64), "translator"),
    "pipeline": (mh.Pipeline(2, microbatches=2, **FP64), "hooks buffers by_tensor"),
    "placed": (mh.Placed(**FP64), "codebook hooks"),
    "deterministic pipeline": (mh.Pipeline(2, deterministic=True, **FP64), "dropout"),
}
REFUSED = {
    "mirrored": (
        mh.Mirrored(2),
        {
            "codebook": "forward updates must be a mean or a sum over samples, but got codes of Codebook",
            "own_batch_norm": r"got variance of OwnBatchNorm",
            "balanced_router": r"bias.*BalancedRouter",
        },
    ),
    "sharded": (
        mh.Sharded(2),
        {
            "codebook": "got codes of Codebook",
            "sparse": "got 0 with sparse=True",
            "own_step": r"run the same blocks of it.* but got rank 0 at experts.\d, rank 1 at experts.\d",
        },
    ),
    "tensor": (mh.TensorParallel(2), {"penalty": r"torch.autograd.grad .*, but got odd_networks.py:\d+: \(slope,\) ="}),
    "context": (
        mh.ContextParallel(2),
        {
            "codebook": "a network with attention over the sequence",
            "penalty": r"torch.autograd.grad .*, but got odd_networks.py:\d+: \(slope,\) =",
            "backward_hook": "got 0, a Linear with a backward hook",
            "own_step": "needs a task with loss=",
        },
    ),
    "pipeline": (
        mh.Pipeline(2, microbatches=2),
        {
            "penalty": r"got odd_networks.py:\d+: \(slope,\) =",
            "codebook": "got codes of Codebook",
            "signs": r"got Sign, in odd_networks.py:\d+",
            "backward_hook": "backward hooks of modules, but got one on 0",
            "by_all": "got OwnRule, which updates a tensor by what others are",
            "noisy": "got Noisy, which draws random numbers",
        },
    ),
}


def trained(world: World, names: list[str], spec: mh.StrategySpec, folder: Path) -> dict[str, Any]:
    """Train several tasks in one set of ranks; their losses and weights."""
    results = {}
    for name in names:
        losses: dict[str, list[float]] = {}
        world.channel.taps[:] = [partial(keep, into=losses)]
        where = folder / f"{name}-{world.size}"
        train(world, Job(task=TASKS[name], spec=spec.with_devices(world.size), folder=where, epochs=2))
        world.barrier()
        results[name] = (losses["loss"] if world.is_first else [], CheckpointStore(where / CHECKPOINTS).load().model)
    return results


def refusals(world: World, names: list[str], spec: mh.StrategySpec, folder: Path) -> dict[str, str]:
    """Return why each task is refused; empty where it is trained."""
    found = {}
    for name in names:
        try:
            train(world, Job(task=TASKS[name], spec=spec.with_devices(world.size), folder=folder / name, steps=3))
            found[name] = ""
        except UsageError as error:
            found[name] = str(error)
        world.barrier()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one device gives, by task."""
    known: dict[tuple[str, bool], Any] = {}

    def get(name: str, deterministic: bool) -> Any:
        if (name, deterministic) not in known:
            spec = mh.Single(deterministic=deterministic, **FP64)
            known[name, deterministic] = trained(NullWorld(), [name], spec, tmp_path_factory.mktemp("alone"))[name]
        return known[name, deterministic]

    return get


@pytest.mark.parametrize(("spec", "names"), SAME.values(), ids=list(SAME))
def test_strategies_do_not_change_results(
    spec: mh.StrategySpec, names: str, alone: Any, run_ranks: Any, tmp_path: Path
) -> None:
    size = 4 if (spec.replicas or 1) > 1 and ((spec.shards or 1) > 1 or spec.tensor * spec.context > 1) else 2
    results = run_ranks(partial(trained, names=names.split(), spec=spec, folder=tmp_path), size)[0]
    for name, (losses, weights) in results.items():
        expected_losses, expected = alone(name, spec.deterministic)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-9, err_msg=name)
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


@pytest.mark.parametrize(("spec", "reasons"), REFUSED.values(), ids=list(REFUSED))
def test_unsupported_networks_are_rejected_with_reason(
    spec: mh.StrategySpec, reasons: dict[str, str], run_ranks: Any, tmp_path: Path
) -> None:
    found = run_ranks(partial(refusals, names=list(reasons), spec=spec, folder=tmp_path), 2)[0]
    for name, reason in reasons.items():
        assert re.search(reason, found[name]), f"{name}: {found[name] or 'was trained'}"


def test_accumulation_with_buffers_and_hooks_matches_full_batch(alone: Any, tmp_path: Path) -> None:
    spec = mh.Single(accumulate=3, **FP64)
    for name in ("buffers", "hooks"):
        losses, weights = trained(NullWorld(), [name], spec, tmp_path)[name]
        np.testing.assert_allclose(losses, alone(name, False)[0], rtol=1e-9, err_msg=name)
        for key, value in alone(name, False)[1].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


@pytest.mark.parametrize(
    "spec",
    [
        mh.Mirrored(2, **FP64),
        mh.TensorParallel(2, **FP64),
        mh.Sharded(2, **FP64),
        mh.Sharded(2, sharding="optimizer", **FP64),
    ],
    ids=["mirrored", "tensor", "sharded", "optimizer"],
)
def test_forward_that_casts_parameters_matches_single_device(
    spec: mh.StrategySpec, alone: Any, run_ranks: Any, tmp_path: Path
) -> None:
    losses, weights = run_ranks(partial(trained, names=["router"], spec=spec, folder=tmp_path), 2)[0]["router"]
    expected_losses, expected = alone("router", False)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6, msg=key)
