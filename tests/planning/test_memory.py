"""Predicted memory of a step equals the measured memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from benchmarks.plan_gpu import resnet
from benchmarks.plan_local import TASKS
from torch import nn

from manyhands.api.bench import Bench, workload_of
from manyhands.core import StrategySpec, Task
from manyhands.distributed import NullWorld
from manyhands.planning import Cluster, Workload, estimate
from manyhands.planning.memory import Footprint
from manyhands.profiling import MemoryProfile
from manyhands.profiling.memory import MemoryWatch
from manyhands.training import Steps

PICTURES = (torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))
WORKS = TASKS | {"ResNet": TASKS["CNN"].replace(model=partial(resnet, 16), data=PICTURES)}


def seen(task: Task, spec: StrategySpec) -> MemoryProfile:
    """What the second step holds: the first one makes the optimizer's state."""
    steps = Steps(NullWorld(), task, spec)
    try:
        steps.take()
        with MemoryWatch(steps.hand) as watch:
            steps.take()
        return watch.found()
    finally:
        steps.close()


def traced(task: Task) -> tuple[Workload, Cluster]:
    bench = Bench(task, "cpu", 60.0)
    workload, _ = workload_of(task, "task", bench)
    return workload, bench.cluster()


@cache
def work(name: str) -> tuple[Workload, Cluster]:
    """A work, traced once for all batches and ways."""
    return traced(WORKS[name])


def predicted(task: Task, spec: StrategySpec) -> Footprint:
    return estimate(*traced(task), spec).memory


@pytest.mark.parametrize(
    ("name", "strategy", "rows"),
    [
        ("GPT", "single", 4),
        ("GPT", "accumulate=2", 8),
        ("GPT", "recompute=blocks", 4),
        ("CNN", "single", 8),
        ("ResNet", "recompute=blocks", 8),  # of four stages, no two alike
        ("ResNet", "accumulate=4", 8),
    ],
)
def test_estimated_peak_memory_matches_the_measured_peak(name: str, strategy: str, rows: int) -> None:
    task, spec, (workload, cluster) = WORKS[name].replace(batch_size=rows), StrategySpec.parse(strategy), work(name)
    guess, found = estimate(replace(workload, batch_size=rows), cluster, spec).memory, seen(task, spec)
    assert guess.total == pytest.approx(max(found.totals), rel=0.10)
    assert guess.parameters == pytest.approx(found.peak["parameters"], rel=0.01)
    assert guess.state == pytest.approx(found.peak["optimizer state"], rel=0.01)
    # An update changes the state in place; it is there once.
    assert max(found.bytes["optimizer state"]) == pytest.approx(guess.state, rel=0.01)


def test_frozen_parameters_reduce_gradient_memory_and_communication() -> None:
    def make(frozen: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 1))
        model[2].requires_grad_(not frozen)
        return model

    whole, most = (
        Task(
            model=partial(make, frozen),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda model: torch.optim.Adam(p for p in model.parameters() if p.requires_grad),
            data=torch.randn(16, 16),
            batch_size=8,
        )
        for frozen in (False, True)
    )
    spec = StrategySpec()
    guess, found = predicted(most, spec), seen(most, spec)
    assert guess.total == pytest.approx(max(found.totals), rel=0.10)
    assert guess.total < 0.4 * predicted(whole, spec).total
    slow = Cluster.parse("2 hosts x 1 V100, 1Gb/s")
    waited = [
        estimate(workload_of(task, "task", Bench(task, "cpu", 60.0))[0], slow, spec).communication
        for task in (whole, most)
        for spec in (StrategySpec(replicas=2), StrategySpec(shards=2, sharding="gradients"))
    ]
    assert waited[2] < 0.1 * waited[0]
    assert waited[3] < 0.7 * waited[1]
