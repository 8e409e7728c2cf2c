"""The state of NVIDIA GPUs and their driver, from NVML if nvidia-ml-py is installed, else from nvidia-smi."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}
"""Bits of NVML's throttle reasons that indicate a problem, unlike an idle GPU or the power limit under load."""
_QUERY = (
    "index,name,compute_mode,persistence_mode,memory.used,memory.total,clocks_throttle_reasons.active,driver_version"
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The state of an NVIDIA GPU, as its driver reports it."""

    index: int
    """The driver's number of the GPU."""
    model: str = ""
    """The name of the product."""
    mode: str = "Default"
    """Compute mode: "Default", "Exclusive_Thread", "Exclusive_Process" or "Prohibited"."""
    is_persistent: bool = True
    """Whether persistence mode is on, so that the driver stays loaded without clients."""
    used: int = 0
    """Bytes of memory in use."""
    total: int = 0
    """Bytes of memory."""
    holders: tuple[str, ...] = ()
    """IDs and names of other processes that compute on the GPU."""
    slowdowns: tuple[str, ...] = ()
    """Why its clocks are throttled, such as "too hot"."""


@dataclass(frozen=True, kw_only=True)
class NvidiaDriver:
    """The NVIDIA driver, and the GPUs that it reports."""

    version: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA version that the driver supports, as (major, minor); None if it is unknown."""
    gpus: tuple[Gpu, ...] = ()


@functools.cache
def read_driver() -> NvidiaDriver | None:
    """Return the state of the NVIDIA driver and its GPUs, cached; None if no driver answers."""
    with contextlib.suppress(Exception):
        return _from_nvml()
    with contextlib.suppress(Exception):
        return _from_smi()
    return None


def count_on_bus(folder: Path = _PCI) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, with or without a driver."""
    return sum(
        _word(device / "vendor") == _NVIDIA and _word(device / "class").startswith(_DISPLAY)
        for device in (folder.iterdir() if folder.is_dir() else ())
    )


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _from_nvml() -> NvidiaDriver:
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return NvidiaDriver(
            version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=(number // 1000, number % 1000 // 10),
            gpus=tuple(_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
        )
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    values: dict[str, Any] = {}
    # A GPU partitioned by MIG, or a virtual one, does not support every query.
    with contextlib.suppress(nvml.NVMLError):
        values["mode"] = _MODES.get(nvml.nvmlDeviceGetComputeMode(handle), "Default")
    with contextlib.suppress(nvml.NVMLError):
        values["is_persistent"] = bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    with contextlib.suppress(nvml.NVMLError):
        values["slowdowns"] = slowdowns(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    with contextlib.suppress(nvml.NVMLError):
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        values["holders"] = _holders([process.pid for process in running])
    model = _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(index=index, model=model, used=memory.used, total=memory.total, **values)


def _from_smi() -> NvidiaDriver:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi")
    rows = [line.split(", ") for line in _ask(program, f"--query-gpu={_QUERY}")]
    pids: dict[str, list[int]] = {}
    order = {uuid: row[0] for uuid, row in zip(_ask(program, "--query-gpu=uuid"), rows, strict=True)}
    for line in _ask(program, "--query-compute-apps=gpu_uuid,pid"):
        uuid, pid = line.split(", ")
        pids.setdefault(order.get(uuid, ""), []).append(int(pid))
    gpus = tuple(parse_smi(row, _holders(pids.get(row[0], []))) for row in rows)
    return NvidiaDriver(version=rows[0][-1] if rows else "", cuda=_smi_cuda(program), gpus=gpus)


def parse_smi(row: Sequence[str], holders: tuple[str, ...] = ()) -> Gpu:
    """Return the state of a GPU from the columns of its line in nvidia-smi's table (see `_QUERY`).

    >>> parse_smi(["0", "NVIDIA H200", "Default", "Enabled", "4", "143771", "0x0000000000000020", "570.86"]).slowdowns
    ('too hot',)
    """
    index, model, mode, persistence, used, total, reasons, _ = row
    return Gpu(
        index=int(index), model=model, mode=mode, is_persistent=persistence != "Disabled", holders=holders,
        used=_mebibytes(used), total=_mebibytes(total),
        slowdowns=slowdowns(int(reasons, 16)) if reasons.startswith("0x") else (),
    )  # fmt: skip


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Return texts for the bits of NVML's throttle reasons that indicate a problem."""
    return tuple(dict.fromkeys(text for bit, text in _SLOWDOWNS.items() if reasons & bit))


def _ask(program: str, query: str) -> list[str]:
    command = [program, query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()


def _smi_cuda(program: str) -> tuple[int, int] | None:
    text = subprocess.run([program], capture_output=True, text=True, timeout=30, check=True).stdout
    after = text.partition("CUDA Version:")[2].split()
    return _version(after[0]) if after else None


def _version(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _holders(pids: Sequence[int]) -> tuple[str, ...]:
    return tuple(_named(pids))


def _named(pids: Sequence[int]) -> Iterator[str]:
    for pid in pids:
        if pid != os.getpid():
            try:
                yield f"{pid} ({psutil.Process(pid).name()})"
            except psutil.Error:
                yield str(pid)


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
