"""Anonymous shared memory between a worker and each server on its machine."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any

import torch
from torch import Tensor

from .layout import Share
from .messages import Attach

COOKIE = 64
"""Bytes at the start that show whether both processes see the same memory."""


class SharedSlots:
    """Memory that a worker shares with one server: buffers for a gradient and for the server's values."""

    def __init__(self, share: Share, *, attach: Attach | None = None) -> None:
        sizes = [_aligned(flat_buffer.num_bytes) for flat_buffer in share]
        self.size = COOKIE + 2 * sum(sizes)
        if attach is None:
            self._fd = os.memfd_create("manyhands-slots", os.MFD_CLOEXEC)
            os.truncate(self._fd, self.size)
            self.cookie = secrets.token_bytes(COOKIE)
        else:
            self._fd = os.open(f"/proc/{attach.pid}/fd/{attach.fd}", os.O_RDWR | os.O_CLOEXEC)
            self.cookie = attach.cookie
        self._memory = mmap.mmap(self._fd, self.size)
        if attach is None:
            self._memory[:COOKIE] = self.cookie
        views, at = [], COOKIE
        for _ in range(2):
            for flat_buffer, size in zip(share, sizes, strict=True):
                views.append(_view(self._memory, at, flat_buffer.length, flat_buffer.dtype))
                at += size
        self.pushed: list[Tensor] = views[: len(share)]
        self.pulled: list[Tensor] = views[len(share) :]

    @classmethod
    def attached(cls, share: Share, attach: Attach) -> SharedSlots | None:
        """Map a worker's memory in the server's process; return None if this process cannot access it."""
        try:
            fits = os.stat(f"/proc/{attach.pid}/fd/{attach.fd}").st_size == attach.size
            slots = cls(share, attach=attach) if fits and attach.size == expected_size(share) else None
        except (OSError, ValueError):
            return None
        if slots is not None and slots._memory[:COOKIE] != attach.cookie:
            slots.close()
            return None
        return slots

    def offer(self, worker: int) -> Attach:
        """Return the message with which a server can map this memory."""
        return Attach(worker, os.getpid(), self._fd, self.size, self.cookie)

    def close(self) -> None:
        """Close the file descriptor; the memory is freed when both processes no longer use it."""
        os.close(self._fd)


def expected_size(share: Share) -> int:
    """Return the size in bytes of the memory that a worker shares with a server that has this share."""
    return COOKIE + 2 * sum(_aligned(flat_buffer.num_bytes) for flat_buffer in share)


def _view(memory: Any, at: int, length: int, dtype: torch.dtype) -> Tensor:
    if not length:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=length, offset=at)


def _aligned(num_bytes: int) -> int:
    return (num_bytes + 63) // 64 * 64
