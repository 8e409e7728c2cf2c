"""The planner against published results and steps measured on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import plan_published
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


def test_published_rows_that_do_not_say_enough_are_left_out_and_counted(tmp_path: Path) -> None:
    usual = dict.fromkeys(plan_published.COLUMNS, "x") | {
        "params_M": "25.6", "batch_per_gpu": "64", "gpu": "V100", "gpus_per_node": "8", "network": "25GbE",
        "unit": "img/s", "N": "16", "value": "5,000", "mode": "DDP",
    }  # fmt: skip
    changes: list[dict[str, str]] = [
        {},
        {"unit": "hours"},
        {"unit": "TFLOPs"},
        {"network": "unknown"},
        {"gpus_per_node": ""},
        {"batch_per_gpu": ""},
        {"value": "n/a"},
        {"N": "0"},
        {"unit": "img/sec per GPU", "value": "300"},
        {"unit": "ms/step", "network": "3 GB/s"},
    ]
    rows = [{**usual, **change} for change in changes]
    lines = [",".join(usual), *(",".join(f'"{text}"' for text in row.values()) for row in rows)]
    (tmp_path / "rows.csv").write_text("\ufeff" + "\n".join(lines))
    read = plan_published.read(tmp_path / "rows.csv")
    assert [round(point.throughput, 1) for point in read.points] == [5000.0, 4800.0, 3.2]
    reasons = ("no throughput", "unstated network", "unstated hosts", "unstated batch", "no number")
    assert read.left_out == dict(zip(reasons, (2, 1, 1, 1, 2), strict=True))
    (tmp_path / "rows.csv").write_text("system,N\nx,1\n")
    with pytest.raises(SystemExit, match="it lacks mode"):
        plan_published.read(tmp_path / "rows.csv")


def test_published_rows_under_tensor_parallelism_pay_for_its_sums() -> None:
    usual = dict.fromkeys(plan_published.COLUMNS, "") | {
        "model": "GPT", "params_M": "1811", "gpu": "V100", "gpus_per_node": "8", "network": "IB 100Gb", "unit": "seq/s"
    }  # fmt: skip

    def seconds(mode: str, count: int) -> float:
        row = {**usual, "mode": mode, "N": str(count)}
        return plan_published.seconds(plan_published.Point((), row, count, 1.0), 8.0)

    within, across = seconds("TP8 h3072 L16 gb16", 8), seconds("TP16 h3072 L16 gb16", 16)
    assert 1.0 < within < across  # computing takes 1 s on eight devices, half of that on sixteen
    staged = seconds("TP8xPP2 h3072 L16 gb16", 16)
    assert 0.5 < staged < across
    unstated = {**usual, "mode": "TP8 gb16", "N": "8", "value": "3"}
    assert plan_published.unusable(unstated) == "unstated width or layers"


def test_rank_correlation() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1.0
