"""Executors: where trials run. One here, or one in every process of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..core import WorkerFailed
from ..distributed import Device
from ..launcher import Engine
from .pool import Pool
from .trial_work import TrialOutcome, TrialRunner, TrialWork, TrialWorker, here


class Executor(ABC):
    """Takes work, and says what came of it."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """How much more work it would take now."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether there is work under way."""

    @abstractmethod
    def start(self, work: TrialWork) -> int:
        """Takes work; returns the number of the worker that does it."""

    @abstractmethod
    def wait(self) -> list[TrialOutcome]:
        """Returns when something has come of some of the work."""

    @abstractmethod
    def stop(self) -> None:
        """Asks the work under way to end after its step."""

    @abstractmethod
    def close(self) -> None:
        """Leaves nothing running."""


class InProcessExecutor(Executor):
    """One trial at a time, in this process."""

    def __init__(self, workshop: TrialRunner, device: Device) -> None:
        self._workshop, self._world = workshop, here(device)
        self._work: TrialWork | None = None

    @property
    def num_free(self) -> int:
        return 0 if self._work else 1

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    def start(self, work: TrialWork) -> int:
        self._work = work
        return 0

    def wait(self) -> list[TrialOutcome]:
        assert self._work is not None
        work, self._work = self._work, None
        return [self._workshop.do(work, self._world)]

    def stop(self) -> None:
        self._world.line.hear({"stop": True})

    def close(self) -> None:
        self._world.close()


class Processes(Executor):
    """A trial in every process of a pool."""

    def __init__(
        self,
        workshop: TrialRunner,
        engine: Engine,
        devices: Sequence[Device],
        *,
        per_device: int | None,
        on_output: Callable[[int, str, str], None],
    ) -> None:
        make = _Making(workshop)
        self._pool: Pool[TrialWork] = Pool(engine, make, devices, per_device=per_device, on_output=on_output)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def is_busy(self) -> bool:
        return self._pool.is_busy

    def start(self, work: TrialWork) -> int:
        return self._pool.start(work, "do", work)

    def wait(self) -> list[TrialOutcome]:
        outcomes = []
        for done in self._pool.wait():
            if done.error is None:
                outcomes.append(done.result)
            else:
                lost = done.is_lost and isinstance(done.error, WorkerFailed)
                outcomes.append(TrialOutcome(done.key.number, reason=str(done.error), is_lost=lost))
        return outcomes

    def stop(self) -> None:
        self._pool.stop()

    def close(self) -> None:
        self._pool.close()


class _Making:
    """Makes a process's desk."""

    def __init__(self, workshop: TrialRunner) -> None:
        self._workshop = workshop

    def __call__(self, world: object) -> TrialWorker:
        return TrialWorker(world, self._workshop)  # type: ignore[arg-type]
