"""The examples: on one device, on two replicas under launch, by themselves, and as tasks of a cluster by TF_CONFIG."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from manyhands.distributed import World
from manyhands.distributed import world as worlds
from manyhands.testing import held_ports

from .behaviours import EXAMPLES, run_example


def start(folder: Path, script: str, **environ: str) -> subprocess.Popen[str]:
    """Starts an example as a program, in a folder of its own."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": "2", **environ}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, str(EXAMPLES / script)], cwd=folder, env=settings, **output)  # type: ignore[call-overload, no-any-return]


def said_by(process: subprocess.Popen[str]) -> str:
    """What a program has printed when it has ended well."""
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    return said


def test_mirrored_strategy_relaunches_the_script_per_device(tmp_path: Path) -> None:
    """Under plain Python, on all devices that there are or that are named; with the result of one device."""
    again = start(tmp_path, "mirrored.py", MANYHANDS_ON="cpu*2")
    loss = run_example("mirrored.py", tmp_path / "alone")["loss"]
    said = said_by(again)
    assert "MirroredStrategy: restarting mirrored.py on cpu#0, cpu#1, one replica each" in said
    assert "2 replicas" in said
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) == pytest.approx(loss, rel=1e-4)
    folders = (tmp_path / "runs", tmp_path / "alone" / "runs")
    ours, theirs = (keras.models.load_model(folder / "digits.keras") for folder in folders)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def task(world: World, script: str, cluster: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """One task of a cluster, a process that knows of the others by TF_CONFIG alone; what its example learned."""
    role, index = [(role, index) for role, hosts in cluster.items() for index in range(len(hosts))][world.rank]
    world.close()
    worlds._current.clear()  # as in a process that manyhands did not start
    config = {"cluster": cluster, "task": {"type": role, "index": index}}
    names = run_example(script, folder, TF_CONFIG=json.dumps(config))
    strategy = names["strategy"]
    # A forked process ends without the handlers by which a program that serves the others ends last.
    strategy.barrier()
    return {
        "replicas": strategy.num_replicas_in_sync,
        "worker": strategy.worker,
        "loss": names["history"].history["loss"],
        "weights": names["model"].get_weights(),
    }


@pytest.fixture
def run_tasks(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[dict[str, Any]]]:
    """Runs an example as so many tasks of each part."""

    def run(script: str, folder: Path, **counts: int) -> list[dict[str, Any]]:
        with held_ports(sum(counts.values())) as ports:
            free = iter(ports)
            cluster = {role: [f"127.0.0.1:{next(free)}" for _ in range(count)] for role, count in counts.items()}
            return run_ranks(functools.partial(task, script=script, cluster=cluster, folder=folder), len(ports))

    return run


def test_tf_config_with_two_workers(run_tasks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    two = run_tasks("workers.py", tmp_path, worker=2)
    one = run_example("workers.py", tmp_path / "alone")
    assert [told["replicas"] for told in two] == [2, 2]
    require_equal(two, one)
    assert (tmp_path / "runs" / "workers.keras").exists()


def test_tf_config_with_chief_workers_and_parameter_server(
    run_tasks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Steps are synchronous: all have what one device learns, and the chief alone has called the callbacks."""
    tasks = run_tasks("servers.py", tmp_path, chief=1, worker=2, ps=1)
    one = run_example("servers.py", tmp_path / "alone")
    assert [told["worker"] for told in tasks] == [None, 0, 1, None]
    assert {told["replicas"] for told in tasks} == {2}
    require_equal(tasks, one)
    assert len((tmp_path / "runs" / "servers.csv").read_text().splitlines()) == 1 + len(one["history"].epoch)
    read = keras.models.load_model(tmp_path / "runs" / "servers.keras")
    assert read.get_weights()[0] == pytest.approx(tasks[-1]["weights"][0])
    assert int(read.optimizer.iterations.numpy()) == 2 * 15


def require_equal(tasks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for told in tasks:
        assert told["loss"] == pytest.approx(one["history"].history["loss"], rel=1e-4)
        for mine, theirs in zip(told["weights"], one["model"].get_weights(), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
