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
from .processes import LocalProcesses, Process, ProcessListener, turn
from .rank import Assignment
from .rendezvous import RendezvousInfo
from .zygote import ZygoteHandle

News = tuple[str, int, Any]
"""A report of a rank: its kind, the slot of the rank, and its content."""


class Mailbox:
    """A thread-safe queue of the reports since they were last fetched."""

    def __init__(self) -> None:
        self._messages: deque[News] = deque()
        self._changed = threading.Condition()

    def put(self, one: News) -> None:
        """Add a report."""
        with self._changed:
            self._messages.append(one)
            self._changed.notify_all()

    def take(self, seconds: float) -> list[News]:
        """Return all queued reports; wait up to `seconds` if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages), seconds)
            found = list(self._messages)
            self._messages.clear()
        return found


class RayHost(ProcessListener):
    """Actor that runs the ranks of one host; commands run in order, concurrently with the call that fetches reports."""

    def __init__(self, path: Sequence[str], folder: str, preload: Sequence[str]) -> None:
        settle_here(path, folder)
        # Ranks are forked from the zygote, so it is started before their function is known.
        self._zygote = ZygoteHandle(preload)
        self._mail = Mailbox()
        self._commands: deque[Callable[[], None]] = deque()
        self._awake, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ, lambda: self._awake.recv(4096))
        self._processes: LocalProcesses | None = None
        self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)
        self._is_over = False
        self._store: object = None

    def facts(self) -> dict[str, Any]:
        """Return this process's host, address, pid and versions."""
        return facts_here()

    @ray.method(concurrency_group="commands")
    def prepare(self, work: bytes, devices: Sequence[Device], timeout: float, recovers: bool) -> None:
        """Receive the pickled function of the ranks, and start the monitoring thread."""
        pickle_fd = pack(Assignment.here(cloudpickle.loads(work), devices, timeout, recovers))
        try:
            self._processes = LocalProcesses(self._zygote, pickle_fd, self, self._selector)
        finally:
            os.close(pickle_fd)
        self._thread.start()

    def meet(self, address: str) -> int:
        """Start the store for the rendezvous on an address of this host; return its port."""
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
        if self._processes is not None:
            self._thread.join()
            self._processes.finish()
        self._zygote.close()
        self._store = None

    def _watch(self) -> None:
        assert self._processes is not None
        while not self._is_over:
            turn(self._selector, 0.5)
            while self._commands:
                self._commands.popleft()()
            self._processes.look()

    def _act(self, what: str, *values: Any) -> None:
        assert self._processes is not None
        if what == "start":
            slot, info = values
            self._processes.start(slot, RendezvousInfo(**_through(info)))
        elif what == "tell":
            slot, message = values
            if "rendezvous" in message:
                message = {**message, "rendezvous": _through(message["rendezvous"])}
            self._processes.send_message(slot, message)
        else:
            self._processes.kill(*values)

    def _put_report(self, kind: str, slot: int, rest: Any) -> None:
        self._mail.put((kind, slot, rest))

    def handle_event(self, slot: int, entry: Event) -> None:
        self._put_report("event", slot, entry)

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        self._put_report("output", slot, (text, stream))

    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        self._put_report("lost_world", slot, report)

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self._put_report("failure", slot, failure)

    def handle_exit(self, slot: int, process: Process) -> None:
        done = process.done and process.exit_code == 0
        self._put_report("end", slot, (done, process.end, process.result))


def settle_here(path: Sequence[str], folder: str) -> None:
    """Add the caller's import paths that exist on this host, and change to the caller's folder."""
    sys.path[:] = [*sys.path, *(entry for entry in path if entry not in sys.path and os.path.exists(entry))]
    with contextlib.suppress(OSError):
        os.chdir(folder)


def facts_here() -> dict[str, Any]:
    """Return the host, address, pid and versions of the Ray process that calls this function."""
    return {
        "host": this_host(),
        "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        "process": os.getpid(),
        "manyhands": version("manyhands"),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def _through(info: dict[str, Any]) -> dict[str, Any]:
    """Return rendezvous info with the network interface by which this host reaches the rendezvous address."""
    return {**info, "interface": interface_of(address_towards(info["address"]))}
