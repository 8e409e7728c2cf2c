"""What a plan says that a step holds is what a step was seen to hold."""

from __future__ import annotations

import pytest
from benchmarks.plan_local import TASKS

import manyhands as mh
from manyhands import plans
from manyhands.core import StrategySpec
from manyhands.planning import estimate


@pytest.mark.parametrize(
    ("name", "strategy", "rows"),
    [
        ("GPT", "single", 4),
        ("GPT", "accumulate=2", 8),
        ("GPT", "recompute=blocks", 4),
        ("CNN", "single", 8),
        ("CNN", "accumulate=2", 8),
    ],
)
def test_peaks(name: str, strategy: str, rows: int) -> None:
    task, spec = TASKS[name].replace(batch_size=rows), StrategySpec.parse(strategy)
    bench = plans.Bench(task, "cpu", 60.0)
    workload, _ = plans.workload_of(task, name, bench)
    predicted = estimate(workload, bench.cluster(), spec).memory
    seen = mh.profile(task, spec, on="cpu", steps=1).ranks[0].memory
    assert seen is not None
    assert predicted.total == pytest.approx(max(seen.totals), rel=0.10)
    assert predicted.parameters == pytest.approx(seen.peak["parameters"], rel=0.01)
    assert predicted.state == pytest.approx(seen.peak["optimizer state"], rel=0.01)
