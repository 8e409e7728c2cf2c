"""Pool of processes on devices, which take work one after the other; a process that dies is replaced.

Unless it is given, the number of processes per device is measured: during normal work the number is doubled, and kept
if more work was done in the same time.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..distributed import Device, World, num_cores
from ..launcher import Engine, Service

Key = TypeVar("Key")
MAX_PER_DEVICE = 16
"""Maximum processes on an accelerator; a CPU has at most one per core."""
GAIN = 1.1
"""Minimum speedup from doubling the processes to keep them."""
END_SECONDS = 60.0
"""Seconds that a process has to end its work when it is asked to stop."""
ROUNDS = 3
"""Pieces of work per process before a number of processes is judged."""


@dataclass
class Done(Generic[Key]):
    """A finished piece of work."""

    key: Key
    result: Any = None
    error: BaseException | None = None
    is_lost: bool = False
    """Whether its process died."""


@dataclass(eq=False)
class _Worker(Generic[Key]):
    number: int
    device: Device
    service: Service | None = None
    key: Key | None = None


class Pool(Generic[Key]):
    """Processes that take work."""

    def __init__(
        self,
        engine: Engine,
        make: Callable[[World], Any],
        devices: Sequence[Device],
        *,
        per_device: int | None = None,
        on_output: Callable[[int, str, str], None] = lambda rank, text, stream: None,
    ) -> None:
        self._engine, self._make, self._devices, self._on_output = engine, make, list(devices), on_output
        self._done: queue.SimpleQueue[tuple[_Worker[Key], Key, Future[Any]]] = queue.SimpleQueue()
        self._workers: list[_Worker[Key]] = []
        self._packing = Packing(per_device, min(_most(device) for device in devices))
        self._resize()

    @property
    def num_free(self) -> int:
        return sum(worker.key is None for worker in self._usable)

    @property
    def num_processes(self) -> int:
        """Maximum number of processes working at a time."""
        return len(self._usable)

    @property
    def is_busy(self) -> bool:
        return any(worker.key is not None for worker in self._workers)

    def start(self, key: Key, method: str, *args: Any) -> int:
        """Assign work to an idle process and return its number."""
        worker = next(worker for worker in self._usable if worker.key is None)
        if worker.service is None or not worker.service.is_alive:
            worker.service = self._engine.start_service(self._make, worker.device, on_output=self._on_output)
        worker.key = key
        answer = worker.service.call(method, *args)
        answer.add_done_callback(lambda done: self._done.put((worker, key, done)))
        return worker.number

    def wait(self) -> list[Done[Key]]:
        """Wait until some work is finished and return it."""
        found = [self._take(*self._next())]
        while not self._done.empty():
            found.append(self._take(*self._done.get()))
        if self._packing.record_results(len(found), self.num_processes // len(self._devices)):
            self._resize()
        return found

    def stop(self) -> None:
        """Ask every process to end its work and exit."""
        for worker in self._workers:
            self._let_go(worker)

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            if worker.service is not None:
                worker.service.kill()

    @property
    def _usable(self) -> list[_Worker[Key]]:
        return self._workers[: len(self._devices) * self._packing.level]

    def _next(self) -> tuple[_Worker[Key], Key, Future[Any]]:
        """Wait with a short timeout, so that Ctrl-C is handled."""
        while True:
            try:
                return self._done.get(timeout=0.5)
            except queue.Empty:
                continue

    def _take(self, worker: _Worker[Key], key: Key, answer: Future[Any]) -> Done[Key]:
        worker.key = None
        if worker not in self._usable:
            self._let_go(worker)
        error = answer.exception()
        if error is None:
            return Done(key, answer.result())
        assert worker.service is not None
        # The end of the process is reported shortly after its pending calls have failed.
        if worker.service.is_alive and "the service" in str(error):
            worker.service.ended.exception(5.0)
        return Done(key, error=error, is_lost=not worker.service.is_alive)

    def _let_go(self, worker: _Worker[Key]) -> None:
        """Stop a process on a background thread."""
        if worker.service is not None and worker.service.is_alive:
            threading.Thread(target=worker.service.stop, args=(END_SECONDS,), daemon=True).start()

    def _resize(self) -> None:
        """Add workers up to the chosen number of processes per device."""
        level = self._packing.level
        while len(self._workers) < len(self._devices) * level:
            number = len(self._workers)
            slot, at = divmod(number, len(self._devices))
            device = self._devices[at]
            if level > 1:
                device = dataclasses.replace(device, share=device.share / level, slot=device.slot * level + slot)
            self._workers.append(_Worker(number, device))


class Packing:
    """Choose the number of processes per device: a given number, or the fastest measured."""

    def __init__(self, per_device: int | None, most: int) -> None:
        self.level, self._most = per_device or 1, most
        self._is_settled = per_device is not None or most < 2
        self._rates: dict[int, float] = {}
        self._since, self._num = time.monotonic(), -1

    def record_results(self, num_done: int, num_working: int) -> bool:
        """Record finished work; return whether the number of processes changes now."""
        if self._is_settled:
            return False
        if self._num < 0:
            # The first results include the start-up time.
            self._since, self._num = time.monotonic(), 0
            return False
        self._num += num_done
        if self._num < ROUNDS * max(1, num_working):
            return False
        rate = self._num / max(1e-9, time.monotonic() - self._since)
        before = self._rates.get(self.level // 2)
        self._rates[self.level] = rate
        if before is not None and rate < GAIN * before:
            self.level //= 2
            self._is_settled = True
        elif 2 * self.level > self._most:
            self._is_settled = True
        else:
            self.level *= 2
        self._since, self._num = time.monotonic(), -1
        return True


def _most(device: Device) -> int:
    """Return how many processes may share a device."""
    return MAX_PER_DEVICE if device.kind != "cpu" else max(1, round(num_cores() * device.share))
