"""Executors: objects that run trials, in this process or in a pool of processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..core import WorkerFailed
from ..distributed import Device
from ..launcher import Engine
from .pool import Pool
from .trial_work import TrialOutcome, TrialRunner, TrialWork, TrialWorker, here


class Executor(ABC):
    """Base class of executors, which train trials: `start` takes a unit of work, and `wait` returns outcomes."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Number of further units of work that `start` accepts now."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether any work is started and its outcome not yet returned by `wait`."""

    @abstractmethod
    def start(self, work: TrialWork) -> int:
        """Start a trial's unit of work; return the number of the worker that executes it."""

    @abstractmethod
    def wait(self) -> list[TrialOutcome]:
        """Wait until some units of work are done, and return their outcomes; the list may be empty."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the trials in progress to end at a point from which they can be resumed."""

    @abstractmethod
    def close(self) -> None:
        """End all work at once, and release the processes, devices and memory of the executor."""


class InProcessExecutor(Executor):
    """Executor that runs one trial at a time, in this process."""

    def __init__(self, runner: TrialRunner, device: Device) -> None:
        self._runner, self._world = runner, here(device)
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
        return [self._runner.do(work, self._world)]

    def stop(self) -> None:
        self._world.channel.handle_message({"stop": True})

    def close(self) -> None:
        self._world.close()


class Processes(Executor):
    """Executor that runs trials in a pool of processes, one at a time in each."""

    def __init__(
        self,
        runner: TrialRunner,
        engine: Engine,
        devices: Sequence[Device],
        *,
        per_device: int | None,
        on_output: Callable[[int, str, str], None],
    ) -> None:
        make = _TrialWorkerFactory(runner)
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


class _TrialWorkerFactory:
    """Function, as an object that can be pickled, that creates the TrialWorker of a process."""

    def __init__(self, runner: TrialRunner) -> None:
        self._runner = runner

    def __call__(self, world: object) -> TrialWorker:
        return TrialWorker(world, self._runner)  # type: ignore[arg-type]
