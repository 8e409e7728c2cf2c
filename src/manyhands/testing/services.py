"""Contract tests for services of engines (objects in their own process), and reserved ports for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..core import DeviceError, SendError, SettingsError, WorkerFailed, event
from ..distributed import Device, World
from ..launcher import Engine, Service


class Counter:
    """Object for tests of services, with methods that keep state, report events, raise errors and block."""

    def __init__(self, world: World, farewell: str = "") -> None:
        self.world, self.farewell, self.total = world, farewell, 0.0

    def add(self, tensor: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Add the sum of a tensor, `times` times, to a total that is kept between calls; return it as a tensor."""
        self.total += float(tensor.sum()) * times
        return torch.full((3,), self.total)

    def process(self) -> int:
        """Return the ID of the service's process."""
        return os.getpid()

    def say(self, text: str) -> None:
        """Report an event with a text, and print the text."""
        self.world.channel.report(event("said", text=text))
        print(text)

    def fail(self, error: Exception) -> None:
        """Raise the given error."""
        raise error

    def give_lock(self) -> Any:
        """Return an object that cannot be pickled, and so cannot be sent to the caller."""
        return threading.Lock()

    def wait_for_the_end(self) -> str:
        """Run until the service is asked to stop."""
        while not self.world.channel.stopping:
            time.sleep(0.01)
        return "asked to end"

    def sleep(self) -> None:
        """Block for ten minutes, without reacting to a request to stop."""
        time.sleep(600)

    def close(self) -> None:
        """Write the file `farewell`, if a path was given, when the service closes the object."""
        if self.farewell:
            Path(self.farewell).write_text("closed")


@contextlib.contextmanager
def raises(kinds: type[Exception] | tuple[type[Exception], ...], match: str) -> Iterator[None]:
    """Context that raises AssertionError unless its block raises one of these exceptions with a matching message."""
    try:
        yield
    except kinds as error:
        if not re.search(match, str(error)):
            raise AssertionError(f"{match!r} is not in {error}") from error
        return
    raise AssertionError(f"nothing was raised, but an error that matches {match!r} was expected")


class ServiceContract:
    """Contract tests of the services of an engine. Subclass it in a test module, and implement `place`."""

    seconds = 60.0
    """Timeout in seconds for the answer of a call."""

    def place(self) -> tuple[Engine, Device]:
        """Return the engine under test, and one of its devices."""
        raise NotImplementedError

    def start(self, make: Any = Counter, **options: Any) -> contextlib.AbstractContextManager[Service]:
        engine, device = self.place()
        return engine.start_service(make, device, timeout=60, **options)

    def test_an_object_keeps_its_state_and_answers_in_order(self) -> None:
        with self.start() as service:
            answers = [service.call("add", torch.ones(2), times=times) for times in (1, 2, 3)]
            assert [answer.result(self.seconds).tolist() for answer in answers] == [[2.0] * 3, [6.0] * 3, [12.0] * 3]
            assert service.call("process").result(self.seconds) != os.getpid()
            assert service.is_alive
        assert not service.is_alive
        assert service.failure is None
        with raises(WorkerFailed, "the service has ended"):
            service.call("process").result(self.seconds)

    def test_what_a_method_raises_fails_its_call_alone(self) -> None:
        with self.start() as service:
            ours = service.call("fail", DeviceError("a rule", got=1, remedy="a remedy"))
            theirs = service.call("fail", KeyError("the reason"))
            for call, match in ((service.call("nothing"), "must exist in Counter, but got nothing"),
                                (service.call("give_lock"), "must be picklable|pickle")):  # fmt: skip
                with raises((SettingsError, SendError, WorkerFailed), match):
                    call.result(self.seconds)
            with raises(DeviceError, "a rule, but got 1. A remedy"):
                ours.result(self.seconds)
            with raises(WorkerFailed, "the reason"):
                theirs.result(self.seconds)
            assert "raise error" in getattr(theirs.exception(), "traceback", "")
            with raises(SettingsError, "must be public, but got _secret"):
                service.call("_secret")
            with raises(SendError, "must be picklable"):
                service.call("add", threading.Lock())
            assert service.call("add", torch.ones(1)).result(self.seconds).tolist() == [1.0] * 3

    def test_events_and_lines_are_heard(self) -> None:
        heard: list[Any] = []
        with self.start(on_event=lambda rank, entry: heard.append(entry["text"]),
                        on_output=lambda rank, text, stream: heard.append((text, stream))) as service:  # fmt: skip
            service.call("say", "hello").result(self.seconds)
        assert sorted(map(str, heard)) == ["('hello', 'stdout')", "hello"]

    def test_one_that_dies_says_why_and_fails_whoever_waits(self) -> None:
        with self.start() as service:
            pid = service.call("process").result(self.seconds)
            waiting = [service.call("sleep"), service.call("process")]
            os.kill(pid, signal.SIGKILL)
            for call in waiting:
                with raises(WorkerFailed, "the service (was killed by signal 9|has failed)"):
                    call.result(self.seconds)
            assert isinstance(service.ended.exception(self.seconds), WorkerFailed)
            assert service.failure is not None
            assert not service.is_alive

    def test_one_that_cannot_begin_says_why(self) -> None:
        def refuse(world: World) -> Any:
            raise ValueError("no such file")

        with self.start(refuse) as service:
            with raises(WorkerFailed, "no such file"):
                service.call("process").result(self.seconds)
            assert "no such file" in str(service.ended.exception(self.seconds))

    def test_it_ends_gracefully_or_by_force(self, tmp_path: Path) -> None:
        note = tmp_path / "note"
        with self.start(lambda world: Counter(world, str(note))) as service:
            last = service.call("wait_for_the_end")
            service.call("process")
            service.stop(self.seconds)
            assert last.result(self.seconds) == "asked to end"
            assert note.read_text() == "closed"
            assert service.failure is None
        with self.start() as service:
            service.call("process").result(self.seconds)
            deaf = service.call("sleep")
            service.stop(0.2)
            assert not service.is_alive
            with raises(WorkerFailed, "the service"):
                deaf.result(self.seconds)


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Context that reserves free loopback ports, for processes that a test starts in its block.

    The ports stay bound, so that the system does not give them to other processes. Listeners with SO_REUSEADDR, which
    all listeners of manyhands set, can still use them.

    >>> with held_ports(2) as ports:
    ...     len(set(ports))
    2
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in held]
