"""Pool of processes on devices, each of which does one piece of work at a time; a process that dies is replaced.

Unless the number of processes per device is given, it is found by measurement: during normal work the number is
doubled, and kept if more work is done in the same time.
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
"""Maximum number of processes on an accelerator; a CPU has at most one per core."""
GAIN = 1.1
"""Minimum speed-up for which a doubled number of processes is kept."""
END_SECONDS = 60.0
"""Seconds in which a process that is asked to stop must end its work before it is killed."""
ROUNDS = 3
"""Pieces of work per process after which the throughput with a number of processes is judged."""


@dataclass
class Done(Generic[Key]):
    """A finished piece of work, by its key: its result or its error."""

    key: Key
    result: Any = None
    error: BaseException | None = None
    is_lost: bool = False
    """Whether the process that did the work has died."""


@dataclass(eq=False)
class _PoolWorker(Generic[Key]):
    number: int
    device: Device
    service: Service | None = None
    key: Key | None = None


class Pool(Generic[Key]):
    """Pool of service processes that do work in parallel.

    Args:
        engine: Starts the processes.
        make: Called in each process with its world; returns the object whose methods do the work.
        devices: The devices to use.
        per_device: Number of processes per device; None finds the fastest by measurement.
        on_output: Called with the rank, the text and the stream of each line that a process prints.
    """

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
        self._done: queue.SimpleQueue[tuple[_PoolWorker[Key], Key, Future[Any]]] = queue.SimpleQueue()
        self._workers: list[_PoolWorker[Key]] = []
        self._packing = Packing(per_device, min(_most(device) for device in devices))
        self._resize()

    @property
    def num_free(self) -> int:
        return sum(worker.key is None for worker in self._usable)

    @property
    def num_processes(self) -> int:
        """Maximum number of processes that work at a time."""
        return len(self._usable)

    @property
    def is_busy(self) -> bool:
        return any(worker.key is not None for worker in self._workers)

    def start(self, key: Key, method: str, *args: Any) -> int:
        """Call `method` of the object in an idle process, started if necessary; return the number of the process.

        The caller must check `num_free` first. `key` identifies the work in the result of `wait`.
        """
        worker = next(worker for worker in self._usable if worker.key is None)
        if worker.service is None or not worker.service.is_alive:
            worker.service = self._engine.start_service(self._make, worker.device, on_output=self._on_output)
        worker.key = key
        answer = worker.service.call(method, *args)
        answer.add_done_callback(lambda done: self._done.put((worker, key, done)))
        return worker.number

    def wait(self) -> list[Done[Key]]:
        """Wait until at least one piece of work is finished; return all that are."""
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
        """Kill the processes, with the work that they do."""
        for worker in self._workers:
            if worker.service is not None:
                worker.service.kill()

    @property
    def _usable(self) -> list[_PoolWorker[Key]]:
        return self._workers[: len(self._devices) * self._packing.level]

    def _next(self) -> tuple[_PoolWorker[Key], Key, Future[Any]]:
        """Wait for the next finished call, in intervals that let Ctrl-C interrupt."""
        while True:
            try:
                return self._done.get(timeout=0.5)
            except queue.Empty:
                continue

    def _take(self, worker: _PoolWorker[Key], key: Key, answer: Future[Any]) -> Done[Key]:
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

    def _let_go(self, worker: _PoolWorker[Key]) -> None:
        """Ask a process to end its work and exit, and wait for that in a background thread."""
        if worker.service is not None and worker.service.is_alive:
            threading.Thread(target=worker.service.stop, args=(END_SECONDS,), daemon=True).start()

    def _resize(self) -> None:
        """Add workers until there are as many as the present number of processes per device requires."""
        level = self._packing.level
        while len(self._workers) < len(self._devices) * level:
            number = len(self._workers)
            slot, at = divmod(number, len(self._devices))
            device = self._devices[at]
            if level > 1:
                device = dataclasses.replace(device, share=device.share / level, slot=device.slot * level + slot)
            self._workers.append(_PoolWorker(number, device))


class Packing:
    """Choose the number of processes per device: `per_device` if it is given, else the fastest number up to `most`.

    `level` is the present number.
    """

    def __init__(self, per_device: int | None, most: int) -> None:
        self.level, self._most = per_device or 1, most
        self._is_settled = per_device is not None or most < 2
        self._rates: dict[int, float] = {}
        self._since, self._num = time.monotonic(), -1

    def record_results(self, num_done: int, num_working: int) -> bool:
        """Record `num_done` finished pieces of work by `num_working` processes per device.

        After ROUNDS pieces of work per process, adjust `level` by their throughput, and return True.
        """
        if self._is_settled:
            return False
        if self._num < 0:
            # Start measuring after the first results, which include the start-up time of processes.
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
    """Return the maximum number of processes on a device."""
    return MAX_PER_DEVICE if device.kind != "cpu" else max(1, round(num_cores() * device.share))
