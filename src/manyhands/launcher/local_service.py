"""A service on this machine: a process forked from the zygote, called over its inherited control channel."""

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
from .processes import Hearer, LocalProcesses, Process, turn
from .rank import Assignment, core_share, failure_of
from .rendezvous import RendezvousInfo
from .service import Attendant, Make, Service
from .zygote import ZygoteHandle


class LocalService(Service, Hearer):
    """A service whose process and answers are handled by a thread; arguments are passed in shared memory."""

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
        parcel = pack(_assignment(make, device, timeout), "the service")
        try:
            self._selector = selectors.DefaultSelector()
            self._crew = LocalProcesses(zygote, parcel, self, self._selector)
        finally:
            os.close(parcel)
        self._crew.start(0, RendezvousInfo(generation=0, rank=0, size=1, port=0))
        threading.Thread(target=self._watch, name="manyhands-service", daemon=True).start()

    def _send(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parcel = pack((method, args, kwargs), f"the call of {method}")
        try:
            with self._sending:
                self._crew.call(0, number, parcel)
        finally:
            os.close(parcel)

    def _ask_to_end(self) -> None:
        with self._sending:
            self._crew.tell(0, {"stop": True})

    def _end_now(self) -> None:
        self._crew.kill()

    # -- on the monitoring thread ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._crew.is_over:
                turn(self._selector, 0.5)
                self._crew.look()
        except Exception as error:
            failure = WorkerFailed(0, self.host, f"{type(error).__name__}: {error}")
        with self._sending:
            self._crew.finish()
            self._selector.close()
        self._over(self._failed or failure)

    def heard_event(self, slot: int, entry: Event) -> None:
        self._on_event(0, entry)

    def heard_output(self, slot: int, text: str, stream: str) -> None:
        self._on_output(0, text, stream)

    def heard_answer(self, slot: int, told: dict[str, Any], outcome: Any) -> None:
        self._answered(told["number"], told["good"], outcome)

    def heard_lost_world(self, slot: int, told: dict[str, Any]) -> None:
        """Do nothing: a service has no peers."""

    def heard_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._failed = failure["error"] or WorkerFailed(0, self.host, failure["reason"], failure["traceback"])

    def heard_end(self, slot: int, process: Process) -> None:
        if self._failed is None and not (process.done and process.exit_code == 0):
            self._failed = WorkerFailed(0, self.host, f"the service {process.end}")


@dataclasses.dataclass(frozen=True)
class _Attending:
    """The function of the forked process: creates the object and answers calls until it is asked to end."""

    make: Make

    def __call__(self, world: World) -> None:
        channel = world.channel
        assert isinstance(channel, SocketChannel)
        attendant = Attendant(self.make(world))
        while (call := channel.calls.get()) is not None:
            number, parcel = call
            _answer(channel, number, *attendant.answer(*_opened(parcel)))
        attendant.close()


def _opened(parcel: int) -> Any:
    try:
        return unpack(parcel)
    finally:
        os.close(parcel)


def _answer(channel: SocketChannel, number: int, good: bool, outcome: Any) -> None:
    try:
        parcel = pack(outcome, "the answer")
    except Exception as error:
        good, parcel = False, pack(failure_of(error))
    with contextlib.closing(os.fdopen(parcel, "rb")):
        channel.send(ANSWER, json.dumps({"number": number, "good": good}).encode(), (parcel,))


def _assignment(make: Make, device: Device, timeout: float) -> Assignment:
    """Return the assignment of one process; on a virtual CPU device it gets only that device's cores."""
    whole = Assignment.here(_Attending(make), [device], timeout, False)
    cores = core_share(whole.cores, device.slot, round(1 / device.share)) if device.kind == "cpu" else whole.cores
    return dataclasses.replace(whole, cores=cores)
