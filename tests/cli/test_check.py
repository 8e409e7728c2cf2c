"""`manyhands check`: the verdict as text, JSON and exit code."""

from __future__ import annotations

import json

from .conftest import Invoke

TARGET = "small_task.py"


def test_equal_results_exit_with_code_0(invoke: Invoke) -> None:
    result = invoke("check", TARGET, "norm=yes", "--on", "cpu*2")
    assert result.exit_code == 0
    assert "equal: replicas=2" in result.stdout


def test_different_results_exit_with_code_1_and_print_the_reason(invoke: Invoke) -> None:
    result = invoke("check", TARGET, "norm=yes", "--strategy", "mirrored,batch_stats=local", "--on", "cpu*2")
    assert result.exit_code == 1
    assert "different:" in result.stdout
    assert "batch statistics are local" in result.stdout


def test_json_output_contains_the_verdict_and_reason(invoke: Invoke) -> None:
    words = ["norm=yes", "--strategy", "mirrored,batch_stats=local", "--on", "cpu*2"]
    result = invoke("check", TARGET, *words, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["equal"] is False
    assert "batch statistics are local" in told["why"]


def test_one_device_prints_that_nothing_was_split(invoke: Invoke) -> None:
    result = invoke("check", TARGET, "--on", "cpu")
    assert result.exit_code == 0
    assert "nothing was split" in result.stderr


def test_invalid_strategy_exits_with_code_2(invoke: Invoke) -> None:
    result = invoke("check", TARGET, "--strategy", "zigzag")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
