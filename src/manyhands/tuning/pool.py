"""A pool: processes on devices that take work one after the other; one that dies is replaced.

How many processes a device gets is measured, unless it is said: while work is being done anyway, the number is
doubled, and kept where more was done in the same time.
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
"""On an accelerator; a CPU has no more of them than cores."""
GAIN = 1.1
"""What twice as many processes must do at least, as a multiple, to be kept."""
END_SECONDS = 60.0
"""For a process that was asked to end what it does."""
ROUNDS = 3
"""Pieces of work for every process before a number of them is judged."""


@dataclass
class Done(Generic[Key]):
    """A piece of work that has come to its end."""

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
        """How many may work at a time."""
        return len(self._usable)

    @property
    def is_busy(self) -> bool:
        return any(worker.key is not None for worker in self._workers)

    def start(self, key: Key, method: str, *args: Any) -> int:
        """Gives work to a process that has none; returns the process's number."""
        worker = next(worker for worker in self._usable if worker.key is None)
        if worker.service is None or not worker.service.is_alive:
            worker.service = self._engine.start_service(self._make, worker.device, on_output=self._on_output)
        worker.key = key
        answer = worker.service.call(method, *args)
        answer.add_done_callback(lambda done: self._done.put((worker, key, done)))
        return worker.number

    def wait(self) -> list[Done[Key]]:
        """Returns when some work has come to its end."""
        found = [self._take(*self._next())]
        while not self._done.empty():
            found.append(self._take(*self._done.get()))
        if self._packing.hear(len(found), self.num_processes // len(self._devices)):
            self._resize()
        return found

    def stop(self) -> None:
        """Asks every process to end what it does, and itself."""
        for worker in self._workers:
            self._let_go(worker)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            if worker.service is not None:
                worker.service.kill()

    @property
    def _usable(self) -> list[_Worker[Key]]:
        return self._workers[: len(self._devices) * self._packing.level]

    def _next(self) -> tuple[_Worker[Key], Key, Future[Any]]:
        """Waits in small steps, so that Ctrl-C is heard."""
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
        # The process's end is told a moment after the answers that it owes.
        if worker.service.is_alive and "the service" in str(error):
            worker.service.ended.exception(5.0)
        return Done(key, error=error, is_lost=not worker.service.is_alive)

    def _let_go(self, worker: _Worker[Key]) -> None:
        """Lets a process end by itself, beside everything else."""
        if worker.service is not None and worker.service.is_alive:
            threading.Thread(target=worker.service.stop, args=(END_SECONDS,), daemon=True).start()

    def _resize(self) -> None:
        """Makes room for as many processes as a device should have."""
        level = self._packing.level
        while len(self._workers) < len(self._devices) * level:
            number = len(self._workers)
            slot, at = divmod(number, len(self._devices))
            device = self._devices[at]
            if level > 1:
                device = dataclasses.replace(device, share=device.share / level, slot=device.slot * level + slot)
            self._workers.append(_Worker(number, device))


class Packing:
    """How many processes a device gets: a number, or what measures better."""

    def __init__(self, per_device: int | None, most: int) -> None:
        self.level, self._most = per_device or 1, most
        self._is_settled = per_device is not None or most < 2
        self._rates: dict[int, float] = {}
        self._since, self._num = time.monotonic(), -1

    def hear(self, num_done: int, num_working: int) -> bool:
        """So many pieces were done; whether the number of processes changes now."""
        if self._is_settled:
            return False
        if self._num < 0:
            # The first ones begin with whatever starting costs.
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
    """How many processes may share a device."""
    return MAX_PER_DEVICE if device.kind != "cpu" else max(1, round(num_cores() * device.share))
