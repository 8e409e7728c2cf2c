"""The actor on a host of a Ray cluster: runs the ranks, monitors them in a thread, and queues their reports."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import cloudpickle
import ray
import torch

from ..core import Event
from ..distributed import Device, address_towards, interface_of, listen, serve_store, this_host
from .pickles import pack
from .processes import Hearer, LocalProcesses, Process, turn
from .rank import Assignment
from .rendezvous import RendezvousInfo
from .zygote import ZygoteHandle

News = tuple[str, int, Any]
"""A report of a rank: its kind, the slot of the rank, and its content."""


class Mailbox:
    """A queue of reports since the last time they were fetched."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._heard = threading.Condition()

    def put(self, one: News) -> None:
        """Add a report."""
        with self._heard:
            self._news.append(one)
            self._heard.notify_all()

    def take(self, seconds: float) -> list[News]:
        """Return all queued reports; wait up to `seconds` if there are none."""
        with self._heard:
            self._heard.wait_for(lambda: bool(self._news), seconds)
            found = list(self._news)
            self._news.clear()
        return found


class RayHost(Hearer):
    """The ranks of one host. Commands run in order, concurrently with the call that waits for reports."""

    def __init__(self, path: Sequence[str], folder: str, preload: Sequence[str]) -> None:
        settle_here(path, folder)
        # Ranks are forked from the zygote, so it is started before their function is known.
        self._zygote = ZygoteHandle(preload)
        self._mail = Mailbox()
        self._commands: deque[Callable[[], None]] = deque()
        self._awake, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ, lambda: self._awake.recv(4096))
        self._crew: LocalProcesses | None = None
        self._thread = threading.Thread(target=self._watch, name="crew", daemon=True)
        self._is_over = False
        self._store: object = None

    def facts(self) -> dict[str, Any]:
        """Return this process's host, address, pid and versions."""
        return facts_here()

    @ray.method(concurrency_group="commands")
    def prepare(self, work: bytes, devices: Sequence[Device], timeout: float, recovers: bool) -> None:
        """Receive the pickled function of the ranks, and start the monitoring thread."""
        parcel = pack(Assignment.here(cloudpickle.loads(work), devices, timeout, recovers))
        try:
            self._crew = LocalProcesses(self._zygote, parcel, self, self._selector)
        finally:
            os.close(parcel)
        self._thread.start()

    def meet(self, address: str) -> int:
        """Start a store on an address of this host; return its port."""
        listener = listen(address)
        port = int(listener.getsockname()[1])
        self._store = serve_store(listener)
        return port

    @ray.method(concurrency_group="commands")
    def do(self, what: str, *values: Any) -> None:
        """Queue a command that starts, messages or kills a rank."""
        self._commands.append(lambda: self._act(what, *values))
        self._wake.send(b".")

    @ray.method(concurrency_group="news")
    def news(self, seconds: float) -> list[News]:
        """Return the reports since the last call; wait up to `seconds` if there are none."""
        return self._mail.take(seconds)

    def finish(self) -> None:
        """Kill all ranks and release every resource."""
        self._is_over = True
        self._wake.send(b".")
        if self._crew is not None:
            self._thread.join()
            self._crew.finish()
        self._zygote.close()
        self._store = None

    def _watch(self) -> None:
        assert self._crew is not None
        while not self._is_over:
            turn(self._selector, 0.5)
            while self._commands:
                self._commands.popleft()()
            self._crew.look()

    def _act(self, what: str, *values: Any) -> None:
        assert self._crew is not None
        if what == "start":
            slot, summons = values
            self._crew.start(slot, RendezvousInfo(**_through(summons)))
        elif what == "tell":
            slot, message = values
            if "summons" in message:
                message = {**message, "summons": _through(message["summons"])}
            self._crew.tell(slot, message)
        else:
            self._crew.kill(*values)

    def _tell(self, kind: str, slot: int, rest: Any) -> None:
        self._mail.put((kind, slot, rest))

    def heard_event(self, slot: int, entry: Event) -> None:
        self._tell("event", slot, entry)

    def heard_output(self, slot: int, text: str, stream: str) -> None:
        self._tell("output", slot, (text, stream))

    def heard_lost_world(self, slot: int, told: dict[str, Any]) -> None:
        self._tell("lost_world", slot, told)

    def heard_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._tell("failure", slot, failure)

    def heard_end(self, slot: int, process: Process) -> None:
        done = process.done and process.exit_code == 0
        self._tell("end", slot, (done, process.end, process.result))


def settle_here(path: Sequence[str], folder: str) -> None:
    """Add the caller's import paths that exist on this host, and change to the caller's folder."""
    sys.path[:] = [*sys.path, *(entry for entry in path if entry not in sys.path and os.path.exists(entry))]
    with contextlib.suppress(OSError):
        os.chdir(folder)


def facts_here() -> dict[str, Any]:
    """Return the host, address, pid and versions of a process in the cluster."""
    return {
        "host": this_host(),
        "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        "process": os.getpid(),
        "manyhands": version("manyhands"),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def _through(summons: dict[str, Any]) -> dict[str, Any]:
    """Return rendezvous info with this host's interface towards the rendezvous address."""
    return {**summons, "interface": interface_of(address_towards(summons["address"]))}
