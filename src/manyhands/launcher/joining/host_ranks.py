"""The ranks of a host that joins others: they outlive the coordinator, and the role of the host in the job."""

from __future__ import annotations

import selectors
from typing import Any

from ...core import Event
from ..processes import LocalProcesses, Process, ProcessListener
from ..rendezvous import RendezvousInfo
from ..zygote import ZygoteHandle


class Unheard(ProcessListener):
    """Ignores reports of ranks while there is no coordinator: the next one calls all ranks to a new rendezvous."""

    def handle_event(self, slot: int, entry: Event) -> None:
        """Ignore an event."""

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        """Ignore a line."""

    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        """Ignore that a rank waits for a rendezvous."""

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        """Ignore an exception; the exit of the process follows."""

    def handle_exit(self, slot: int, process: Process) -> None:
        """Ignore an exit; the next coordinator starts a rank where none is running."""


class HostRanks(LocalProcesses, ProcessListener):
    """The ranks of this host, whose reports go to the current role of the host: agent or coordinator."""

    def __init__(self, zygote: ZygoteHandle, pickle_fd: int, selector: selectors.BaseSelector | None = None) -> None:
        self.selector = selector or selectors.DefaultSelector()
        self._is_finished = False
        super().__init__(zygote, pickle_fd, self, self.selector)
        self.role: ProcessListener = Unheard()
        self.running: set[int] = set()
        self.results: dict[int, Any] = {}
        self.generation = -1
        """The last generation to which a rank of this host was called."""

    def start(self, slot: int, info: RendezvousInfo) -> None:
        self.generation = max(self.generation, info.generation)
        self.running.add(slot)
        super().start(slot, info)

    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        if "rendezvous" in message:
            self.generation = max(self.generation, int(message["rendezvous"]["generation"]))
        super().send_message(slot, message)

    def interrupt(self, why: str) -> None:
        """Make the ranks leave their collectives, keep their state, and wait for a rendezvous."""
        for slot in list(self.running):
            self.send_message(slot, {"lost": why, "generation": self.generation})

    def handle_event(self, slot: int, entry: Event) -> None:
        self.role.handle_event(slot, entry)

    def handle_output(self, slot: int, text: str, stream: str) -> None:
        self.role.handle_output(slot, text, stream)

    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        self.role.handle_lost_world(slot, report)

    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        self.role.handle_failure(slot, failure)

    def handle_exit(self, slot: int, process: Process) -> None:
        self.running.discard(slot)
        if process.done and process.exit_code == 0:
            self.results[slot] = process.result
        self.role.handle_exit(slot, process)

    def finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            super().finish()

    def close(self) -> None:
        """Kill the ranks, and release what belongs to them."""
        self.finish()
        self.selector.close()
