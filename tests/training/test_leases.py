"""Fit and leases: a second program on the same device waits, or names the holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.launcher import leases

from ..monitoring.test_sinks import fit, notices

OTHER = """
import sys
from manyhands.distributed import Device
from manyhands.launcher import leased, leases
leases.UNLEASED = frozenset()
with leased([Device("cpu")], "the-other-run"):
    print("got", flush=True)
    sys.stdin.readline()
"""
WAITING = """
import sys
import manyhands as mh
from manyhands.launcher import leases
leases.UNLEASED = frozenset()
sys.path.insert(0, sys.argv[1])
from tests.monitoring.test_sinks import task
mh.fit(task, on="cpu", name="run")
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another program that holds the CPU, which for once is leased like a GPU."""
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(leases, "UNLEASED", frozenset())
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "got\n"
        yield process
        process.kill()


def test_fit_logs_the_lease_holder_and_trains_after_release(other: subprocess.Popen[str], tmp_path: Path) -> None:
    def release(entry: dict[str, object]) -> None:
        if "is held by" in str(entry.get("text")):
            other.kill()

    run = fit(tmp_path, [release], on="cpu*2")
    assert run.num_steps == 8
    said = notices(run.path)
    assert f"cpu:0 is held by process {other.pid}" in said[0]
    assert "for the run the-other-run" in said[0]
    assert "came free" in said[1]


def test_busy_device_refusal_leaves_no_run_folder(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_ON_BUSY", "refuse")
    with pytest.raises(ValueError, match=rf"held by process {other.pid} .* for the run the-other-run"):
        fit(tmp_path / "runs", ["csv"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_ctrl_c_interrupts_waiting_for_a_device(other: subprocess.Popen[str], tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, root], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert waiting.stderr is not None
    assert "is held by process" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, text = waiting.communicate(timeout=120)
    assert waiting.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in text
    events = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["reason"].startswith("KeyboardInterrupt")
