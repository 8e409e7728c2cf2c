"""The scorecard's parts that need no measuring here: famous points, and steps that were measured on an H200."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu_works import WORKS, loss
from benchmarks.plan_famous import POINTS
from benchmarks.plan_vtrain import rank_correlation

import manyhands as mh
from manyhands.core import StrategySpec
from manyhands.costs import trace
from manyhands.planning import Cluster, Workload, estimate


def test_published_speedups_are_predicted() -> None:
    for point in POINTS:
        then, now = point.predicted(), point.nowadays()
        assert abs(then / point.speedup - 1) < 0.1, point.name
        assert point.speedup < now <= point.num_devices


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("gpt_small", 1.04),
        ("gpt2", 62.5),
    ],  # measured on an H200 with torch 2.11, bf16: benchmarks/results/gpu_step.json
)
def test_h200_step_times_are_predicted_from_the_catalogue(name: str, milliseconds: float) -> None:
    work = WORKS[name]
    length = 128 if name == "gpt_small" else 1024
    tokens = torch.zeros(2, length, dtype=torch.long)
    task = mh.Task(model=work.model, loss=loss, optimizer=work.optimizer, data=[0])
    network = trace(task, (tokens, tokens), rows=work.batch_size, precision="bf16")
    load = Workload(networks={"bf16": network}, batch_size=work.batch_size)
    found = estimate(load, Cluster.parse("1 H200"), StrategySpec(precision="bf16"))
    assert 1e3 * found.seconds == pytest.approx(milliseconds, rel=0.3)


def test_rank_correlation() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1.0
