"""The runner: hands cells to worker processes, ends those that hang, and keeps results so that a run resumes."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import manyhands

from .cell import CRASHED, HUNG, Cell
from .network import Entry
from .strategies import SPECS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(manyhands.__file__).parent
NOT_TRAINED = ("serving", "router", "dashboard", "cli", "planning", "tuning")
"""Packages that no cell imports, so that a change in them leaves results valid."""
START_SECONDS = 300
CACHE = ROOT / "build" / "matrix" / "cells.jsonl"


@dataclass(frozen=True)
class Asked:
    """A cell that is to be run."""

    entry: Entry
    strategy: str
    seed: int
    checks: bool

    @property
    def key(self) -> str:
        """A hash of everything that its result depends on."""
        how = f"{self.strategy} {SPECS[self.strategy]!r} {self.seed} {self.checks}"
        parts = (self.entry.digest, how, source_digest())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def source_digest() -> str:
    """Return a hash of the code that training runs and of how cells are run and compared, without docstrings."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] not in NOT_TRAINED]
    files += [Path(__file__).parent / f"{name}.py" for name in ("cell", "reference", "strategies")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n".encode() + _code(file).encode())
    return digest.hexdigest()


def _code(file: Path) -> str:
    """Return a file's syntax tree without comments and docstrings, which do not change what it computes."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Cache:
    """Results by key, in a file of JSON lines to which every new one is appended."""

    def __init__(self, path: Path = CACHE) -> None:
        self._path = path
        self._cells: dict[str, Cell] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._cells[entry["key"]] = Cell(**entry["cell"])

    def get(self, asked: Asked) -> Cell | None:
        """Return the result of a cell that was run before, from the same source."""
        return self._cells.get(asked.key)

    def put(self, asked: Asked, cell: Cell) -> None:
        """Keep a result."""
        self._cells[asked.key] = cell
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": asked.key, "cell": cell.to_dict()}) + "\n")


class Worker:
    """A worker process; it is replaced when it dies or when a cell hangs."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def run(self, asked: Asked) -> Cell:
        """Run one cell within the time limit."""
        process = self._process or self._start()
        message = {"network": asked.entry.name, "strategy": asked.strategy, "seed": asked.seed, "checks": asked.checks}
        about: dict[str, Any] = {"network": asked.entry.name, "strategy": asked.strategy, "seed": asked.seed}
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            self.close()
            return Cell(**about, outcome=HUNG, text=f"no result within {self._limit:.0f} s")
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            self.close()
            return Cell(**about, outcome=CRASHED, text=f"the process that called mh.fit ended with code {code}")
        return Cell(**json.loads(line))

    def close(self) -> None:
        """End the worker with everything that it has started."""
        if self._process is not None:
            # The zygote, which has a group of its own, ends when its connection to the worker is closed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._lines = None, queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.matrix.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        # The worker says when everything is imported, so that imports do not count as time of a cell.
        try:
            self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            self.close()
            raise RuntimeError(f"the worker was not ready within {START_SECONDS} s") from None
        return self._process


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _run_twice_if_it_crashes(worker: Worker, asked: Asked) -> Cell:
    """Run a cell; a crash by chance, as on a busy machine, is distinguished from one that repeats."""
    cell = worker.run(asked)
    if cell.outcome != CRASHED:
        return cell
    again = worker.run(asked)
    if again.outcome == CRASHED:
        return again
    return dataclasses.replace(again, text=f"{again.text} (the first attempt crashed: {cell.text[:300]})")


def run_all(
    cells: Iterable[Asked], cache: Cache, on_cell: Callable[[Cell], None], *, workers: int, limit: float
) -> None:
    """Run all cells that the cache does not have; networks are handed out whole, so that a reference is made once.

    Without workers only the cells that the cache has are reported.
    """
    waiting: queue.SimpleQueue[Sequence[Asked]] = queue.SimpleQueue()
    by_network: dict[str, list[Asked]] = {}
    for asked in cells:
        cell = cache.get(asked)
        if cell is not None:
            on_cell(cell)
        else:
            by_network.setdefault(asked.entry.name, []).append(asked)
    for group in by_network.values():
        waiting.put(group)
    lock, pool = threading.Lock(), [Worker(limit) for _ in range(min(workers, len(by_network)))]
    errors: list[BaseException] = []

    def work(worker: Worker) -> None:
        try:
            while not waiting.empty():
                for asked in waiting.get_nowait():
                    cell = _run_twice_if_it_crashes(worker, asked)
                    with lock:
                        cache.put(asked, cell)
                        on_cell(cell)
        except queue.Empty:
            return  # another worker was faster
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in pool]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in pool:
            worker.close()
    if errors:
        raise errors[0]
