"""Engines: start a function on devices, monitor it and stop it. All code that needs processes uses an engine."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..core import Event
from ..distributed import DEFAULT_TIMEOUT, Device, World, resolve
from .service import Make, Service

AfterLoss = Literal["end", "regroup", "restart"]
"""What happens when a rank fails.

- "end": the job ends with that failure.
- "regroup": failed ranks are replaced; `fn` handles a lost peer by calling `regroup` and continues from there.
- "restart": all ranks are killed, and `fn` is restarted in all of them; an exception that `fn` itself raises still
  ends the job.
"""
OnEvent = Callable[[int, Event], None]
"""Called with a rank and an event that it reported."""
OnOutput = Callable[[int, str, str], None]
"""Called with a rank, a line that it printed, and the stream: "stdout" or "stderr"."""


class RunningJob(ABC):
    """A job that an engine has started: a function that runs on several devices, one rank each."""

    @abstractmethod
    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        """Return the results in rank order, or raise the first failure after ending all other ranks."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the ranks to finish their step and return."""

    @abstractmethod
    def kill(self) -> None:
        """Kill every rank immediately."""


def ignore(*_: Any) -> None:
    """Ignore an event or a line of output."""


class Engine(ABC):
    """Starts a function on devices, one rank each, or a service on one device."""

    def devices(self, on: Any, num_wanted: int | None, arithmetic: str = "") -> tuple[list[Device], list[str]]:
        """Return the devices that `on=` names, and notices about the choice for the user.

        `num_wanted` is the number of devices to return, None for all; `arithmetic` explains how it was computed.
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
        """Run `fn(world)` on every device; `after_loss` selects what happens when a rank fails.

        `unit` is the number of ranks in a group, which together hold one copy of the network: after a failure, the
        remaining ranks continue in whole groups only.
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
        """Create an object by `make(world)` in its own process on a device; its methods are called by message.

        This method returns immediately. Another thread passes events that the object reports through `world.channel`,
        and lines that it prints, to the callbacks.
        """


def engine_for(on: object, local: Engine) -> Engine:
    """Return the Ray engine if `on=` names a Ray cluster, else the local engine."""
    if isinstance(on, str) and (on == "ray" or on.startswith("ray://")):
        return _ray(on)
    return local


@functools.cache
def _ray(address: str) -> Engine:
    from .ray_engine import RayEngine

    return RayEngine(address)
