"""Memory of a serving process: what it holds, and what its allocator keeps or returns to the system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import time
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT_BYTES, LARGEST_KEPT = 64 << 20, 32 << 20
TRIM_BYTES = 256 << 20
"""Resident bytes beyond those at the start with which the allocator is asked to return free memory."""
WORTHWHILE_BYTES = 32 << 20
TRIM_SECONDS, MAX_TRIM_SECONDS = 5.0, 600.0
"""Seconds between two requests to the allocator; they double while a request returns little."""


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process (this one by default) in bytes; 0 if it has exited."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def keep_memory() -> None:
    """Let glibc's allocator keep the memory of requests, because the kernel would zero new pages for each of them.

    That takes a third of the time of a request of 150 KB. Other allocators are not configured.
    """
    with contextlib.suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


class Heap:
    """Returns memory to the system that a burst of large requests left free below blocks that are still in use."""

    def __init__(self) -> None:
        self._most = resident_bytes() + TRIM_BYTES
        self._pause, self._next = TRIM_SECONDS, 0.0

    async def trim(self) -> None:
        """Return free memory if the process is large; call it regularly."""
        before = resident_bytes()
        if before <= self._most:
            self._pause = TRIM_SECONDS
            return
        if time.monotonic() < self._next:
            return
        with contextlib.suppress(AttributeError):
            await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, KEPT_BYTES)
        has_helped = before - resident_bytes() > WORTHWHILE_BYTES
        self._pause = TRIM_SECONDS if has_helped else min(2 * self._pause, MAX_TRIM_SECONDS)
        self._next = time.monotonic() + self._pause
