"""A training step as CUDA graphs that are replayed; parts that cannot be captured run in between."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from .user_lines import culprit


@dataclass(frozen=True)
class Phase:
    """A part of a step; one that is not captured runs as it is, in its place."""

    run: Callable[[], None]
    recorded: bool = True


class CannotRecord(Exception):
    """Raised when something in the step cannot be captured; the message names it and its line."""


class Recording:
    """The phases of a step, captured one after another as CUDA graphs. Capturing runs nothing on the device.

    Captured steps with the same `pool` share their memory, since only one of them is replayed at a time.
    """

    def __init__(self, phases: Sequence[Phase], pool: Any) -> None:
        self._parts: list[Callable[[], None]] = []
        self.num_graphs = 0
        for recorded, group in groupby(phases, key=lambda phase: phase.recorded):
            if recorded:
                graph = torch.cuda.CUDAGraph()
                _record(graph, [phase.run for phase in group], pool)
                self._parts.append(graph.replay)
                self.num_graphs += 1
            else:
                self._parts.extend(phase.run for phase in group)

    def replay(self) -> None:
        """Run the step."""
        for part in self._parts:
            part()


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Run a step without capture, but raise on operations that synchronize with the GPU: they cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise CannotRecord(f"{culprit(error)} waits for the GPU in every step") from error
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype each time it is set
        torch.cuda.set_sync_debug_mode(mode)


def _record(graph: torch.cuda.CUDAGraph, runs: Sequence[Callable[[], None]], pool: Any) -> None:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    # Other threads keep copying batches during capture, so only this thread is restricted.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for run in runs:
            run()
    except Exception as error:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        _heal()
        raise CannotRecord(_reason(error)) from error
    try:
        graph.capture_end()
    except RuntimeError as error:
        _heal()
        raise CannotRecord(_reason(error)) from error


def _heal() -> None:
    """Capture an empty graph: after a failed capture, torch's generator would otherwise stay in capture state."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    graph.capture_end()


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "a recording needs memory of its own, and there is not enough"
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{culprit(error)} cannot be recorded ({said})"
