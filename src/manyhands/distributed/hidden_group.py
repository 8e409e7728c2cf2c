"""Hide the process group of the ranks from networks and losses, which compute as on one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_SEES_IT = ("torch.", f"{__package__.partition('.')[0]}.")
_BATCH_NORM = "torch.nn.modules.batchnorm"
"""SyncBatchNorm would average over all ranks, also over those that compute the same samples."""


@contextmanager
def hidden_process_group() -> Iterator[None]:
    """Let `torch.distributed.is_initialized()` be False for code that is part of neither torch nor manyhands.

    Many repositories gather or reduce over all ranks if it is True, which manyhands does itself, and which not all
    ranks reach: verification computes whole steps on the first rank only.
    """
    found = dist.is_initialized

    def is_initialized() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return found() and caller.startswith(_SEES_IT) and caller != _BATCH_NORM

    dist.is_initialized = is_initialized
    try:
        yield
    finally:
        dist.is_initialized = found
