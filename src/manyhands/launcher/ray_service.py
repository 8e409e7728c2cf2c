"""A service in a Ray cluster: an actor on a device of the cluster, monitored by the caller's program."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle

from ..core import DeviceError, SendError, WorkerFailed
from ..distributed import Device
from .engine import OnEvent, OnOutput
from .service import Service

NEWS_SECONDS = 0.5
READY_SECONDS = 60.0
"""Seconds that Ray may take to find resources and start a process there."""


class RayService(Service):
    """A service in an actor that a thread polls for events and output; if a poll fails, the actor has failed."""

    def __init__(
        self,
        ray: Any,
        make: bytes,
        device: Device,
        node: str | None,
        check: Callable[[str, dict[str, Any]], None],
        *,
        on_event: OnEvent,
        on_output: OnOutput,
        timeout: float,
    ) -> None:
        super().__init__(device)
        self._ray, self._check, self._on_event, self._on_output = ray, check, on_event, on_output
        self._actor = _actor(ray, device, node)
        inside = Device(device.kind, 0, host=device.host)  # Ray only makes the devices visible that it assigned
        self._begun = self._actor.begin.remote(make, inside, timeout)
        self._closed: Any = None
        threading.Thread(target=self._watch, name="manyhands-service", daemon=True).start()

    def _send(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked = pickled((method, args, kwargs))
        self._actor.call.remote(asked).future().add_done_callback(functools.partial(self._on_answer, number))

    def _on_answer(self, number: int, answer: Future[bytes]) -> None:
        """Handle an answer; if the actor has failed without an answer, the monitoring thread handles that."""
        if answer.exception() is None:
            self._answered(number, *cloudpickle.loads(answer.result()))

    def _ask_to_end(self) -> None:
        self._actor.end.remote()
        self._closed = self._actor.close.remote()

    def _end_now(self) -> None:
        self._ray.kill(self._actor)

    # -- on the monitoring thread ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            failure = self._poll_until_lost()
        except Exception as error:
            failure = WorkerFailed(0, self.host, f"the service has failed: {brief(error)}")
        self._ray.kill(self._actor)
        self._over(failure)

    def _poll_until_lost(self) -> BaseException | None:
        """Return the service's failure, or None if it ended on request; raise Ray's error if the actor has failed."""
        ray = self._ray
        asked = self._actor.facts.remote()
        if not ray.wait([asked], timeout=READY_SECONDS)[0]:
            return DeviceError(
                f"the Ray cluster must have free resources for a service on {self.device}",
                got=f"none within {READY_SECONDS:.0f} s",
                remedy="stop other jobs there, or start fewer services",
            )
        self._check(self.host, ray.get(asked))
        has_begun = False
        while True:
            for kind, _, rest in ray.get(self._actor.news.remote(NEWS_SECONDS)):
                self._on_event(0, rest) if kind == "event" else self._on_output(0, *rest)
            if not has_begun and ray.wait([self._begun], timeout=0)[0]:
                if (failure := ray.get(self._begun)) is not None:
                    return self._failure(failure)
                has_begun = True
            if self._closed is not None and ray.wait([self._closed], timeout=0)[0]:
                failure = ray.get(self._closed)
                return None if failure is None else self._failure(failure)

    def _failure(self, failure: dict[str, Any]) -> BaseException:
        return failure["error"] or WorkerFailed(0, self.host, failure["reason"], failure["traceback"])


def pickled(what: Any) -> bytes:
    """Return an object as pickled bytes for another host of a Ray cluster; raise SendError if that is impossible."""
    try:
        return bytes(cloudpickle.dumps(what))
    except Exception as error:
        raise SendError(
            "objects that are sent to a worker process must be picklable",
            got=f"{type(error).__name__}: {error}",
            remedy="create it inside the function that uses it, or pass plain data",
        ) from error


def _actor(ray: Any, device: Device, node: str | None) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from .ray_attendant import RayServiceActor

    made = ray.remote(concurrency_groups={"commands": 1, "news": 1})(RayServiceActor)
    placed = made.options(
        num_cpus=1 if device.kind == "cpu" else 0,
        num_gpus=0 if device.kind == "cpu" else device.share,
        # Without a host in the request, Ray spreads the services over the nodes.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False) if node else "SPREAD",
    )
    return placed.remote(list(sys.path), os.getcwd())


def brief(error: BaseException) -> str:
    """Return the type, the first and the last line of a Ray error, which contain what failed and why."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([type(error).__name__ + ":", *lines[:1], *lines[-1:]]))
