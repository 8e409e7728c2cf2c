"""Short runs of the sync benchmarks: every contender trains, and the report has the specified form."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import convergence, parameter_server, slow_link
from benchmarks.lessons import CNN, GPT, LIKES
from benchmarks.report import Report

from manyhands.launcher import LocalEngine


@pytest.mark.root
def test_slow_link_benchmark_runs_at_small_scale(engine: LocalEngine) -> None:
    rounds = slow_link.race("1gbit", 11, ["auto", "int8"], 2)
    assert [set(courses) for courses in rounds] == [{"ddp", "auto", "int8"}, {"ddp", "auto"}]
    # All contenders see the same samples in the same order: they begin with the same loss.
    first = {round(losses[0], 4) for courses in rounds for _, losses in courses.values()}
    assert len(first) == 1
    report = Report("slow_link", quick=False)
    slow_link.add(report, "1 Gbit/s", rounds)
    assert {row.name for row in report.rows} >= {"ddp"}
    assert report.notes["1 Gbit/s: ddp: steps"] == 11


def test_convergence_benchmark_runs_at_small_scale(engine: LocalEngine) -> None:
    for lesson in (CNN, GPT, LIKES):
        exact, lossy = (convergence.losses(lesson, policy, 4) for policy in ("allreduce", "topk(0.01,warmup=1)"))
        assert len(exact) == len(lossy) == 4
        assert exact[0] == pytest.approx(lossy[0], rel=1e-5)
    assert convergence.end([9.0] * 9 + [1.0]) == 1.0
    assert convergence.draw({"cnn": {"allreduce": exact, "topk": lossy}}).startswith("<svg")


def test_parameter_server_benchmark_runs_without_tensorflow(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_server.tensorflow_servers, "measure", lambda *sizes: "it is not there")
    report = Report("parameter_server", quick=False)
    parameter_server.beside_tensorflow(report, tmp_path, 10)
    assert [row.name for row in report.rows] == ["servers, asynchronous"]
    assert "no peer: it is not there" in report.notes
