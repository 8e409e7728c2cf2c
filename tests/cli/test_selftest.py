"""`manyhands selftest`: every strategy on several devices, compared with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.api import selftest
from manyhands.api.runtime import _experimental
from manyhands.core import SettingsError, StrategySpec
from manyhands.distributed import Device

from .conftest import Invoke

ALL_STRATEGIES = selftest.strategies


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a self-test short: one network, a replica and a layer that is split."""
    monkeypatch.setattr(selftest, "NETWORKS", {"decoder": selftest.decoder_task})
    monkeypatch.setattr(selftest, "strategies", lambda size: [StrategySpec(replicas=size), StrategySpec(tensor=size)])
    monkeypatch.setattr(selftest, "STEPS", 4)


def test_selftest_compares_two_processes_with_one_and_writes_a_report(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = invoke("selftest", "--on", "cpu*2", "--report", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["passed"]
    assert [trial["strategy"] for trial in report["trials"]] == ["replicas=2", "tensor=2"]
    for trial in report["trials"]:
        assert trial["outcome"] == "passed", trial
        assert trial["loss_difference"] <= selftest.TOLERANCE
        assert trial["step_ratio"] > 0
    assert [each["num_bytes"] for each in report["transfers"]] == list(selftest.SIZES)
    assert report["step_over_ddp"] > 0
    assert report["step_over_fsdp"] > 0
    assert "2 passed" in result.stdout
    assert "passed   decoder        tensor=2" in result.stdout


def test_strategy_with_other_losses_fails_the_selftest(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    real = selftest._losses

    def drifting(task: Any, spec: StrategySpec, on: Any) -> list[float]:
        losses = real(task, spec, on)
        return [loss * 1.01 for loss in losses] if spec.replicas == 2 else losses

    monkeypatch.setattr(selftest, "_losses", drifting)
    monkeypatch.setattr(selftest, "_peers", lambda *_: (1.0, 1.0))
    result = invoke("selftest", "--on", "cpu*2", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["trials"]
    assert (first["outcome"], second["outcome"]) == ("failed", "passed")
    assert "losses differ from one device by 0.01" in first["detail"]


def test_losses_that_become_nan_and_parts_that_raise_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no connection")

    real = selftest._losses

    def skipping(task: Any, spec: StrategySpec, on: Any) -> list[float]:
        losses = real(task, spec, on)
        return [losses[0], *(float("nan") for _ in losses[1:])] if spec.replicas == 2 else losses

    monkeypatch.setattr(selftest, "_losses", skipping)
    monkeypatch.setattr(selftest, "_transfers", broken)
    monkeypatch.setattr(selftest, "_peers", broken)
    report = selftest.selftest("cpu*2")
    assert not report.passed
    outcomes = {trial.strategy: trial.outcome for trial in report.trials}
    assert outcomes == {
        "all-reduce": "failed", "replicas=2": "failed", "tensor=2": "passed", "loops by hand": "failed"
    }  # fmt: skip
    assert report.trials[0].detail == "RuntimeError: no connection"


def test_strategies_after_the_time_limit_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_peers", lambda *_: (1.0, 1.0))
    report = selftest.selftest("cpu*2", minutes=1e-6)
    assert [trial.outcome for trial in report.trials] == ["omitted", "omitted"]
    assert report.passed


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gpus", "1"), "--gpus must be at least 2"),
        (("--gpus", "2", "--on", "cpu*2"), "cannot be combined with --on"),
        (("--on", "cpu"), "a self-test needs at least two devices"),
        (("--on", "cpu*2", "--report", "missing/report.json"), "the folder of --report must exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(words: tuple[str, ...], text: str, invoke: Invoke) -> None:
    result = invoke("selftest", *words)
    assert result.exit_code != 0
    assert text in result.output


def test_minutes_must_be_positive() -> None:
    with pytest.raises(SettingsError, match="minutes must be above 0"):
        selftest.selftest("cpu*2", minutes=0)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_strategy_of_a_selftest_uses_all_devices(size: int) -> None:
    specs = list(ALL_STRATEGIES(size))
    assert len({str(spec) for spec in specs}) == len(specs)
    assert {spec.num_devices for spec in specs} == {size}


def test_several_gpus_over_nccl_are_called_experimental() -> None:
    two = [Device("cuda", 0), Device("cuda", 1)]
    assert "experimental" in _experimental(two)[0]
    assert _experimental([Device("cuda", 0), Device("cuda", 0, share=0.5, slot=1)]) == []
    assert _experimental([Device("cpu"), Device("cpu", slot=1)]) == []
