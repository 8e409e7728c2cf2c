"""A real Triton: the server that lies in nvidia-pytriton, started as pytriton starts it, on a folder of models."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers-triton"
REQUIREMENTS = ROOT / "requirements" / "serving_peers_triton.txt"
SECONDS = 120


@dataclass(frozen=True)
class Triton:
    """Where it listens."""

    http: int
    grpc: int


def environ() -> dict[str, str]:
    """What Triton's processes need: its libraries, this Python's own before the system's, and the peers' packages.

    Its Python backend loads `libpython` by name. The system's own may be of another patch release, which does not go
    together with the modules of the environment.
    """
    libraries = [sysconfig.get_config_var("LIBDIR"), str(next(FOLDER.glob("lib/*/site-packages/nvidia_pytriton.libs")))]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def running(models: Path, backends: Path) -> Iterator[Triton]:
    """Serves a folder of models; `backends` is an empty folder, where Triton wants its Python backend put together."""
    server = next(FOLDER.glob("lib/*/site-packages/pytriton/tritonserver"))
    shutil.copytree(server / "backends" / "python", backends / "python")
    release = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(server / "python_backend_stubs" / release / "triton_python_backend_stub", backends / "python")
    found = Triton(http=free_port(), grpc=free_port())
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={models}",
        f"--backend-directory={backends}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        f"--http-port={found.http}",
        f"--grpc-port={found.grpc}",
        "--allow-metrics=false",
        "--exit-timeout-secs=2",
        "--model-control-mode=explicit",
        "--load-model=*",
    ]
    with open(backends / "log.txt", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ(), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(process, found, backends / "log.txt")
        yield found
    finally:
        process.terminate()
        process.wait(60)


def wait_for(process: subprocess.Popen[bytes], server: Triton, log: Path) -> None:
    """Waits until all models are loaded."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError):
            connection = HTTPConnection("127.0.0.1", server.http, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"Triton was not ready within {SECONDS} s:\n{log.read_text()[-4000:]}")


def write_model(models: Path, name: str, versions: int, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    """A model in Triton's folder; tensors are written "FP32 3": a kind and what is behind the rows."""

    def described(tensors: Mapping[str, str]) -> str:
        entries = []
        for tensor, text in tensors.items():
            kind, size = text.split()
            entries.append(f'{{ name: "{tensor}" data_type: TYPE_{kind} dims: [ {size} ] }}')
        return ", ".join(entries)

    for number in range(1, versions + 1):
        (models / name / str(number)).mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "triton_model.py", models / name / str(number) / "model.py")
    (models / name / "config.pbtxt").write_text(
        f'backend: "python"\nmax_batch_size: 64\ninput [ {described(inputs)} ]\noutput [ {described(outputs)} ]\n'
        "version_policy: { all: {} }\ninstance_group [ { kind: KIND_CPU count: 1 } ]\ndynamic_batching {}\n"
    )


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
