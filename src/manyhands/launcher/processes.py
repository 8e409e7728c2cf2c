"""The crew: the ranks' processes on this host, forked from the zygote, heard through one selector."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import Event, RunError
from ..distributed import ANSWER, CALL, CONTROL, EVENT, RESULT, FrameReader, frame, send_frame
from .pickles import unpack
from .rendezvous import RendezvousInfo
from .zygote import MAX_REQUEST
from .zygote_handle import ZygoteHandle

MAX_LINE = 65536
"""Bytes of a line that a rank may print before it is passed on in pieces."""
ENDING_SECONDS = 5.0
FROZEN_SECONDS = 2.0
"""How long a rank may be stopped before it is ended; with the looks in between, it is out within five seconds."""
LOOK_SECONDS = 0.5


class Hearer(ABC):
    """Who hears of a crew, by the slots of its ranks."""

    @abstractmethod
    def heard_event(self, slot: int, entry: Event) -> None:
        """A rank reported something."""

    @abstractmethod
    def heard_output(self, slot: int, text: str, stream: str) -> None:
        """A rank printed a line."""

    @abstractmethod
    def heard_lost_world(self, slot: int, told: dict[str, Any]) -> None:
        """A rank has lost the others, and waits to be called together again."""

    @abstractmethod
    def heard_failure(self, slot: int, failure: dict[str, Any]) -> None:
        """A rank raised, and is about to end."""

    @abstractmethod
    def heard_end(self, slot: int, process: Process) -> None:
        """A rank's process has ended."""

    def heard_answer(self, slot: int, told: dict[str, Any], outcome: Any) -> None:
        """A service has answered a call; ranks are not called."""
        raise RunError(f"rank {slot} answered what nobody asked")


class Process:
    """One process of a rank: its line, its output, what became of it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.line, self.their_line = socket.socketpair()
        self.fate, self.their_fate = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.out, self.their_out = os.pipe()
        self.err, self.their_err = os.pipe()
        self.pid = 0
        self.must_end = False
        """Whether it is killed as soon as it is there."""
        self.exit_code: int | None = None
        self.heard_at = 0.0
        self.frozen_since: float | None = None
        self.was_frozen = False
        self.parcels: list[int] = []
        self.result: Any = None
        self.done = False
        self.failure: dict[str, Any] | None = None
        self.frames = FrameReader()
        self.text = {self.out: b"", self.err: b""}
        self.open: set[int] = {self.line.fileno(), self.fate.fileno(), self.out, self.err}

    def theirs(self) -> list[int]:
        """Its ends of the line, of its output, and where its end is told."""
        return [self.their_line.fileno(), self.their_out, self.their_err, self.their_fate.fileno()]

    def close_theirs(self) -> None:
        self.their_line.close()
        self.their_fate.close()
        os.close(self.their_out)
        os.close(self.their_err)

    def close(self, fd: int) -> None:
        """There is no more to hear at one of our ends."""
        self.open.discard(fd)
        for sock in (self.line, self.fate):
            if sock.fileno() == fd:
                sock.close()
                return
        os.close(fd)

    def close_ours(self) -> None:
        """There is no more to hear at all."""
        for fd in list(self.open):
            self.close(fd)
        for parcel in self.parcels:
            os.close(parcel)

    @property
    def over(self) -> bool:
        """Whether it has ended and said all; a process that it left behind may keep its pipes open."""
        return self.exit_code is not None and (not self.open or time.monotonic() > self.heard_at + 1.0)

    @property
    def end(self) -> str:
        """What became of it, in words."""
        if self.failure is not None:
            return f"raised {self.failure['reason']}"
        if self.was_frozen:
            return f"was frozen for {FROZEN_SECONDS:g} seconds and was ended"
        code = self.exit_code or 0
        if code < 0:
            hint = "; often the system ran out of memory" if -code == signal.SIGKILL else ""
            return f"was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
        return f"ended with exit code {code} before it was done"


class LocalProcesses:
    """Processes of ranks, at most one alive per slot."""

    def __init__(self, zygote: ZygoteHandle, parcel: int, hearer: Hearer, selector: selectors.BaseSelector) -> None:
        self._zygote, self._hearer, self._selector = zygote, hearer, selector
        self._parcel = os.dup(parcel)
        self._processes: list[Process] = []
        self._looked_at = 0.0

    def start(self, slot: int, summons: RendezvousInfo) -> None:
        """Forks a rank that meets the others where the summons says."""
        process = Process(slot)
        self._processes.append(process)
        line, out, err, fate = process.theirs()
        self._zygote.fork(slot, summons.to_dict(), [line, self._parcel, out, err, fate])
        process.close_theirs()
        self._listen(process.fate.fileno(), lambda: self._hear_fate(process))
        self._listen(process.line.fileno(), lambda: self._hear_line(process))
        for fd in (process.out, process.err):
            self._listen(fd, lambda fd=fd: self._hear_output(process, fd))  # type: ignore[misc]

    def tell(self, slot: int, message: dict[str, Any]) -> None:
        """Sends a message to the rank that is alive there."""
        for process in self._alive(slot):
            with contextlib.suppress(OSError):
                process.line.sendall(frame(message))

    def call(self, slot: int, number: int, parcel: int) -> None:
        """Sends a call to the service that is alive there."""
        for process in self._alive(slot):
            with contextlib.suppress(OSError):
                send_frame(process.line, CALL, json.dumps({"number": number}).encode(), [parcel])

    def kill(self, slot: int | None = None) -> None:
        """Ends the rank of a slot at once, or every one."""
        for process in self._alive(slot):
            process.must_end = True
            if process.pid:
                self._zygote.kill(process.pid)

    @property
    def is_over(self) -> bool:
        """Whether every process has ended and said all."""
        return all(process.over for process in self._processes)

    def look(self) -> None:
        """Ends ranks that somebody has stopped: the others would wait for them for ever."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for process in self._alive():
            if not process.pid or not _is_stopped(process.pid):
                process.frozen_since = None
            elif process.frozen_since is None:
                process.frozen_since = now
            elif now - process.frozen_since >= FROZEN_SECONDS:
                process.was_frozen = True
                self._zygote.kill(process.pid)

    def finish(self) -> None:
        """Leaves no process, pipe or port behind, however the wait ended."""
        self.kill()
        try:
            for process in self._processes:
                process.fate.settimeout(ENDING_SECONDS)
                while process.exit_code is None:
                    self._hear_fate(process, last=True)
                    self.kill()
        except (RunError, OSError):
            # The zygote does not answer; its ranks end with it.
            self._zygote.kill_all()
        for process in self._processes:
            process.close_ours()
        os.close(self._parcel)

    def _alive(self, slot: int | None = None) -> list[Process]:
        return [p for p in self._processes if p.exit_code is None and slot in (None, p.slot)]

    def _listen(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _hear_fate(self, process: Process, *, last: bool = False) -> None:
        """It was forked, or has ended."""
        data = process.fate.recv(MAX_REQUEST)
        if not data:
            if process.exit_code is None:
                raise RunError("the process that starts ranks has died; see its output above")
            self._forget(process, process.fate.fileno())
            return
        message = json.loads(data)
        if "failed" in message:
            raise RunError(f"rank {process.slot} could not be started: {message['failed']}")
        if "forked" in message:
            process.pid = message["pid"]
            # Another thread may have asked for its end before it was forked.
            if process.must_end:
                self._zygote.kill(process.pid)
        else:
            if not last:
                self._hear_last_words(process)
            process.exit_code, process.heard_at = message["code"], time.monotonic()
            if not last:
                self._hearer.heard_end(process.slot, process)

    def _hear_last_words(self, process: Process) -> None:
        """What a rank said before it ended comes before its end, in whatever order they arrive."""
        with contextlib.suppress(BlockingIOError):
            while process.line.fileno() in process.open:
                process.line.setblocking(False)
                self._hear_line(process)

    def _hear_line(self, process: Process) -> None:
        try:
            chunk, fds, _, _ = socket.recv_fds(process.line, 65536, 1)
        except ConnectionError:
            chunk, fds = b"", []
        if not chunk:
            self._forget(process, process.line.fileno())
            return
        process.parcels.extend(fds)
        for kind, body in process.frames.feed(chunk):
            if kind == EVENT:
                self._hearer.heard_event(process.slot, json.loads(body))
            elif kind == CONTROL:
                self._hearer.heard_lost_world(process.slot, json.loads(body))
            else:
                self._take_outcome(process, kind, body, process.parcels.pop(0))

    def _take_outcome(self, process: Process, kind: bytes, body: bytes, parcel: int) -> None:
        try:
            outcome = unpack(parcel)
        finally:
            os.close(parcel)
        if kind == ANSWER:
            self._hearer.heard_answer(process.slot, json.loads(body), outcome)
            return
        if kind == RESULT:
            process.result, process.done = outcome, True
            return
        process.failure = outcome
        self._hearer.heard_failure(process.slot, outcome)

    def _hear_output(self, process: Process, fd: int) -> None:
        chunk = os.read(fd, 65536)
        process.heard_at = time.monotonic()
        # A progress bar ends its lines with a carriage return; a line without any end is passed on in pieces.
        *lines, process.text[fd] = (process.text[fd] + chunk.replace(b"\r", b"\n")).split(b"\n")
        if len(process.text[fd]) > MAX_LINE:
            lines, process.text[fd] = [*lines, process.text[fd]], b""
        if not chunk:
            lines = [process.text[fd]] if process.text[fd] else []
            self._forget(process, fd)
        for line in lines:
            stream = "stdout" if fd == process.out else "stderr"
            self._hearer.heard_output(process.slot, line.decode(errors="replace"), stream)

    def _forget(self, process: Process, fd: int) -> None:
        """Lets go of what has ended at once: a job may outlive any number of its ranks."""
        self._selector.unregister(fd)
        process.close(fd)
        if not process.open:
            process.close_ours()
            # Another thread may be looking for somebody in the list that there was.
            self._processes = [other for other in self._processes if other is not process]


def turn(selector: selectors.BaseSelector, seconds: float) -> None:
    """Waits for something to hear, and hears it; what was let go of meanwhile is passed over."""
    for key, _ in selector.select(seconds):
        if selector.get_map().get(key.fd) is key:
            key.data()


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; a debugger's does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
