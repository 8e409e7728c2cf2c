"""Checks of the system: shared memory, limits of files and processes, threads, CPU quota, NUMA, memory and clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from pathlib import Path

import psutil

from ..core import counted, format_bytes
from ..distributed import num_cores
from .finding import Finding, broken, slow

_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_QUICK_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", "timebase")
_TIME_ERROR = 5
_MEANINGFUL_JUMP = 0.02


def shared_memory(total: int | None = None, free: int | None = None) -> Finding:
    """Check the size of /dev/shm, through which workers pass batches; containers have only 64 MB by default."""
    if total is None or free is None:
        try:
            total, _, free = shutil.disk_usage("/dev/shm")
        except OSError as error:
            return broken("shared memory", str(error), "workers cannot pass batches", "mount a tmpfs at /dev/shm")
    text = f"{format_bytes(free)} free of {format_bytes(total)} in /dev/shm"
    why = "workers pass batches through it, and die with a bus error when it is full"
    remedy = "in a container --shm-size=8g or --ipc=host; else mount -o remount,size=8G /dev/shm, or remove old files"
    if free < _GIB // 4:
        return broken("shared memory", text, why, remedy)
    return slow("shared memory", text, why, remedy) if free < _GIB else Finding("shared memory", text)


def open_files(limit: int | None = None) -> Finding:
    """Check the maximum number of open files and sockets of a process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    why = "ranks, workers and shared tensors open many; above the limit, 'too many open files' ends the run"
    return _limit("open files", limit, 512, 4096, why, "ulimit -n 65536, or nofile in /etc/security/limits.conf")


def processes(limit: int | None = None, group: int | None = None) -> Finding:
    """Check the maximum number of processes and threads of this user and of this container."""
    if limit is None:
        limit, group = resource.getrlimit(resource.RLIMIT_NPROC)[0], _number(_CGROUP / "pids.max")
    known = [value for value in (limit, group) if value is not None and value != resource.RLIM_INFINITY]
    smallest = min(known, default=resource.RLIM_INFINITY)
    why = "ranks, workers and their threads count; above the limit, they cannot be started"
    return _limit("processes", smallest, 256, 2048, why, "ulimit -u 65536; in a container --pids-limit=-1")


def locked_memory(limit: int | None = None, has_infiniband: bool | None = None) -> Finding:
    """Check the maximum amount of locked memory, which InfiniBand needs."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    folder = Path("/sys/class/infiniband")
    has_infiniband = (folder.is_dir() and any(folder.iterdir())) if has_infiniband is None else has_infiniband
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    if limit == resource.RLIM_INFINITY or not has_infiniband:
        return Finding("locked memory", text if has_infiniband else f"{text}; no InfiniBand, so it does not matter")
    remedy = "ulimit -l unlimited, or memlock in /etc/security/limits.conf; in a container --ulimit memlock=-1"
    return slow(
        "locked memory",
        text,
        "NCCL cannot register its buffers with InfiniBand, so it fails or uses a slower transport",
        remedy,
    )


def threads(setting: str | None = None, cores: int | None = None) -> Finding:
    """Check that OMP_NUM_THREADS, if it is set, fits the number of cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "") if setting is None else setting
    cores = num_cores() if cores is None else cores
    if not setting.isdigit():
        return Finding("threads", f"{counted(cores, 'core')}, torch chooses")
    text = f"OMP_NUM_THREADS={setting} on {counted(cores, 'core')}"
    remedy = f"unset OMP_NUM_THREADS, or set it to {cores}"
    if int(setting) > cores:
        return slow("threads", text, "threads compete for cores, which is often slower than one thread", remedy)
    if 2 * int(setting) <= cores:
        return slow("threads", text, "a run in one process on the CPU leaves cores idle", remedy)
    return Finding("threads", text)


def cpu_quota(quota: float | None = None, cores: int | None = None) -> Finding:
    """Check that a container's CPU quota is not below the number of cores that its processes see."""
    quota, cores = read_quota() if quota is None else quota, num_cores() if cores is None else cores
    if quota is None or quota >= cores:
        return Finding("CPU quota", f"none below the {counted(cores, 'core')}")
    whole = max(1, int(quota))
    return slow(
        "CPU quota",
        f"{quota:g} of the {cores} cores that processes see",
        "torch starts a thread per core, and the kernel stops all of them for the rest of every 100 ms",
        f"set OMP_NUM_THREADS={whole}, start with taskset -c 0-{whole - 1}, or raise the container's --cpus",
    )


def read_quota(folder: Path = _CGROUP) -> float | None:
    """Return the number of cores that this process's cgroup may use; None if it is not limited."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        limit_us = _number(folder / "cpu" / "cpu.cfs_quota_us")
        period_us = _number(folder / "cpu" / "cpu.cfs_period_us")
    return limit_us / period_us if limit_us and period_us and limit_us > 0 else None


def numa(nodes: int | None = None, touched: int | None = None) -> Finding:
    """Check whether this process may run on cores of several NUMA nodes, where it waits for remote memory."""
    if nodes is None or touched is None:
        nodes, touched = _nodes()
    if nodes <= 1 or touched <= 1:
        return Finding("NUMA", f"{touched} of {nodes} memory node(s) in use")
    return slow(
        "NUMA",
        f"this process's cores belong to {touched} memory nodes",
        "a process on the CPU reads a part of its memory from remote nodes",
        f"use a rank per node, which is bound to its cores, with on='cpu*{touched}', or start with numactl -N 0 -m 0",
    )


def memory(available: int | None = None, total: int | None = None, swapped: int | None = None) -> Finding:
    """Check the available memory, and whether the system has swapped much of it out."""
    if available is None or total is None or swapped is None:
        now = psutil.virtual_memory()
        available, total, swapped = now.available, now.total, psutil.swap_memory().used
    text = f"{format_bytes(available)} of {format_bytes(total)} available, {format_bytes(swapped)} swapped out"
    remedy = "end other programs, or use fewer ranks and workers"
    if available < _GIB // 2:
        return broken("memory", text, "the system kills processes that allocate more", remedy)
    if swapped > total // 20 and available < total // 4:
        return slow("memory", text, "swapped pages must be read from disk in the middle of a step", remedy)
    return Finding("memory", text)


def clock(source: str | None = None, is_set: bool | None = None, jump: float | None = None) -> Finding:
    """Check that the clock is fast to read, is synchronized with a time server, and does not jump."""
    source = (_CLOCK.read_text().strip() if _CLOCK.exists() else "") if source is None else source
    jump = measure_jump() if jump is None else jump
    is_set = _is_synchronized() if is_set is None else is_set
    state = {True: "synchronized", False: "not synchronized", None: "synchronization unknown"}[is_set]
    text = f"{source or 'unknown source'}, {state}"
    if abs(jump) > _MEANINGFUL_JUMP:
        found = f"{text}, it jumped by {jump:+.3f} s just now"
        return slow("clock", found, "timestamps of events may be in the wrong order", "see what sets the clock")
    if source and source not in _QUICK_CLOCKS:
        remedy = "boot with clocksource=tsc, or see in dmesg why the kernel does not trust it"
        return slow("clock", text, "reading the time takes microseconds, and a step reads it often", remedy)
    if is_set is False:
        return slow(
            "clock", text, "timestamps of several machines do not match", "timedatectl set-ntp true, or install chrony"
        )
    return Finding("clock", text)


def measure_jump(seconds: float = 0.05) -> float:
    """Return the seconds by which the wall clock deviates from the monotonic clock while waiting for `seconds`."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(seconds)
    return (time.time() - wall) - (time.monotonic() - steady)


def _is_synchronized() -> bool | None:
    """Return whether the kernel's clock is synchronized with a time server; None if that is unknown."""
    try:
        buffer = ctypes.create_string_buffer(512)  # a struct timex of zeros only queries the state
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _nodes() -> tuple[int, int]:
    """Return the number of NUMA nodes of this machine, and the number of those on which this process may run."""
    mine, touched = os.sched_getaffinity(0), 0
    folders = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    for folder in folders:
        cores = {int(path.name[3:]) for path in folder.glob("cpu[0-9]*")}
        touched += bool(cores & mine)
    return max(1, len(folders)), max(1, touched)


def _limit(name: str, limit: int, least: int, enough: int, why: str, remedy: str) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= enough:
        return Finding(name, "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit}")
    return (
        broken(name, f"at most {limit}", why, remedy) if limit < least else slow(name, f"at most {limit}", why, remedy)
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
