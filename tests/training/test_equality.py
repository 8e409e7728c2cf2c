"""Single and Mirrored on 1 to 4 ranks give the result of a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.core import Mean, mix, seed_all
from manyhands.data import Cursor, Feed, as_source
from manyhands.distributed import NullWorld, World
from manyhands.storage import CheckpointStore
from manyhands.training import CHECKPOINTS, Job, train

from .problems import problem

EPOCHS = 2


def trained(world: World, tasks: dict[str, mh.Task], spec: mh.StrategySpec, folder: Path) -> dict[str, Any]:
    """Trains several tasks in one set of ranks; their losses and weights."""
    results = {}
    for name, task in tasks.items():
        losses: dict[str, list[float]] = {}
        world.channel.taps[:] = [partial(keep, into=losses)]
        where = folder / f"{name}-{world.size}-{spec.precision}-{spec.accumulate}"
        train(world, Job(task=task, spec=spec.with_devices(world.size), folder=where, epochs=EPOCHS, verify=False))
        world.barrier()
        results[name] = (losses, CheckpointStore(where / CHECKPOINTS).load().model)
    return results


def keep(entry: dict[str, Any], into: dict[str, list[float]]) -> None:
    if entry["kind"] == "steps":
        for name, values in entry["losses"].items():
            into.setdefault(name, []).extend(values)


def by_hand(task: mh.Task, accumulate: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Train with plain PyTorch, in the sample order of manyhands."""
    assert task.loss is not None
    assert task.batch_size is not None
    seed_all(mix(task.seed, 0))
    model = task.model().to(dtype).train()
    optimizer = task.optimizer(model)
    feed = Feed(as_source(task.data), batch_size=task.batch_size, seed=task.seed, accumulate=accumulate, dtype=dtype)
    losses = []
    for epoch in range(EPOCHS):
        for batch in feed.epoch(Cursor(epoch, 0)):
            parts = [(task.loss(model, data), size) for data, size, _ in batch.micros()]
            if isinstance(parts[0][0], Mean):
                loss = sum(p.total for p, _ in parts) / sum(p.count for p, _ in parts)
            else:
                loss = sum(value * size for value, size in parts) / batch.num_samples
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


NAMES = ("mlp", "cnn", "gpt", "gan")
CASES = [(name, optimizer) for name in NAMES for optimizer in ("sgd", "adamw")]


def tasks() -> dict[str, mh.Task]:
    return {f"{name}-{optimizer}": problem(name, optimizer) for name, optimizer in CASES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Results on one device, by precision and accumulation."""
    known: dict[tuple[str, int], dict[str, Any]] = {}

    def get(precision: str, accumulate: int) -> dict[str, Any]:
        if (precision, accumulate) not in known:
            spec = mh.Single(precision=precision, accumulate=accumulate, batch_stats="micro")
            known[precision, accumulate] = trained(NullWorld(), tasks(), spec, tmp_path_factory.mktemp("alone"))
        return known[precision, accumulate]

    return get


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "gan"], ids="-".join)
def test_one_device_equals_a_loop_written_by_hand(case: tuple[str, str], accumulate: int, alone: Any) -> None:
    losses, weights = by_hand(problem(*case), accumulate, torch.float64)
    ours, our_weights = alone("fp64", accumulate)["-".join(case)]
    np.testing.assert_allclose(ours["loss"], losses, rtol=1e-12)
    for name, value in weights.items():
        torch.testing.assert_close(our_weights[name], value, rtol=0, atol=1e-9, msg=name)


LAYOUTS = [(size, "fp64", accumulate) for size in (2, 3, 4) for accumulate in (1, 3)]


@pytest.mark.parametrize(("size", "precision", "accumulate"), [*LAYOUTS, (2, "fp32", 3), (3, "fp32", 1)])
def test_mirrored_equals_one_device(
    size: int, precision: str, accumulate: int, alone: Any, run_ranks: Any, tmp_path: Path
) -> None:
    spec = mh.Mirrored(precision=precision, accumulate=accumulate, batch_stats="micro")
    results = run_ranks(partial(trained, tasks=tasks(), spec=spec, folder=tmp_path), size)[0]
    expected = alone(precision, accumulate)
    for name, (losses, weights) in expected.items():
        found, found_weights = results[name]
        assert found.keys() == losses.keys()
        for key, values in losses.items():
            assert len(values) == 2 * 3
            np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=f"{name} {key}")
        if precision == "fp64":
            for key, value in weights.items():
                torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


def test_more_replicas_than_last_batch_samples_equal_single_device(run_ranks: Any, tmp_path: Path) -> None:
    """41 samples in batches of 20 leave one: three of four replicas only take part in its collectives."""
    only = {"cnn": problem("cnn", "adamw", batch_size=20), "gpt": problem("gpt", "adamw", batch_size=20)}
    alone = trained(NullWorld(), only, mh.Single(precision="fp64"), tmp_path)
    four = run_ranks(partial(trained, tasks=only, spec=mh.Mirrored(precision="fp64"), folder=tmp_path), 4)[0]
    for name, (losses, weights) in alone.items():
        np.testing.assert_allclose(four[name][0]["loss"], losses["loss"], rtol=1e-9)
        for key, value in weights.items():
            torch.testing.assert_close(four[name][1][key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")


def test_bfloat16_losses_stay_close_to_float32(run_ranks: Any, tmp_path: Path) -> None:
    only = {"mlp": problem("mlp")}
    alone = trained(NullWorld(), only, mh.Single(), tmp_path)["mlp"][0]["loss"]
    spec = mh.Mirrored(precision="bf16")
    two = run_ranks(partial(trained, tasks=only, spec=spec, folder=tmp_path), 2)[0]["mlp"][0]["loss"]
    np.testing.assert_allclose(two, alone, rtol=0.05)
    assert max(abs(a - b) for a, b in zip(two, alone, strict=True)) > 1e-6, "bf16 must really be used"
