"""Prefetching: a background thread reads batches ahead, and copies them to an accelerator on a side stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Generic, TypeVar

import psutil
import torch

from .batch import Batch, map_leaves, tensors, to_device

T = TypeVar("T")
POLL_SECONDS = 0.001
"""Interval at which a waiting consumer checks whether its device has become idle."""


class Prefetcher(Generic[T]):
    """Run an iterator in a background thread, a few items ahead of the consumer.

    Args:
        items: The iterator.
        depth: Number of items to read ahead. It doubles whenever the consumer had to wait, so that later input stalls
            are bridged.
        limit: Maximum depth.
        has_memory: Returns, for an item and a depth, whether there is memory for as many items.
        is_idle: Called when a wait starts; returns a function that reports whether the device has finished all work
            that was submitted until then.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        depth: int = 2,
        limit: int = 16,
        has_memory: Callable[[T, int], bool] = lambda item, depth: True,
        is_idle: Callable[[], Callable[[], bool]] = lambda: lambda: True,
    ) -> None:
        self.depth = depth
        self.waited = 0.0
        """Seconds that the consumer waited while its device was idle."""
        self.hidden = 0.0
        """Seconds that the consumer waited while its device was still busy, so that no time was lost."""
        self._items, self._limit, self._has_memory, self._is_idle = items, limit, has_memory, is_idle
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = self._closed = self._started = False
        self._thread = threading.Thread(target=self._produce, name="manyhands-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            had_to_wait = not self._ready and not self._ended
            if had_to_wait:
                self._wait()
            if not self._ready:
                self._raise_end()
            item = self._ready.popleft()
            # The first item cannot be prefetched, so waiting for it is not counted.
            if had_to_wait and self._started:
                self._deepen(item)
            self._started = True
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Stop the thread and drop the items that were read ahead."""
        with self._changed:
            self._closed = self._ended = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wait(self) -> None:
        asked = perf_counter()
        idle, idle_since = self._is_idle(), None
        while not self._ready and not self._ended:
            if idle_since is None and idle():
                idle_since = perf_counter()
            self._changed.wait(None if idle_since is not None else POLL_SECONDS)
        arrived_at = perf_counter()
        if idle_since is None:
            idle_since = arrived_at
        self.hidden += idle_since - asked
        self.waited += arrived_at - idle_since

    def _raise_end(self) -> None:
        error, self._error = self._error, None
        raise error if error is not None else StopIteration

    def _deepen(self, item: T) -> None:
        deeper = min(2 * self.depth, self._limit)
        if self._has_memory(item, deeper):
            self.depth = deeper

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            self._finish()

    def _put(self, item: T) -> bool:
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self.depth)
            return not self._closed

    def _finish(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class DeviceCopy:
    """Copy batches to an accelerator on a side stream, from pinned memory, while the device computes."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        module: Any = getattr(torch, device.type, None)
        self._module = module
        self._stream = module.Stream(device) if hasattr(module, "Stream") else None
        self.seconds = 0.0
        """Seconds that the device spent on copies."""
        self._reading = self._sending = 0.0
        self._under_way: deque[tuple[Any, Any]] = deque()

    @property
    def share(self) -> float:
        """The fraction of the thread's time that is spent on sending batches to the device; the rest is reading."""
        return self._sending / (self._reading + self._sending) if self._sending else 0.0

    def sent(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Any, Any]]:
        """Yield every batch, its data on the way to the device, and the event that marks the data's arrival."""
        began = perf_counter()
        for batch in batches:
            read = perf_counter()
            item = (batch, *self.send(batch.data))
            self._sending += perf_counter() - read
            self._reading += read - began
            yield item
            began = perf_counter()

    def when_idle(self) -> Callable[[], bool]:
        """Return a function that reports whether the device has finished the work of the current stream until now."""
        if self._stream is None:
            return lambda: True
        return self._module.current_stream(self._device).record_event().query  # type: ignore[no-any-return]

    def send(self, data: Any) -> tuple[Any, Any]:
        """Start to copy nested data to the device; return the copy and the event that marks its arrival, or None.

        Any thread may call this.
        """
        if self._stream is None:
            return to_device(data, self._device, dtype=self._dtype), None
        with self._module.stream(self._stream):
            start, arrival = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
            start.record(self._stream)
            moved = map_leaves(self._copied, data)
            arrival.record(self._stream)
        self._count(start, arrival)
        return moved, arrival

    def _count(self, start: Any, arrival: Any) -> None:
        """Add the time of finished copies to `seconds`, without waiting for other copies."""
        self._under_way.append((start, arrival))
        while self._under_way and self._under_way[0][1].query():
            start, arrival = self._under_way.popleft()
            self.seconds += start.elapsed_time(arrival) / 1e3

    def receive(self, data: Any, arrival: Any) -> Any:
        """Make the current stream wait for a copy, without blocking the host; return the data."""
        if arrival is None:
            return data
        current = self._module.current_stream(self._device)
        current.wait_event(arrival)
        for tensor in tensors(data):
            # The side stream must not reuse this memory while the consumer still reads it.
            tensor.record_stream(current)
        # record_stream does not reach tensors inside objects, so those are copied on the consumer's stream.
        return to_device(data, self._device)

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pinned = leaf.pin_memory() if leaf.device.type == "cpu" else leaf
        return to_device(pinned, self._device, non_blocking=True, dtype=self._dtype)

    def has_memory(self, data: Any, depth: int) -> bool:
        """Return whether `depth` batches like `data` are small compared with the memory of host and device."""
        needed = depth * sum(tensor.nbytes for tensor in tensors(data))
        on_device = getattr(self._module, "mem_get_info", None)
        if on_device is not None and needed > on_device(self._device)[1] // 20:
            return False
        return bool(needed < psutil.virtual_memory().available // 10)
