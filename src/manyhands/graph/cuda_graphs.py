"""A step as CUDA graphs that are replayed, with what cannot be recorded run in between."""

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
    """A part of a step; one that is not recorded runs as it is, in its place."""

    run: Callable[[], None]
    recorded: bool = True


class CannotRecord(Exception):
    """Something in the step cannot be recorded; the text says what and where."""


class Recording:
    """Phases of a step, recorded one after another. Making one runs nothing on the device.

    Recordings of one `pool` share their memory, since only one of them is replayed at a time.
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
        """Takes the step."""
        for part in self._parts:
            part()


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Runs a step plainly, but refuses what waits for the device: that could not be recorded."""
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
        warnings.simplefilter("ignore")  # torch calls the mode a prototype, each time it is set
        torch.cuda.set_sync_debug_mode(mode)


def _record(graph: torch.cuda.CUDAGraph, runs: Sequence[Callable[[], None]], pool: Any) -> None:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    # Other threads go on copying batches meanwhile, so only this one is held to what a recording allows.
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
    """A recording that failed leaves torch's generator waiting for one; an empty one that succeeds sets it right."""
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
