"""`manyhands launch`: the user's script as the main program of every rank."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import Invoke

SCRIPT = "own_loop.py"


def test_launch_command_runs_one_rank_per_device(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("launch", SCRIPT, "a", "--lr", "0.1", "--on", "cpu*2", "--", "--on", "x")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    for rank in (0, 1):
        assert f"[rank {rank}] __main__ ['a', '--lr', '0.1', '--on', 'x'] total=3 " in out


def test_two_ranks_reach_the_same_loss_as_one(invoke: Invoke) -> None:
    alone, both = (_loss(invoke("launch", SCRIPT, "--on", on).output) for on in ("cpu", "cpu*2"))
    assert both == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_strategy_option_is_applied_to_the_hand_of_the_script(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "--on", on, "--strategy", "mirrored,accumulate=2")
    assert "accumulate=2" in result.output


def test_script_on_one_device_runs_in_the_current_process(invoke: Invoke) -> None:
    argv, path = list(sys.argv), list(sys.path)
    result = invoke("launch", SCRIPT, "--on", "cpu")
    assert result.exit_code == 0
    assert result.stdout.startswith("__main__ [] total=1 ")
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_exit_code_of_the_script_is_returned(on: str, invoke: Invoke) -> None:
    assert invoke("launch", SCRIPT, "exit", "--on", on).exit_code == 7


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_exception_traceback_starts_in_the_script(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "raise", "--on", on)
    assert result.exit_code == 1
    lines = result.stderr[result.stderr.index("Traceback") :].splitlines()
    assert re.search(r'own_loop.py", line \d+, in <module>', lines[1])
    assert lines[-1] == "ValueError: on purpose"


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_usage_error_in_the_script_prints_one_line_with_its_location(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "misuse", "--on", on)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert re.search(r"  at .*own_loop.py:\d+", result.stderr)
    assert "Traceback" not in result.stderr


def test_syntax_error_is_reported_before_ranks_start(invoke: Invoke) -> None:
    Path("slip.py").write_text("x = 1\ndef f(:\n")
    result = invoke("launch", "slip.py", "--on", "cpu*2")
    assert result.exit_code == 2
    assert "slip.py:2" in result.stderr


def test_second_ctrl_c_kills_a_script_that_ignores_the_first(start: Callable[..., subprocess.Popen[str]]) -> None:
    Path("deaf.py").write_text("import time\nopen('here', 'w')\ntime.sleep(100)\n")
    process = start("launch", "deaf.py", "--on", "cpu*2")
    end = time.monotonic() + 120
    while not Path("here").exists() and time.monotonic() < end:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in (line := process.stderr.readline()):
        assert line, "the program ended at the first Ctrl-C"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_sigterm_ends_a_script_on_one_device_immediately(invoke: Invoke) -> None:
    Path("deaf.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\nprint('continued')\n")
    result = invoke("launch", "deaf.py", "--on", "cpu")
    assert (result.exit_code, result.stdout) == (143, "")


def _loss(text: str) -> float:
    found = re.search(r"loss=([\d.]+)", text)
    assert found is not None, text
    return float(found[1])
