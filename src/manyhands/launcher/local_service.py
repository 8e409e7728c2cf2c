"""A service on this machine: a process forked from the zygote, whose methods are called over its control channel."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import threading
from typing import Any

from ..core import Event, WorkerFailed
from ..distributed import ANSWER, Device, SocketChannel, World
from .engine import OnEvent, OnOutput
from .pickles import pack, unpack
from .processes import LocalProcesses, Process, ProcessListener, turn
from .rank import Assignment, core_share, failure_of
from .rendezvous import RendezvousInfo
from .service import Make, Service, ServiceRunner
from .zygote import ZygoteHandle


class LocalService(Service, ProcessListener):
    """A service in a local process that a thread monitors; arguments and results are passed in shared memory."""

    def __init__(
        self,
        make: Make,
        device: Device,
        zygote: ZygoteHandle,
        *,
        on_event: OnEvent,
        on_output: OnOutput,
        timeout: float,
    ) -> None:
        super().__init__(device)
        self._on_event, self._on_output = on_event, on_output
        self._sending = threading.Lock()
        self._process: Process | None = None
        self._failed: WorkerFailed | None = None
        pickle_fd = pack(_assignment(make, device, timeout), "the service")
        try:
            self._selector = selectors.DefaultSelector()
            self._processes = LocalProcesses(zygote, pickle_fd, self, self._selector)
        finally:
            os.close(pickle_fd)
        self._processes.start(0, RendezvousInfo(generation=0, rank=0, size=1, port=0))
        threading.Thread(target=self._watch, name="manyhands-service", daemon=True).start()

    def _send(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pickle_fd = pack((method, args, kwargs), f"the call of {method}")
        try:
            with self._sending:
                self._processes.call(0, number, pickle_fd)
        finally:
            os.close(pickle_fd)

    def _ask_to_end(self) -> None:
        with self._sending:
            self._processes.send_message(0, {"stop": True})

    def _end_now(self) -> None:
        self._processes.kill()

    # -- on the monitoring thread ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._processes.is_over:
                turn(self._selector, 0.5)
                self._processes.look()
        except Exception as error:
            failure = WorkerFailed(0, self.host, f"{type(error).__name__}: {error}")
        with self._sending:
            self._processes.finish()
            self._selector.close()
        self._over(self._failed or failure)

    def handle_event(self, slot: int, entry: Event) -> None:
        self._on_event(0, entry)

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        self._on_output(0, text, stream)

    def handle_answer(self, slot: int, answer: dict[str, Any], outcome: Any) -> None:
        self._answered(answer["number"], answer["good"], outcome)

    def handle_lost_world(self, slot: int, answer: dict[str, Any]) -> None:
        """Do nothing: a service has no peers."""

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._failed = failure["error"] or WorkerFailed(0, self.host, failure["reason"], failure["traceback"])

    def handle_exit(self, slot: int, process: Process) -> None:
        if self._failed is None and not (process.done and process.exit_code == 0):
            self._failed = WorkerFailed(0, self.host, f"the service {process.end}")


@dataclasses.dataclass(frozen=True)
class _RunService:
    """The function of the forked process: creates the object and answers calls until it is asked to end."""

    make: Make

    def __call__(self, world: World) -> None:
        channel = world.channel
        assert isinstance(channel, SocketChannel)
        runner = ServiceRunner(self.make(world))
        while (call := channel.calls.get()) is not None:
            number, pickle_fd = call
            _answer(channel, number, *runner.answer(*_opened(pickle_fd)))
        runner.close()


def _opened(pickle_fd: int) -> Any:
    try:
        return unpack(pickle_fd)
    finally:
        os.close(pickle_fd)


def _answer(channel: SocketChannel, number: int, good: bool, outcome: Any) -> None:
    try:
        pickle_fd = pack(outcome, "the answer")
    except Exception as error:
        good, pickle_fd = False, pack(failure_of(error))
    with contextlib.closing(os.fdopen(pickle_fd, "rb")):
        channel.send(ANSWER, json.dumps({"number": number, "good": good}).encode(), (pickle_fd,))


def _assignment(make: Make, device: Device, timeout: float) -> Assignment:
    """Return the assignment of a service's process; on a virtual CPU device it gets only that device's cores."""
    whole = Assignment.here(_RunService(make), [device], timeout, False)
    cores = core_share(whole.cores, device.slot, round(1 / device.share)) if device.kind == "cpu" else whole.cores
    return dataclasses.replace(whole, cores=cores)
