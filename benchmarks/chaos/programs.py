"""Programs that a supervisor restarts, what they print, and disks that can be filled."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import manyhands
from manyhands.testing import NamespaceHost

RESTART_SECONDS = 1.0
"""Seconds after which the supervisor restarts a program that failed."""
MARK = "CHAOS_PROGRAM"
"""Environment variable that all processes of a program inherit; it also identifies those whose parent has died."""
ROOT = Path(__file__).parents[2]
_count = itertools.count()


class Program:
    """A command on this machine or on a host, and all processes that it starts."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Path,
        *,
        host: NamespaceHost | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.output, self._command, self._host = name, output, list(command), host
        self._mark = f"{os.getpid()}-{next(_count)}"
        path = os.pathsep.join([str(Path(manyhands.__file__).parents[1]), str(ROOT)])
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {}), MARK: self._mark}
        self._failed_at = 0.0
        self._process: subprocess.Popen[Any] | None = None
        self._family: set[psutil.Process] = set()

    def start(self) -> None:
        """Start the command, without waiting until it is ready."""
        popen = subprocess.Popen if self._host is None else self._host.popen
        with self.output.open("ab") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._process = popen(self._command, env=self._env, **options)
        self._failed_at = 0.0

    @property
    def process(self) -> subprocess.Popen[Any]:
        """The command."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code of the command; None while it runs."""
        return self.process.poll()

    def supervise(self) -> None:
        """Restart the command shortly after it has failed."""
        if self.code in (None, 0):
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > RESTART_SECONDS:
            self.start()

    def family(self) -> list[psutil.Process]:
        """Return all processes of the program, orphans included.

        The environment of a sandboxed process cannot be read, so processes are also found by their parents.
        """
        line = f"{MARK}={self._mark}".encode()
        found = {one for one in self._family if one.is_running()}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if line in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.add(process)
        for process in list(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update(process.children(recursive=True))
        self._family = found
        return sorted(found, key=lambda one: one.pid)

    def zygotes(self) -> list[psutil.Process]:
        """Return the process from which ranks are forked; there is none for a moment after it was killed."""
        return [one for one in _forked(self.family()) if _parent(one) == self.pid]

    def forks(self) -> list[psutil.Process]:
        """Return the ranks, replicas or trial processes."""
        return [one for one in _forked(self.family()) if _parent(one) != self.pid and not _is_data_worker(one)]

    def data_workers(self) -> list[psutil.Process]:
        """Return the processes that ranks have forked to read data."""
        return [one for one in _forked(self.family()) if _is_data_worker(one)]

    def kill(self) -> None:
        """Kill the command with SIGKILL; the processes that it started must end by themselves."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self, seconds: float = 240.0) -> int | None:
        """Ask the command to end and return its exit code; None if it has not ended in time."""
        if self._process is None:
            return 0
        if self.code is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.code

    def close(self) -> None:
        """Kill all processes of the program."""
        if self._process is None:
            return
        for one in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()


def _forked(family: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    """Yield the zygotes, and what was forked from them."""
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and any(
                "launcher.zygote" in word for word in process.cmdline()
            ):
                yield process


def _is_data_worker(process: psutil.Process) -> bool:
    """Return whether torch's DataLoader has started a process; it outlives its rank for a moment."""
    try:
        return bool(process.name() == "pt_data_worker")
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0


class Lines:
    """Return the complete lines that were appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._file = path, 0, 0

    def read(self) -> list[bytes]:
        """Return the new lines; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                if (number := os.fstat(file.fileno()).st_ino) != self._file:
                    # A log is continued in a new file.
                    self._offset, self._file = 0, number
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].splitlines()


class Events:
    """The events of a log that a program writes, by kind."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._found: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind up to now, without lines that a full disk has truncated."""
        for line in self._lines.read():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                self._found[entry["kind"]].append(entry)
        return self._found[kind]

    @property
    def num_steps(self) -> int:
        """The number of steps that were reported, including repeated ones."""
        return sum(len(entry["steps"]) for entry in self.of("steps"))


class SmallDisk:
    """A file system of its own size that can be filled. Needs root."""

    def __init__(self, path: Path, size: str = "32m") -> None:
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
        self.path = path

    def fill(self) -> Callable[[], None]:
        """Write until there is no space left; return a function that frees it."""
        stuffing = self.path / "stuffing"
        with stuffing.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        return stuffing.unlink

    def close(self) -> None:
        """Unmount the disk, even if a process has a file on it open."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def until(condition: Callable[[], Any], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(0.05)
    return True
