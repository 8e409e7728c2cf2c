"""The peers' environment: made once from requirements/peers.txt, beside the product's and never in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ..turns import Plan
from ..works import Work

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers"
REQUIREMENTS = ROOT / "requirements" / "peers.txt"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / "installed.txt"
PEERS = ("lightning", "accelerate")

Times = dict[str, list[float]]


def make() -> None:
    """Installs the peers unless this very list of them is installed."""
    wanted = REQUIREMENTS.read_text()
    if READY.exists() and READY.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)], check=True)
    READY.write_text(wanted)


def measure(peer: str, work: Work, plan: Plan, size: int) -> Times:
    """Seconds per step of a peer and of the hand-written loop, which alternate in the peer's environment."""
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "times.json"
        asked = json.dumps({"work": work.name, "plan": asdict(plan), "size": size, "target": str(target)})
        command = [str(PYTHON), "-m", f"benchmarks.peers.{peer}", asked]
        # Accelerate's processes are started by hand; Lightning starts its own.
        port, num_processes = _port(), size if peer == "accelerate" else 1
        processes = [_start(command, rank, num_processes, port) for rank in range(num_processes)]
        _finish(processes, peer)
        times: Times = json.loads(target.read_text())
    return times


def _start(command: list[str], rank: int, size: int, port: int) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        environ |= {name: str(value) for name, value in ranks.items()}
        environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(processes: list[subprocess.Popen[str]], peer: str) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=600)
            if process.returncode != 0:
                raise RuntimeError(f"{peer} ended with exit code {process.returncode}:\n{output}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
