"""Check of the folder in which runs are written: write permission, free space and write speed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from ..core import format_bytes
from .finding import Finding, broken, slow

TRIAL_BYTES = 32 * 2**20
"""Bytes that are written to measure the speed."""
_GIB = 2**30


def run_folder(folder: str | Path = "runs", free: int | None = None, speed: float | None = None) -> Finding:
    """Check that the folder of runs is writable, and has enough free space and speed.

    `free` (bytes) and `speed` (bytes per second that reach the disk) are measured by default.
    """
    name, place = "run folder", _nearest(Path(folder).absolute())
    if not os.access(place, os.W_OK | os.X_OK):
        remedy = "choose another folder= (--folder), or get permission to write to it"
        return broken(name, f"{place} is not writable", "no run can be recorded", remedy)
    free = shutil.disk_usage(place).free if free is None else free
    if free < _GIB // 4:
        return broken(name, f"{format_bytes(free)} free in {place}", "checkpoints do not fit", "remove old runs")
    try:
        speed = measure_speed(place) if speed is None else speed
    except OSError as error:
        return broken(name, f"{place}: {error}", "no run can be recorded", "choose another folder= (--folder)")
    text = f"{format_bytes(free)} free in {place}, written at {format_bytes(speed)}/s"
    if free < 2 * _GIB:
        return slow(name, text, "a few checkpoints of a large network fill it", "remove old runs, or lower keep=")
    if speed < 50e6:
        remedy = "write runs to a local disk with folder= (--folder), or save less often"
        return slow(name, text, "a checkpoint may not be written before the next one is due", remedy)
    return Finding(name, text)


def measure_speed(folder: Path, num_bytes: int = TRIAL_BYTES) -> float:
    """Return the bytes per second that reach the disk, measured by writing a temporary file to `folder`."""
    data = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".manyhands-trial-") as file:
        start = time.perf_counter()
        for _ in range(num_bytes // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - start)


def _nearest(path: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.is_dir())
