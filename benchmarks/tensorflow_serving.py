"""Conformance: TensorFlow Serving's own client asks our server everything that it can ask.

`python -m benchmarks.tensorflow_serving`. tensorflow-serving-api needs the whole of TensorFlow, so that it runs in an
environment of its own, `.peers/tensorflow`, and not among the tests. Prints what held, and ends with 1 where something
did not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.storage import export

from .peers import tensorflow_servers

ROOT = Path(__file__).parents[1]
API = ROOT / ".peers" / "tensorflow-serving"
VERSION = "tensorflow-serving-api==2.21.0"
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


def main() -> None:
    """Serves a few models and lets the client ask."""
    make()
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        write(models)
        with mh.serve(
            models,
            on="cpu",
            listen=mh.serving.Listen(http=0, grpc=0, manage=0),
            rollout=mh.serving.Rollout(versions="all"),
        ) as server:
            command = [tensorflow_servers.PYTHON, "-m", "benchmarks.peers.tensorflow_client", str(server.grpc), *DTYPES]
            environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{API}", "TF_CPP_MIN_LOG_LEVEL": "3"}
            sys.exit(subprocess.run(command, cwd=ROOT, env=environ).returncode)


def make() -> None:
    """Installs the client beside TensorFlow; its own wish for another build of TensorFlow is not heard."""
    if not tensorflow_servers.make():
        sys.exit(f"{tensorflow_servers.VERSION} could not be installed")
    if not (API / "tensorflow_serving").exists():
        pip = [tensorflow_servers.PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(API), VERSION]
        subprocess.run(pip, check=True)


def write(models: Path) -> None:
    """An echo of every dtype, two versions of a network, and one with scores and one with a value for examples."""
    kinds = {name: getattr(torch, name) for name in DTYPES}
    examples = {name: torch.ones(2, 3).to(kind) for name, kind in kinds.items()}
    export(nn.Identity(), echo, examples, models / "echo")
    first = export(nn.Identity(), lambda model, x: x + 1, {"x": torch.ones(2, 3)}, models / "adder")
    shutil.copytree(first, models / "adder" / "2")
    row = {"x": torch.ones(2, 3), "n": torch.ones(2, dtype=torch.int64)}
    export(nn.Identity(), scores, row, models / "scores")
    export(nn.Identity(), value, row, models / "value")


def echo(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """What came."""
    return {f"{name}_out": each.clone() for name, each in zip(DTYPES, inputs, strict=True)}


def value(model: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """The sum of a row."""
    return x.sum(1, keepdim=True) + n[:, None]


def scores(model: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """It, and twice it."""
    return torch.cat([value(model, x, n), 2 * value(model, x, n)], 1)


if __name__ == "__main__":
    main()
