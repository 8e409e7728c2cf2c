"""`manyhands fit --log-to`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Invoke


def test_log_to_option_writes_csv_and_tensorboard_logs(invoke: Invoke) -> None:
    result = invoke("fit", "small_task.py", "--on", "cpu", "--name", "first", "--log-to", "csv,tensorboard")
    assert result.exit_code == 0, result.output
    assert "train/loss" in Path("runs/first/metrics.csv").read_text()
    assert list(Path("runs/first/tensorboard").glob("events.*"))
    assert "--log-to csv,tensorboard" in result.stdout


def test_log_to_can_be_set_by_environment_or_config_file(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_LOG_TO", "csv")
    told = json.loads(invoke("fit", "small_task.py", "--on", "cpu", "--name", "first", "--json").stdout)
    assert told["sources"]["log_to"] == "MANYHANDS_LOG_TO"
    assert Path("runs/first/metrics.csv").exists()
    Path("fit.toml").write_text('log-to = "tensorboard"')
    invoke("fit", "small_task.py", "--on", "cpu", "--name", "second", "--config", "fit.toml")
    assert Path("runs/second/tensorboard").exists()
    assert not Path("runs/second/metrics.csv").exists()


def test_unknown_log_sink_is_rejected_before_the_run_starts(invoke: Invoke) -> None:
    result = invoke("fit", "small_task.py", "--on", "cpu", "--name", "first", "--log-to", "tensorbord")
    assert result.exit_code == 2
    assert "--log-to must be one of csv, tensorboard, wandb, mlflow" in result.stderr
    assert "but got 'tensorbord'. Did you mean 'tensorboard'?" in result.stderr
    assert not Path("runs/first").exists()
