"""Engines: how a function is started on devices, watched and stopped. Whoever needs processes asks one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..core import Event
from ..distributed import DEFAULT_TIMEOUT, Device, World, resolve
from .service import Make, Service

AfterLoss = Literal["end", "regroup", "restart"]
"""What is done when a rank is lost. "end": the job ends with its failure. "regroup": lost ranks are replaced, and `fn`
answers a lost peer with `regroup` and goes on from there. "restart": all ranks are ended, and `fn` begins anew in all
of them; what it raises by itself ends the job all the same."""
OnEvent = Callable[[int, Event], None]
"""Called with a rank and what it reported."""
OnOutput = Callable[[int, str, str], None]
"""Called with a rank, a line that it printed, and where: "stdout" or "stderr"."""


class RunningJob(ABC):
    """A function running on several devices."""

    @abstractmethod
    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        """Returns the results in rank order, or raises the first failure after ending all the others."""

    @abstractmethod
    def stop(self) -> None:
        """Asks the ranks to finish their step and return."""

    @abstractmethod
    def kill(self) -> None:
        """Ends every rank at once."""


def ignore(*_: Any) -> None:
    """Hears something and does nothing."""


class Engine(ABC):
    """Starts a function on devices, one rank each; or a service on one."""

    def devices(self, on: Any, num_wanted: int | None, arithmetic: str = "") -> tuple[list[Device], list[str]]:
        """The devices that `on=` names, and notices about what was chosen; `num_wanted` of them, None for all.

        `arithmetic` says how that number comes about.
        """
        return resolve(on, num_wanted, arithmetic)

    @abstractmethod
    def start(
        self,
        fn: Callable[[World], Any],
        devices: Sequence[Device],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        after_loss: AfterLoss = "end",
        unit: int = 1,
    ) -> RunningJob:
        """Runs `fn(world)` on every device; `after_loss` says what becomes of it when a rank is lost.

        `unit` is how many ranks hold one network together: those that are left are called in whole groups only.
        """

    @abstractmethod
    def start_service(
        self,
        make: Make,
        device: Device,
        *,
        on_event: OnEvent = ignore,
        on_output: OnOutput = ignore,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Service:
        """Makes an object by `make(world)` in a process of its own on a device; its methods are called by message.

        It returns at once. What the object reports by `world.line` and what it prints is heard on another thread.
        """
