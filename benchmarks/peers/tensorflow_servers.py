"""TensorFlow's own parameter servers in a custom loop, as its guide writes it: updates of a network by some workers.

Runs in an environment of its own, `.peers/tensorflow`; `measure` starts one process per role there and returns seconds
per update, or a sentence that says why there is none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers" / "tensorflow"
PYTHON = FOLDER / "bin" / "python"
VERSION = "tensorflow-cpu==2.21.0"
LIMIT = 240
"""Seconds that the peer may take in all."""


def measure(widths: list[int], batch_size: int, num_servers: int, num_workers: int, num_updates: int) -> float | str:
    """Seconds per update, installing the peer first where it is not there."""
    if not make():
        return f"{VERSION} could not be installed"
    roles = [("ps", i) for i in range(num_servers)] + [("worker", i) for i in range(num_workers)] + [("chief", 0)]
    cluster: dict[str, list[str]] = {}
    for role, _ in roles:
        cluster.setdefault(role, []).append(f"127.0.0.1:{_port()}")
    asked = {"widths": widths, "batch_size": batch_size, "num_updates": num_updates}
    processes = [_start(role, index, cluster, asked) for role, index in roles]
    try:
        output, _ = processes[-1].communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"TensorFlow's servers took more than {LIMIT} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    last = (output.strip().splitlines() or [""])[-1]
    try:
        return float(json.loads(last)["seconds"])
    except (ValueError, KeyError, TypeError):
        return f"TensorFlow's servers ended without a result: {last[:200]}"


def make() -> bool:
    """Installs the peer where it is not there; whether it is there then."""
    if any(FOLDER.glob("lib/python*/site-packages/tensorflow")):
        return True
    made = subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], capture_output=True)
    got = subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", VERSION], capture_output=True)
    return not (made.returncode or got.returncode)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(role: str, index: int, cluster: dict[str, list[str]], asked: dict[str, Any]) -> subprocess.Popen[str]:
    config = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    environ = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), "-m", "benchmarks.peers.tensorflow_servers", json.dumps(asked)]
    out = subprocess.PIPE if role == "chief" else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdout=out, stderr=subprocess.STDOUT)


def main() -> None:
    """One role of the cluster; the chief prints what it measured."""
    import tensorflow as tf

    asked = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    widths, batch_size = asked["widths"], asked["batch_size"]
    with strategy.scope():
        weights = [
            tf.Variable(tf.random.normal([before, after], stddev=before**-0.5)) for before, after in pairwise(widths)
        ]
        biases = [tf.Variable(tf.zeros([after])) for after in widths[1:]]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        x = tf.random.normal([batch_size, widths[0]])
        y = tf.random.uniform([batch_size], 0, widths[-1], tf.int32)
        with tf.GradientTape() as tape:
            for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                x = tf.matmul(x, weight) + bias
                x = tf.nn.relu(x) if number < len(weights) - 1 else x
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))
        held = [*weights, *biases]
        for variable, gradient in zip(held, tape.gradient(loss, held), strict=True):
            variable.assign_sub(1e-3 * gradient)

    def take(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(step)
        coordinator.join()
        return time.perf_counter() - began

    take(20)
    print(json.dumps({"seconds": take(asked["num_updates"]) / asked["num_updates"]}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
