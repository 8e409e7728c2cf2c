"""What captured and compiled steps occupy: a CUDA stream, the memory of graphs, and compiler processes."""

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


def stop_compilers() -> None:
    """Stop the worker processes that torch keeps for compilation."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
