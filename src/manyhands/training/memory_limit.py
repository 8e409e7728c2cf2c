"""Memory limits: the number of bytes of its device that a run may use, and how many of them are left."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from ..core import SettingsError, format_bytes
from ..distributed import Device

M_MMAP_THRESHOLD = -3
MAPPED_FROM, MAPPED_AT_LAST = 1 << 17, 1 << 25
"""The initial value of glibc's mmap threshold, and the one it grows to by itself."""


class Guard:
    """Context in which a step runs: with a limit, the kernel caps the data segment of the process (`RLIMIT_DATA`)."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._is_first = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.limit is None:
            yield
            return
        # With no memory left at all, libraries that ignore a failed malloc would crash the process.
        if self._is_first and _data_bytes() > self.limit:
            raise MemoryError
        self._is_first = False
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit if hard < 0 else min(self.limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def limited(device: torch.device, memory: int | None) -> Iterator[Guard]:
    """Limit a run to `memory` bytes on its device beyond what is already in use; yield the guard for its steps.

    On a CPU the limit applies within steps only: the thread that writes a checkpoint must still get a stack. A thread
    that hit the limit may get no further kernels from oneDNN, so a limited run needs its own process.
    """
    if memory is None:
        yield Guard()
    elif device.type == "cuda":
        with _limited_cuda(device, memory):
            yield Guard()
    else:
        # Every optimizer imports it, and it should not count as the run's memory.
        importlib.import_module("torch._dynamo")
        # The same holds for the stacks of compute threads; without one the process would crash.
        torch.ones(1 << 20).add_(1)
        torch.ones(256, 256) @ torch.ones(256, 256)
        _map_from(MAPPED_FROM)
        try:
            yield Guard(_data_bytes() + memory)
        finally:
            _map_from(MAPPED_AT_LAST)


def _map_from(size: int) -> None:
    """Let the C library return freed blocks of at least this size at once, so that a limit counts only memory in use.

    By default glibc raises this threshold to the size of tensors, which then leave holes in the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, size)


class _HeapState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    )


def _holes() -> int:
    """Return the unused bytes that the C library holds from the system; 0 where it does not report them."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _HeapState
    return int(library.mallinfo2().free)


@contextlib.contextmanager
def _limited_cuda(device: torch.device, memory: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    if memory > total:
        raise SettingsError(
            f"memory must not exceed that of {device}, {format_bytes(total)}",
            got=f"memory={format_bytes(memory)}",
            remedy="pass a smaller amount, or omit it",
        )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    wanted = memory + torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(before, wanted / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _data_bytes() -> int:
    """Return the bytes the kernel counts as this process's data, without heap holes, which are reused first."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 - _holes()


def headroom(device: torch.device, limit: int | None = None) -> int:
    """Return the bytes that this process can still allocate on its device, given a limit on its data."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, _ = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return min(free + reserved, allowed) - allocated
    available = int(psutil.virtual_memory().available)
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [bytes_ for bytes_ in (limit, soft) if bytes_ is not None and bytes_ != resource.RLIM_INFINITY]
    return min([available, *(bytes_ - _data_bytes() for bytes_ in limits)])


def host_bytes(devices: Sequence[Device]) -> int:
    """Return the bytes of host memory available per device for offloading; 0 where the devices are CPUs."""
    if any(device.kind == "cpu" for device in devices):
        return 0
    return int(psutil.virtual_memory().available) // len(devices)
