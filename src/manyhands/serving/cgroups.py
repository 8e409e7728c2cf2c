"""Cgroups of replica processes: limits of memory and of threads, where this process may create a cgroup."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def join_cgroup(name: str, limits: Mapping[str, int]) -> set[str]:
    """Create a cgroup below this process's own and enter it.

    Args:
        name: Name of the cgroup.
        limits: Limit by controller: "memory" in bytes, "pids" in threads and processes.

    Returns:
        The controllers that were possible.
    """
    held: set[str] = set()
    for folder, files in _own_cgroups():
        made = folder / name
        wanted = {controller: file for controller, file in files.items() if controller in limits.keys() - held}
        try:
            if not wanted:
                continue
            made.mkdir()
        except OSError:
            continue
        try:
            limited = {one for one, file in wanted.items() if _set_control(made / file, limits[one])}
            if limited and _set_control(made / "cgroup.procs", os.getpid()):
                held |= limited
        finally:
            if not held & wanted.keys():
                with contextlib.suppress(OSError):
                    made.rmdir()
    return held


def remove_cgroup(name: str, seconds: float) -> None:
    """Kill the processes left in the cgroup that a process of this one's group created, and remove it.

    The kernel keeps it until their new parent has read how they ended, for which this waits some seconds.
    """
    for folder, _ in _own_cgroups() if name else ():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                (folder / name).rmdir()
            except FileNotFoundError:
                break
            except OSError:
                with contextlib.suppress(OSError):
                    for pid in (folder / name / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.05)


def _set_control(file: Path, value: int) -> bool:
    """Write a control file of a cgroup; return whether that was possible. It is never created."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, str(value).encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


_CONTROLS = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}
"""Control files of the controllers in the first and the second version of cgroups."""


def _own_cgroups() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the folders of this process's cgroups, with the control files of limits by controller."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _CONTROLS:
                yield CGROUPS / controllers / path.lstrip("/"), {controllers: _CONTROLS[controllers][0]}
            elif not controllers:
                yield CGROUPS / path.lstrip("/"), {name: files[1] for name, files in _CONTROLS.items()}
