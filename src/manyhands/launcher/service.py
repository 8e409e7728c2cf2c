"""Services: an object in its own process on a device, whose methods are called by message."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from ..core import SettingsError, WorkerFailed
from ..distributed import Device, World, this_host
from .rank import failure_of

Make = Callable[[World], Any]
"""Class or function that creates a service's object in its process, from the world of that single rank."""
STOP_SECONDS = 5.0


class Service(ABC):
    """An object in a process of its own, whose methods are called by message, one at a time.

    A method that raises fails only its own call. When the process ends, every unanswered call fails with the reason.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.host = device, device.host or this_host()
        self.ended: Future[None] = Future()
        """Done when the process has exited: with the failure that ended it, or without one if it was asked to end."""
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        self._booking = threading.Lock()
        self._is_requested = False

    @property
    def is_alive(self) -> bool:
        """Return whether the service's process has not ended; it may still be starting."""
        return not self.ended.done()

    @property
    def failure(self) -> BaseException | None:
        """Return the failure that ended the service, or None if it runs or was asked to end."""
        return self.ended.exception() if self.ended.done() else None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a public method of the object and return a future of its result.

        Calls that are made before the object is created wait for it.
        """
        if method.startswith("_"):
            raise SettingsError(
                "methods of a service must be public", got=method, remedy="call a method without a leading underscore"
            )
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it
        with self._booking:
            self._num_calls += 1
            number = self._num_calls
            if self.ended.done():
                answer.set_exception(self._ended_error("has ended"))
                return answer
            self._calls[number] = answer
        try:
            self._send(number, method, args, kwargs)
        except BaseException:
            self._calls.pop(number, None)
            raise
        return answer

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Let the service answer pending calls and close its object; kill it if that takes more than `seconds`."""
        self._is_requested = True
        self._ask_to_end()
        try:
            self.ended.exception(seconds)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """Kill the process, and wait until it has exited."""
        self._is_requested = True
        self._end_now()
        self.ended.exception()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _send(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send a call to the process."""

    @abstractmethod
    def _ask_to_end(self) -> None:
        """Notify the process that there will be no more calls."""

    @abstractmethod
    def _end_now(self) -> None:
        """Kill the process without waiting for it."""

    def _answered(self, number: int, good: bool, outcome: Any) -> None:
        answer = self._calls.pop(number, None)
        if answer is None:
            return
        if good:
            answer.set_result(outcome)
        else:
            failed = WorkerFailed(0, self.host, outcome["reason"], outcome["traceback"])
            answer.set_exception(outcome["error"] or failed)

    def _over(self, failure: BaseException | None) -> None:
        """Record that the process has exited, and fail all unanswered calls."""
        with self._booking:
            self.ended.set_exception(failure) if failure and not self._is_requested else self.ended.set_result(None)
        while self._calls:
            _, answer = self._calls.popitem()
            answer.set_exception(failure or self._ended_error("was stopped before it answered"))

    def _ended_error(self, what: str) -> WorkerFailed:
        failure = self.failure
        return failure if isinstance(failure, WorkerFailed) else WorkerFailed(0, self.host, f"the service {what}")


class ServiceRunner:
    """Holds the object of a service in the service's process, and runs the calls that arrive by message."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def answer(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Call a method of the object; return whether it succeeded, and its result or its failure as a dict."""
        try:
            act = getattr(self._made, method, None)
            if not callable(act):
                raise SettingsError(
                    f"the called method must exist in {type(self._made).__name__}",
                    got=method,
                    remedy="call one of its methods",
                )
            return True, act(*args, **kwargs)
        except Exception as error:
            return False, failure_of(error)

    def close(self) -> None:
        """Call the object's `close` if it has one."""
        close = getattr(self._made, "close", None)
        if callable(close):
            close()
