"""The CUDA stream on which a run computes, and the memory that its captured steps leave behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


def free_graphs(device: torch.device) -> None:
    """Free GPU memory that networks and CUDA graphs hold through reference cycles."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the enclosed block on a new CUDA stream, since the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
