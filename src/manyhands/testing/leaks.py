"""Leak detection for tests: processes, threads, ports, files, environment variables, shared memory, namespaces."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from .hosts import NAMESPACES

SHARED = Path("/dev/shm")
INTERNET = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class ResourceSnapshot:
    """The resources that this process and its children hold at one moment."""

    processes: frozenset[int]
    threads: frozenset[str]
    ports: frozenset[int]
    files: frozenset[str]
    environment: frozenset[tuple[str, str]]
    shared_memory: frozenset[str]
    hosts: frozenset[str]

    @classmethod
    def now(cls) -> ResourceSnapshot:
        """Return the present resources of this process and its children."""
        me = psutil.Process()
        return cls(
            processes=frozenset(child.pid for child in me.children(recursive=True) if not _is_zombie(child)),
            threads=frozenset(thread.name for thread in threading.enumerate() if not thread.daemon),
            ports=frozenset(_listening()),
            files=frozenset(file.path for file in me.open_files()),
            environment=frozenset(
                (key, value)
                for key, value in os.environ.items()
                # pytest sets PYTEST_CURRENT_TEST to the running test; torch.compile sets TRITON_… for its workers.
                if key != "PYTEST_CURRENT_TEST" and not key.startswith("TRITON_")
            ),
            shared_memory=frozenset(path.name for path in SHARED.glob("*")),
            hosts=frozenset(path.name for path in NAMESPACES.glob(f"mh{os.getpid()}-*")),
        )

    def beyond(self, before: ResourceSnapshot) -> list[str]:
        """Return descriptions of the resources in this snapshot that were not in the earlier one, `before`."""
        found = {kind: getattr(self, kind) - getattr(before, kind) for kind in self.__dataclass_fields__}
        if found["shared_memory"]:
            found["shared_memory"] -= _held_by_other_programs()
        return [f"{kind}: {', '.join(map(str, sorted(new)))}" for kind, new in found.items() if new]


@contextmanager
def no_leaks(patience: float = 3.0) -> Iterator[None]:
    """Context that raises AssertionError if its block leaves resources behind, such as processes, threads or files.

    Waits up to `patience` seconds for them to be released.
    """
    before = ResourceSnapshot.now()
    yield
    end = time.monotonic() + patience
    while (left := ResourceSnapshot.now().beyond(before)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"left behind: {'; '.join(left)}"


def _listening() -> Iterator[int]:
    """Yield the ports on which this process listens, from its open sockets: the kernel's table of all ports is slow."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in INTERNET and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield end.getsockname()[1]
        except OSError:  # closed in the meantime
            continue


def _held_by_other_programs() -> set[str]:
    """Return the names of shared memory files that processes other than this one and its children have mapped."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    held = set()
    for pid in set(psutil.pids()) - ours:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        held |= set(re.findall(rf"{SHARED}/(\S+)", maps))
    return held


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
