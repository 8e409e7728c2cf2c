"""The three examples: on one device, on two replicas under launch, on two workers by TF_CONFIG, and by themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

from manyhands.testing import held_ports

from .behaviours import EXAMPLES, run_example


def start(folder: Path, script: str, **environ: str) -> subprocess.Popen[str]:
    """Starts an example as a program, in a folder of its own."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": "2", **environ}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, str(EXAMPLES / script)], cwd=folder, env=settings, **output)  # type: ignore[call-overload, no-any-return]


def said_by(process: subprocess.Popen[str]) -> str:
    """What a program has printed when it has ended well."""
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 0, said
    return said


def test_mirrored_starts_itself_again(tmp_path: Path) -> None:
    """Under plain Python, on all devices that there are or that are named; with the result of one device."""
    again = start(tmp_path, "mirrored.py", MANYHANDS_ON="cpu*2")
    loss = run_example("mirrored.py", tmp_path / "alone")["loss"]
    said = said_by(again)
    assert "MirroredStrategy: starting mirrored.py again, a replica on each of cpu#0, cpu#1" in said
    assert "2 replicas" in said
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) == pytest.approx(loss, rel=1e-4)
    ours, theirs = (keras.models.load_model(folder / "digits.keras") for folder in (tmp_path, tmp_path / "alone"))
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_two_workers_by_tf_config(tmp_path: Path) -> None:
    with held_ports(2) as ports:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        tasks = [{"type": "worker", "index": index} for index in range(2)]
        workers = [start(tmp_path, "workers.py", TF_CONFIG=json.dumps({"cluster": cluster, "task": t})) for t in tasks]
        loss = run_example("workers.py", tmp_path / "alone")["history"].history["loss"][-1]
        first_said, second_said = (said_by(worker) for worker in workers)
    assert float(re.findall(r"2 replicas, loss ([\d.]+)", first_said)[0]) == pytest.approx(loss, rel=1e-4)
    assert "loss" not in second_said
    assert (tmp_path / "workers.keras").exists()


def test_micro_steps_of_a_loop_of_ones_own(every: dict[str, Any], tmp_path: Path) -> None:
    """Four micro-steps on two replicas are one step on one device."""
    first, second = (facts["losses"] for facts in every["micro_steps_of_a_loop_of_ones_own"])
    alone = run_example("own_loop.py", tmp_path, MICRO_STEPS="1")["losses"]
    assert first == second == pytest.approx([float(loss) for loss in alone], rel=1e-5)
