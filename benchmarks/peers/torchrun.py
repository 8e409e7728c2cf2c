"""torchrun as a peer in recovery: DDP, a checkpoint every ten steps, one of two workers killed again and again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil

LIMIT = 15.0
SAVE_EVERY = 10


@dataclass(frozen=True)
class Settings:
    """How torchrun is started."""

    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None
    """Seconds that a collective waits; torch's own half an hour where it is None."""


DEFAULT = Settings()
"""As documented for one machine, with restarts allowed; without them it never recovers."""
BEST = Settings(
    options=(
        "--monitor-interval=0.1",
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1",
    ),
    # Without it the store of the first attempt is used again by the next, with what is left in it.
    environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"},
    timeout=5.0,
)


@dataclass(frozen=True)
class Trial:
    """What came of one kill."""

    recovered: bool
    seconds: float = LIMIT
    steps_lost: int = 0


def trials(settings: Settings, count: int) -> list[Trial]:
    """Kills in a row; a job that does not recover is ended, and the next kill has a new one."""
    found: list[Trial] = []
    while len(found) < count:
        with tempfile.TemporaryDirectory() as name, _started(settings, name) as program:
            while len(found) < count:
                found.append(_strike(program, Path(name), len(found)))
                if not found[-1].recovered:
                    break
    return found


@contextlib.contextmanager
def _started(settings: Settings, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=100",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *settings.options,
        "-m", "benchmarks.peers.torchrun", folder, str(settings.timeout or ""),
    ]  # fmt: skip
    environ = {**os.environ, **settings.environ}
    program = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield program
    finally:
        family = psutil.Process(program.pid).children(recursive=True) if program.poll() is None else []
        for process in [program, *family]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        program.wait()


def _strike(program: subprocess.Popen[bytes], folder: Path, number: int) -> Trial:
    """Kills a worker that has taken some steps, and waits for the next one."""
    wanted = 12 + number % 7
    if not _wait(program, lambda: len(_current(program, folder)) >= wanted, 60.0):
        return Trial(False)
    workers = _workers(program)
    reached = max(step for step, _ in _current(program, folder))
    at = time.time()
    workers[number % len(workers)].send_signal(signal.SIGKILL)
    if not _wait(program, lambda: bool(_after(folder, at)), LIMIT):
        return Trial(False)
    step, when = _after(folder, at)[0]
    return Trial(True, when - at, max(0, reached - step + 1))


def _workers(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(program.pid).children() if _is_worker(child)]


def _current(program: subprocess.Popen[bytes], folder: Path) -> list[tuple[int, float]]:
    """Steps of the workers that are alive."""
    paths = [folder / f"steps-{worker.pid}" for worker in _workers(program)]
    return [pair for path in paths if path.exists() for pair in _read(path)]


def _after(folder: Path, at: float) -> list[tuple[int, float]]:
    """Steps of processes that were started after the kill."""
    found = [(path, _read(path)) for path in folder.glob("steps-*")]
    return sorted(
        (pair for _, steps in found if steps and steps[0][1] > at for pair in steps), key=lambda pair: pair[1]
    )


def _read(path: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "benchmarks.peers.torchrun" in process.cmdline()
    except psutil.Error:
        return False


def _wait(program: subprocess.Popen[bytes], what: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and program.poll() is None:
        if what():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def work(folder: Path, timeout: str) -> None:
    """A worker: resumes from the last checkpoint, and writes when it takes a step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ..kills import BATCH, net, task

    dist.init_process_group("gloo", **({"timeout": timedelta(seconds=float(timeout))} if timeout else {}))
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    inputs, labels = task().data
    half = BATCH // 2
    while True:
        start = (step * BATCH + dist.get_rank() * half) % (len(inputs) - half)
        loss = torch.nn.functional.cross_entropy(model(inputs[start : start + half]), labels[start : start + half])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        with (folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{step} {time.time():.4f}\n")
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            waiting = saved.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, waiting)
            waiting.rename(saved)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
