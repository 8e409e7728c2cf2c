"""Diagnostics: checks for problems of a machine that prevent manyhands from working, or make it slow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from . import disk, gpu, machine, network, software
from .finding import Finding
from .nvidia import read_driver

__all__ = ["doctor", "Finding", "CHECKS"]

CHECKS: tuple[Callable[[], Finding], ...] = (
    software.system,
    software.python,
    software.torch_version,
    gpu.driver,
    gpu.torch_build,
    gpu.gpu_architecture,
    gpu.gpu_mode,
    gpu.gpu_memory,
    gpu.leased_devices,
    gpu.gpu_clocks,
    machine.shared_memory,
    machine.open_files,
    machine.processes,
    machine.locked_memory,
    machine.threads,
    machine.cpu_quota,
    machine.numa,
    machine.memory,
    machine.clock,
    network.loopback,
    network.host_name,
    network.all_reduce,
    software.compiler,
    software.extras,
)
"""All checks except that of the run folder. A new check is a function without required arguments, listed here."""


def doctor(folder: str | Path = "runs", checks: Sequence[Callable[[], Finding]] | None = None) -> list[Finding]:
    """Run checks of this machine, and return what each of them has found.

    Args:
        folder: The folder in which runs are written, which is checked too.
        checks: The checks to run; by default all.

    >>> doctor(checks=[software.system])[0].verdict
    'ok'
    """
    read_driver.cache_clear()
    here = functools.partial(disk.run_folder, folder)
    looks: Sequence[Callable[[], Finding]] = [*CHECKS, here] if checks is None else checks
    return [_look(check) for check in looks]


def _look(check: Callable[[], Finding]) -> Finding:
    """Run a check; if the check itself raises an error, return a finding with that error, which is no problem."""
    try:
        return check()
    except Exception as error:
        name = getattr(check, "__name__", "run folder").replace("_", " ")
        return Finding(name, f"could not be checked: {type(error).__name__}: {error}")
