"""`manyhands launch`: a script of one's own as every rank's main program."""

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


def test_a_process_of_its_own_runs_a_rank_per_device(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("launch", SCRIPT, "a", "--lr", "0.1", "--on", "cpu*2", "--", "--on", "x")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for rank in (0, 1):
        assert f"[rank {rank}] __main__ ['a', '--lr', '0.1', '--on', 'x'] total=3 " in out


def test_two_ranks_learn_what_one_does(invoke: Invoke) -> None:
    alone, both = (_loss(invoke("launch", SCRIPT, "--on", on).output) for on in ("cpu", "cpu*2"))
    assert both == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_the_strategy_reaches_the_script_s_hand(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "--on", on, "--strategy", "mirrored,accumulate=2")
    assert "accumulate=2" in result.output


def test_with_one_device_it_runs_in_this_process(invoke: Invoke) -> None:
    argv, path = list(sys.argv), list(sys.path)
    result = invoke("launch", SCRIPT, "--on", "cpu")
    assert result.exit_code == 0
    assert result.stdout.startswith("__main__ [] total=1 ")
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_a_script_s_own_exit_code_is_ours(on: str, invoke: Invoke) -> None:
    assert invoke("launch", SCRIPT, "exit", "--on", on).exit_code == 7


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_an_exception_shows_the_script_from_its_first_line(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "raise", "--on", on)
    assert result.exit_code == 1
    lines = result.stderr[result.stderr.index("Traceback") :].splitlines()
    assert re.search(r'own_loop.py", line \d+, in <module>', lines[1])
    assert lines[-1] == "ValueError: on purpose"


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_a_misuse_in_the_script_is_told_in_a_line_with_its_place(on: str, invoke: Invoke) -> None:
    result = invoke("launch", SCRIPT, "misuse", "--on", on)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert re.search(r"  at .*own_loop.py:\d+", result.stderr)
    assert "Traceback" not in result.stderr


def test_a_slip_of_the_pen_is_found_before_anything_starts(invoke: Invoke) -> None:
    Path("slip.py").write_text("x = 1\ndef f(:\n")
    result = invoke("launch", "slip.py", "--on", "cpu*2")
    assert result.exit_code == 2
    assert "slip.py:2" in result.stderr


def test_a_second_ctrl_c_ends_a_script_that_does_not_listen(start: Callable[..., subprocess.Popen[str]]) -> None:
    Path("deaf.py").write_text("import time\nopen('here', 'w')\ntime.sleep(100)\n")
    process = start("launch", "deaf.py", "--on", "cpu*2")
    end = time.monotonic() + 40
    while not Path("here").exists() and time.monotonic() < end:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Ctrl-C again" in err
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_a_sigterm_ends_a_script_on_one_device_at_once(invoke: Invoke) -> None:
    Path("deaf.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\nprint('went on')\n")
    result = invoke("launch", "deaf.py", "--on", "cpu")
    assert (result.exit_code, result.stdout) == (143, "")


def _loss(text: str) -> float:
    found = re.search(r"loss=([\d.]+)", text)
    assert found is not None, text
    return float(found[1])
