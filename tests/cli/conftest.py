"""Files that a newcomer would write, and the command line to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli.app import app

HELPER = """
import torch

def make_data(rows):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)
"""

SMALL = """
import time
import torch
import manyhands as mh
from beside import make_data

class Net(torch.nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        middle = torch.nn.BatchNorm1d(width) if norm else torch.nn.ReLU()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), middle, torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)

PAUSE = [0.0]

def loss(model, batch):
    time.sleep(PAUSE[0])
    x, y = batch
    return (model(x) - y).square().mean()

def task(lr: float = 1e-2, width: int = 8, norm: bool = False, rows: int = 64, batch: int = 16, pause: float = 0.0):
    print("making the task")
    PAUSE[0] = pause
    return mh.Task(
        model=lambda: Net(width, norm),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=make_data(rows),
        valid=make_data(16),
        batch_size=batch,
    )
"""

OWN = """
import sys
import torch
import manyhands as mh
from beside import make_data

def main():
    hand = mh.hand()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in hand.batches(make_data(64), 16, epochs=2):
        for x, y in hand.accumulate(batch):
            hand.backward((model(x) - y).square().mean())
        hand.step()
    total = int(hand.sum(hand.rank + 1))
    print(f"{__name__} {sys.argv[1:]} total={total} loss={hand.loss:.6f} accumulate={hand.spec.accumulate}")
    if "raise" in sys.argv and hand.rank == hand.size - 1:
        raise ValueError("on purpose")
    if "exit" in sys.argv and hand.is_first:
        sys.exit(7)
    if "misuse" in sys.argv:
        next(hand.batches(make_data(8)))
    hand.barrier()

if __name__ == "__main__":
    main()
"""

Invoke = Callable[..., Any]


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a folder with a task, a helper module and a custom training loop; undo what loading them changes."""
    for name, text in {"beside": HELPER, "small_task": SMALL, "own_loop": OWN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def invoke() -> Invoke:
    """Runs a command in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command as a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from manyhands.cli import main; main()", *map(str, words)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=os.getcwd()
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
