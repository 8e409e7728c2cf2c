"""A training step as CUDA graphs that are replayed; parts that cannot be captured run in between.

A captured step reads static inputs: tensors that keep their addresses and are filled before each replay.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..distributed import culprit


@dataclass(frozen=True)
class Phase:
    """A part of a training step, which is captured, or runs eagerly between captured parts."""

    run: Callable[[], None]
    captured: bool = True
    """Whether the part is captured."""


class CaptureError(Exception):
    """Raised when an operation of a step cannot be captured; the message has its line of user code and the reason."""


class CapturedGraphs:
    """The phases of a step, captured one after another as CUDA graphs. Capturing runs nothing on the device.

    Captured steps with the same memory `pool` share their memory, since only one of them is replayed at a time.
    """

    def __init__(self, phases: Sequence[Phase], pool: Any) -> None:
        self._parts: list[Callable[[], None]] = []
        self.num_graphs = 0
        for captured, group in groupby(phases, key=lambda phase: phase.captured):
            if captured:
                graph = torch.cuda.CUDAGraph()
                _capture_graph(graph, [phase.run for phase in group], pool)
                self._parts.append(graph.replay)
                self.num_graphs += 1
            else:
                self._parts.extend(phase.run for phase in group)

    def replay(self) -> None:
        """Run the step: replay its graphs, and run the phases that are not captured, in order."""
        for part in self._parts:
            part()


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Let operations that synchronize with the GPU raise CaptureError within the context, as they cannot be captured.

    The context captures nothing: it is for a trial of the step before the capture.
    """
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise CaptureError(f"{culprit(error)} waits for the GPU in every step") from error
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype each time it is set
        torch.cuda.set_sync_debug_mode(mode)


def _capture_graph(graph: torch.cuda.CUDAGraph, runs: Sequence[Callable[[], None]], pool: Any) -> None:
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
        raise CaptureError(_reason(error)) from error
    try:
        graph.capture_end()
    except RuntimeError as error:
        _heal()
        raise CaptureError(_reason(error)) from error


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
        return "captured graphs need additional memory, and there is not enough"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{culprit(error)} cannot be captured ({text})"


_PLAIN = (bool, int, float, str, bytes, type(None))


def shape_of(data: Any) -> Hashable | str:
    """Return a key that is equal for batches that can share a captured step, or text with the reason why there is none.

    >>> shape_of({"x": torch.zeros(2)}) == shape_of({"x": torch.ones(2)})
    True
    >>> shape_of([object()])
    'the batch contains an object of type object, which is neither a tensor nor a number'
    """
    # This runs before every step, so it avoids a general tree traversal.
    if isinstance(data, Tensor):
        return (data.shape, data.dtype, data.device) if data.layout is torch.strided else "the batch is sparse"
    if isinstance(data, _PLAIN):
        return (data,)
    if not isinstance(data, (tuple, list, dict)):
        return f"the batch contains an object of type {type(data).__name__}, which is neither a tensor nor a number"
    children = [shape_of(child) for child in (data.values() if isinstance(data, dict) else data)]
    if type(data) is not dict and isinstance(data, dict):
        children.append(shape_of(vars(data)))
    for child in children:
        if isinstance(child, str):
            return child
    return type(data), tuple(data) if isinstance(data, dict) else (), tuple(children)


class StaticInputs:
    """A copy of a batch whose tensors keep their addresses, from which a captured step reads.

    Args:
        data: The batch.
        map_leaves: Applies a function to the leaves of a nested batch, as `data.map_leaves` does.
        tensors: Returns the tensors of a nested batch, as `data.tensors` does.
    """

    def __init__(
        self,
        data: Any,
        map_leaves: Callable[[Callable[[Any], Any], Any], Any],
        tensors: Callable[[Any], Iterable[Tensor]],
    ) -> None:
        self.data: Any = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, data)
        self._walk = tensors
        self._tensors = list(tensors(self.data))

    def load(self, data: Any) -> None:
        """Copy another batch, for which `shape_of` returns the same key, into the tensors."""
        if isinstance(data, Tensor):
            self.data.copy_(data)
        else:
            torch._foreach_copy_(self._tensors, list(self._walk(data)))
