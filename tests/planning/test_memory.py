"""What a plan says that a step holds is what a step was seen to hold."""

from __future__ import annotations

import pytest
from benchmarks.plan_local import TASKS

from manyhands import plans
from manyhands.cluster import NullWorld
from manyhands.core import StrategySpec, Task
from manyhands.planning import Footprint, estimate
from manyhands.profiling import Memory
from manyhands.profiling.memory import MemoryWatch
from manyhands.training import Steps


def seen(task: Task, spec: StrategySpec) -> Memory:
    """What the second step holds: the first one makes the optimizer's state."""
    steps = Steps(NullWorld(), task, spec)
    try:
        steps.take()
        with MemoryWatch(steps.hand) as watch:
            steps.take()
        return watch.found()
    finally:
        steps.close()


def predicted(task: Task, spec: StrategySpec) -> Footprint:
    bench = plans.Bench(task, "cpu", 60.0)
    workload, _ = plans.workload_of(task, "task", bench)
    return estimate(workload, bench.cluster(), spec).memory


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
    guess, found = predicted(task, spec), seen(task, spec)
    assert guess.total == pytest.approx(max(found.totals), rel=0.10)
    assert guess.parameters == pytest.approx(found.peak["parameters"], rel=0.01)
    assert guess.state == pytest.approx(found.peak["optimizer state"], rel=0.01)
    # An update changes the state in place; it is there once.
    assert max(found.bytes["optimizer state"]) == pytest.approx(guess.state, rel=0.01)
