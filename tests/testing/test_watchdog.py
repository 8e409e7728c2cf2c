"""The time limit of tests also ends tests that pytest-timeout cannot end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import ctypes, signal, time
import pytest

@pytest.fixture
def unending():
    yield
    time.sleep(600)

def ignore_signals():
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)

def test_sleeping():
    ignore_signals()
    time.sleep(600)

def test_holding_the_gil():
    ignore_signals()
    ctypes.PyDLL(None).sleep(600)

def test_failed_with_a_fixture_that_does_not_end(unending):
    raise AssertionError

def test_that_passes():
    pass
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_blocked.py").write_text(TESTS)
    (folder / "conftest.py").write_text(
        "from tests import watchdog\n"
        "watchdog.GRACE_SECONDS = 0.5\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(watchdog.Watchdog())\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "--timeout", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True)


def test_blocked_tests_that_ignore_signals_are_killed_and_reported(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-n", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("sleeping", "holding_the_gil", "failed_with_a_fixture_that_does_not_end"):
        assert f"crashed while running 'test_blocked.py::test_{name}'" in done.stdout
        assert f"in test_{name}" in done.stderr or name.startswith("failed"), "no stack of the test"
    assert "test_blocked.py::test_sleeping did not end within 1.5 seconds" in done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("name", ["sleeping", "holding_the_gil"])
def test_blocked_test_fails_the_run_without_xdist_workers(name: str, tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-n", "0", "-k", name)
    assert done.returncode == 1
    assert f"in test_{name}" in done.stderr
