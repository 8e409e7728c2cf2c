"""The three examples: on one device, on two replicas under launch, on two workers by TF_CONFIG, and by themselves."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import manyhands as mh

EXAMPLES = Path(__file__).parents[2] / "examples" / "keras"


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


def run_here(hand: Any, script: str, folder: Path, **environ: str) -> Any:
    """Runs an example in this process, or rank; gives the last loss that it knows."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {"EPOCHS": "2", **environ}.items():
            patch.setenv(name, value)
        names = runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return (
        names["loss"]
        if "loss" in names
        else names["history"].history["loss"][-1]
        if "history" in names
        else [float(loss) for loss in names["losses"]]
    )


def test_mirrored_starts_itself_again(tmp_path: Path) -> None:
    """Under plain Python, on all devices that there are or that are named; with the result of one device."""
    again = start(tmp_path, "mirrored.py", MANYHANDS_ON="cpu*2")
    loss = run_here(None, "mirrored.py", tmp_path / "alone")
    said = said_by(again)
    assert "MirroredStrategy: starting mirrored.py again, a replica on each of cpu#0, cpu#1" in said
    assert "2 replicas" in said
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) == pytest.approx(loss, rel=1e-4)
    ours, theirs = (keras.models.load_model(folder / "digits.keras") for folder in (tmp_path, tmp_path / "alone"))
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_two_workers_by_tf_config(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        cluster = {"worker": [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]}
    tasks = [{"type": "worker", "index": index} for index in range(2)]
    workers = [start(tmp_path, "workers.py", TF_CONFIG=json.dumps({"cluster": cluster, "task": t})) for t in tasks]
    loss = run_here(None, "workers.py", tmp_path / "alone")
    first_said, second_said = (said_by(worker) for worker in workers)
    assert float(re.findall(r"2 replicas, loss ([\d.]+)", first_said)[0]) == pytest.approx(loss, rel=1e-4)
    assert "loss" not in second_said
    assert (tmp_path / "workers.keras").exists()


def test_micro_steps_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Four micro-steps on two replicas are one step on one device."""
    run = functools.partial(run_here, script="own_loop.py", folder=tmp_path)
    two = mh.launch(run, "mirrored", on="cpu*2", progress=False, timeout=60)
    assert two[0] == two[1] == pytest.approx(run(None, MICRO_STEPS="1"), rel=1e-5)
