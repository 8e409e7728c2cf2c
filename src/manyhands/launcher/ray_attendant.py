"""The actor of a service in a Ray cluster: holds the object, answers calls, and queues events and output."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import ray

from ..core import Event
from ..distributed import ControlChannel, Device, NullWorld, RankInfo
from .rank import failure_of
from .ray_host import Mailbox, News, facts_here, settle_here
from .service import ServiceRunner


class RayServiceActor:
    """Holds a service's object and runs calls in order; concurrently, it answers requests to end and for events."""

    def __init__(self, path: Sequence[str], folder: str) -> None:
        settle_here(path, folder)
        self._mail = Mailbox()
        self._channel = _MailboxChannel(lambda entry: self._mail.put(("event", 0, entry)))
        for stream in ("stdout", "stderr"):
            setattr(sys, stream, _Lines(stream, lambda text, stream: self._mail.put(("output", 0, (text, stream)))))
        self._runner = ServiceRunner(None)
        self._failure: dict[str, Any] | None = None

    @ray.method(concurrency_group="commands")
    def facts(self) -> dict[str, Any]:
        """Return this process's host, address, pid and versions."""
        return facts_here()

    def begin(self, make: bytes, device: Device, timeout: float) -> dict[str, Any] | None:
        """Create the object by the pickled `make`; return the failure as a dict if that raises, else None."""
        try:
            address = facts_here()["address"]
            rank_info = RankInfo(device=device, host=device.host, address=address, timeout=timeout)
            world = NullWorld(channel=self._channel, rank_info=rank_info)
            self._runner = ServiceRunner(cloudpickle.loads(make)(world))
        except Exception as error:
            self._failure = failure_of(error)
        return self._failure

    def call(self, asked: bytes) -> bytes:
        """Run a pickled call; return whether it succeeded, and its result or failure, as a pickle."""
        outcome = self._runner.answer(*cloudpickle.loads(asked)) if self._failure is None else (False, self._failure)
        try:
            return bytes(cloudpickle.dumps(outcome))
        except Exception as error:
            return bytes(cloudpickle.dumps((False, failure_of(error))))

    @ray.method(concurrency_group="commands")
    def end(self) -> None:
        """Ask the running computation to stop, through the control channel."""
        self._channel.handle_message({"stop": True})

    def close(self) -> dict[str, Any] | None:
        """Close the object after the last call; return the failure as a dict if that raises, else None."""
        try:
            self._runner.close()
        except Exception as error:
            return failure_of(error)
        return None

    @ray.method(concurrency_group="news")
    def news(self, seconds: float) -> list[News]:
        """Return events and output since the last call; wait up to `seconds` if there are none."""
        return self._mail.take(seconds)


class _MailboxChannel(ControlChannel):
    """A control channel that puts events into the mailbox."""

    def __init__(self, put: Callable[[Event], None]) -> None:
        super().__init__()
        self._put = put

    def send_up(self, entry: Event) -> None:
        self._put(entry)


class _Lines(io.TextIOBase):
    """A text stream that forwards what is printed, line by line."""

    def __init__(self, stream: str, put: Callable[[str, str], None]) -> None:
        self._stream, self._put, self._rest = stream, put, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._put(line, self._stream)
        return len(text)

    def fileno(self) -> int:
        return 1 if self._stream == "stdout" else 2
