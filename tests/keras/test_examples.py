"""The three examples as a newcomer runs them: one device, two replicas under launch, two workers by TF_CONFIG."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "keras"
LAUNCH = ("-m", "manyhands", "launch", "--on", "cpu*2")


def start(folder: Path, *command: str, **environ: str) -> subprocess.Popen[str]:
    """Starts a program in a folder of its own."""
    folder.mkdir(exist_ok=True)
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": "2", **environ}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(process: subprocess.Popen[str], name: str = "loss") -> list[float]:
    """The values that a program prints after a name, when it has ended well."""
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, said
    return [float(value) for value in re.findall(rf"\b{name} ([\d.]+)", said)]


def test_mirrored_by_launch_and_by_itself(tmp_path: Path) -> None:
    """Two replicas equal one; under plain Python the script is started again on all devices that are named."""
    script = str(EXAMPLES / "mirrored.py")
    alone = start(tmp_path / "alone", script)
    again = start(tmp_path / "again", script, MANYHANDS_ON="cpu*2")
    said, _ = again.communicate(timeout=100)
    assert "MirroredStrategy: starting mirrored.py again" in said
    assert "2 replicas" in said, said
    (loss,) = printed(alone)
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) == pytest.approx(loss, rel=1e-4)
    ours, theirs = (keras.models.load_model(tmp_path / name / "digits.keras") for name in ("again", "alone"))
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_two_workers_by_tf_config(tmp_path: Path) -> None:
    script = str(EXAMPLES / "workers.py")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        cluster = {"worker": [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]}
    workers = [
        start(tmp_path, script, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}))
        for index in range(2)
    ]
    (together,), nothing = (printed(worker) for worker in workers)
    assert nothing == []
    (loss,) = printed(start(tmp_path / "alone", script))
    assert together == pytest.approx(loss, rel=1e-5)


def test_micro_steps_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    split = start(tmp_path / "split", *LAUNCH, script)
    whole = printed(start(tmp_path / "whole", script, MICRO_STEPS="1"))
    assert len(whole) == 2
    assert printed(split) == pytest.approx(whole, rel=1e-5)
