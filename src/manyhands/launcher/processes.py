"""Processes of ranks on this host: forked from the zygote, and monitored through one selector."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import Event, RunError, event
from ..distributed import ANSWER, CALL, CONTROL, EVENT, RESULT, FrameReader, frame, send_frame
from .pickles import unpack
from .rendezvous import RendezvousInfo
from .zygote import MAX_REQUEST, ZygoteHandle

MAX_LINE = 65536
"""Maximum bytes of a printed line; longer lines are forwarded in pieces."""
ENDING_SECONDS = 5.0
LAST_OUTPUT_SECONDS = 5.0
"""Seconds after the exit of a process in which the output of its surviving child processes is still read."""
FROZEN_SECONDS = 2.0
"""Seconds that a rank may be stopped by a signal such as SIGSTOP before it is killed."""
LOOK_SECONDS = 0.5
UNKNOWN_CODE = 256
"""Exit code of a process whose parent, the zygote, has died; a real one is at most 255."""


_FRAME = re.compile(r"frame #\d+: |C\+\+ CapturedTraceback:$|Exception raised from .+ \(most recent call first\):$")
_NUMBERED, _PLACE = re.compile(r"#\d+ "), re.compile(r":\d+$")
_CONNECTION = re.compile(r"\b(gloo|c10d)::")
MAX_TRACE, MAX_FRAME = 1000, 2000
"""Maximum lines of a native stack trace, and characters of each; longer ones are forwarded as output."""


class NativeTraces:
    """Separates native stack traces of torch's connections from a rank's output.

    When a peer fails, gloo and the store print dozens of frames with each error, although the failure is handled.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        """The last ordinary line, and the lines of a stack trace after it."""

    def take(self, line: str | None) -> tuple[list[str], str]:
        """Process the next line of output, or None at its end; return the lines to show, and a stack trace or ""."""
        if line is not None and _is_frame(line) and len(self._lines) < MAX_TRACE:
            self._lines.append(line)
            return [], ""
        before, self._lines = self._lines, [line] if line is not None else []
        shown = [line] if line is not None else []
        head = 0 if before and _is_frame(before[0]) else 1
        if len(before) <= head:
            return shown, ""
        trace = "\n".join(before)
        return (shown, trace) if _CONNECTION.search(trace) else ([*before[head:], *shown], "")


def _is_frame(line: str) -> bool:
    """Return whether a line is part of a native stack trace; in time proportional to its length."""
    text = line.strip() if len(line) <= MAX_FRAME else ""
    is_place = _NUMBERED.match(text) is not None and " from " in text and _PLACE.search(text[-20:]) is not None
    return is_place or _FRAME.match(text) is not None


class ProcessListener(ABC):
    """Receives the reports of local processes, identified by the slots of their ranks."""

    @abstractmethod
    def handle_event(self, slot: int, entry: Event) -> None:
        """Handle an event that a rank reported."""

    @abstractmethod
    def handle_output(self, slot: int, text: str, stream: str) -> None:
        """Handle a line that a rank printed."""

    @abstractmethod
    def handle_lost_world(self, slot: int, report: dict[str, Any]) -> None:
        """Handle a rank that lost its peers and waits for the next rendezvous."""

    @abstractmethod
    def handle_failure(self, slot: int, failure: dict[str, Any]) -> None:
        """Handle an exception that a rank raised before it exits."""

    @abstractmethod
    def handle_exit(self, slot: int, process: Process) -> None:
        """Handle the end of a rank's process."""

    def handle_answer(self, slot: int, report: dict[str, Any], outcome: Any) -> None:
        """Handle a service's answer to a call; the default raises RunError, because ranks do not receive calls."""
        raise RunError(f"the rank in slot {slot} sent an answer, although no call was made")


class Process:
    """One process of a rank: its control channel, its output, and how it ended."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.channel_socket, self.child_channel_socket = socket.socketpair()
        self.exit_socket, self.child_exit_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.out, self.child_out = os.pipe()
        self.err, self.child_err = os.pipe()
        self._child_life, self._life = os.pipe()
        """Ends of the pipe by which the kernel kills the process when this program exits; -1 if closed."""
        self.pid = 0
        self.pid_fd = -1
        """The pidfd of the process, which is readable when it has exited; -1 before the fork and after the exit."""
        self._signalling = threading.Lock()
        """Lock that is held while `pid_fd` is used: once it is closed, another file may get its number."""
        self.must_end = False
        """Whether to kill the process as soon as its pid is known."""
        self.exit_code: int | None = None
        self.received_at = self.ended_at = 0.0
        self.frozen_since: float | None = None
        self.was_frozen = False
        self.pickle_fds: list[int] = []
        self.result: Any = None
        self.done = False
        self.failure: dict[str, Any] | None = None
        self.frames = FrameReader()
        self.text = {self.out: b"", self.err: b""}
        self.traces = {self.out: NativeTraces(), self.err: NativeTraces()}
        self.open: set[int] = {self.channel_socket.fileno(), self.exit_socket.fileno(), self.out, self.err}

    def child_ends(self) -> list[int]:
        """Return the child's ends: control channel, stdout, stderr, life pipe, and the socket for its exit."""
        sockets = self.child_channel_socket.fileno(), self.child_exit_socket.fileno()
        return [sockets[0], self.child_out, self.child_err, self._child_life, sockets[1]]

    def close_child_ends(self) -> None:
        self.child_channel_socket.close()
        self.child_exit_socket.close()
        for fd in (self.child_out, self.child_err, self._child_life):
            os.close(fd)

    def let_go(self) -> None:
        """Close the pipe by which the process would be killed; it must have exited, or be meant to end."""
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)

    def close(self, fd: int) -> None:
        """Close one of the parent's ends of the connections."""
        self.open.discard(fd)
        for sock in (self.channel_socket, self.exit_socket):
            if sock.fileno() == fd:
                sock.close()
                return
        os.close(fd)

    def kill(self) -> None:
        """Kill the process, now or as soon as it exists; any thread may call this."""
        self.must_end = True
        with self._signalling, contextlib.suppress(OSError):
            if self.pid_fd >= 0:
                signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)

    def take_pid_fd(self) -> int:
        """Return the pidfd of the process, which the caller must close; the process is not signalled any more."""
        with self._signalling:
            pid_fd, self.pid_fd = self.pid_fd, -1
        return pid_fd

    def close_parent_ends(self) -> None:
        """Close all of the parent's ends of the connections, and the pickles that were not read."""
        self.take_pid_fd()
        self.let_go()
        for fd in list(self.open):
            self.close(fd)
        for pickle_fd in self.pickle_fds:
            os.close(pickle_fd)

    @property
    def over(self) -> bool:
        """Return whether the process has exited and its output is read.

        A child process that outlives it may keep the pipes open. Such pipes are no longer read after one second without
        output, or LAST_OUTPUT_SECONDS after the exit.
        """
        until = min(self.received_at + 1.0, self.ended_at + LAST_OUTPUT_SECONDS)
        return self.exit_code is not None and (not self.open or time.monotonic() > until)

    @property
    def end(self) -> str:
        """Return how the process ended, as text that follows its name."""
        if self.failure is not None:
            return f"raised {self.failure['reason']}"
        if self.was_frozen:
            return f"was frozen for {FROZEN_SECONDS:g} seconds and was killed"
        code = self.exit_code or 0
        if code == UNKNOWN_CODE:
            return "ended before it was done; its exit code is unknown, because the process that started it has died"
        if code < 0:
            hint = "; often because the system ran out of memory" if -code == signal.SIGKILL else ""
            return f"was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
        return f"ended with exit code {code} before it was done"


class LocalProcesses:
    """Processes of ranks on this host, at most one alive per slot."""

    def __init__(
        self, zygote: ZygoteHandle, pickle_fd: int, listener: ProcessListener, selector: selectors.BaseSelector
    ) -> None:
        self._zygote, self._listener, self._selector = zygote, listener, selector
        self._pickle_fd = os.dup(pickle_fd)
        self._processes: list[Process] = []
        self._looked_at = 0.0

    def start(self, slot: int, info: RendezvousInfo) -> None:
        """Fork a rank for a slot; it joins the other ranks by the rendezvous info."""
        process = Process(slot)
        self._processes.append(process)
        line, *others = process.child_ends()
        self._zygote.fork(slot, info.to_dict(), [line, self._pickle_fd, *others])
        process.close_child_ends()
        self._listen(process.exit_socket.fileno(), lambda: self._read_exit(process))
        self._listen(process.channel_socket.fileno(), lambda: self._read_channel(process))
        for fd in (process.out, process.err):
            self._listen(fd, lambda fd=fd: self._read_output(process, fd))  # type: ignore[misc]

    def send_message(self, slot: int, message: dict[str, Any]) -> None:
        """Send a message to the rank in a slot, if it is alive."""
        for process in self._alive(slot):
            with contextlib.suppress(OSError):
                process.channel_socket.sendall(frame(message))

    def call(self, slot: int, number: int, pickle_fd: int) -> None:
        """Send a call, with its number and its pickled method and arguments, to the service in a slot."""
        for process in self._alive(slot):
            with contextlib.suppress(OSError):
                send_frame(process.channel_socket, CALL, json.dumps({"number": number}).encode(), [pickle_fd])

    def kill(self, slot: int | None = None) -> None:
        """Kill the rank of a slot, or all ranks when `slot` is None."""
        for process in self._alive(slot):
            process.kill()

    @property
    def is_over(self) -> bool:
        """Return whether every process has exited and all its output is read."""
        return all(process.over for process in self._processes)

    def look(self) -> None:
        """Kill ranks that have been stopped by a signal for too long: their peers would wait for them indefinitely."""
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
                process.kill()

    def finish(self) -> None:
        """Kill all processes and close all pipes; the caller must do this also after an error."""
        self.kill()
        try:
            # Exited ranks may have left processes that keep pipes open, but the zygote reports nothing more about them.
            for process in self._alive():
                while process.exit_code is None:
                    if process.exit_socket.fileno() < 0:
                        self._await_orphan(process)
                    else:
                        process.exit_socket.settimeout(ENDING_SECONDS)
                        self._read_exit(process, last=True)
                        self.kill()
        except (RunError, OSError):
            # The zygote does not answer.
            self._zygote.kill()
        for process in self._processes:
            process.close_parent_ends()
        os.close(self._pickle_fd)

    def _alive(self, slot: int | None = None) -> list[Process]:
        return [p for p in self._processes if p.exit_code is None and slot in (None, p.slot)]

    def _listen(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _read_exit(self, process: Process, *, last: bool = False) -> None:
        """Handle the zygote's report that a process was forked, could not be started, or has exited."""
        data, fds, _, _ = socket.recv_fds(process.exit_socket, MAX_REQUEST, 1)
        if not data:
            if process.exit_code is None:
                self._lose_zygote(process, last=last)
            else:
                self._forget(process, process.exit_socket.fileno())
            return
        message = json.loads(data)
        if "failed" in message:
            raise RunError(f"rank {process.slot} could not be started: {message['failed']}")
        if "forked" in message:
            process.pid, (process.pid_fd,) = message["pid"], fds
            process.open.add(process.pid_fd)
            # Another thread may have called kill() before the fork.
            if process.must_end:
                process.kill()
        else:
            process.close(process.take_pid_fd())
            self._take_exit(process, message["code"], last=last)

    def _take_exit(self, process: Process, code: int, *, last: bool) -> None:
        if not last:
            self._read_remaining(process)
        process.received_at = process.ended_at = time.monotonic()
        process.exit_code = code
        process.let_go()
        if not last:
            self._listener.handle_exit(process.slot, process)

    def _lose_zygote(self, process: Process, *, last: bool) -> None:
        """Watch a process directly by its pidfd, because the zygote that would report its exit has died."""
        self._zygote.revive(is_dying=True)
        if last:
            process.close(process.exit_socket.fileno())
        else:
            self._forget(process, process.exit_socket.fileno())
        if process.pid_fd < 0:
            # The process was never started, or its pid cannot be distinguished from a reused one.
            self._take_exit(process, UNKNOWN_CODE, last=last)
        elif not last:
            self._listen(process.pid_fd, lambda: self._end_orphan(process, last=False))

    def _await_orphan(self, process: Process) -> None:
        select.select([process.pid_fd], [], [], ENDING_SECONDS)
        self._end_orphan(process, last=True)

    def _end_orphan(self, process: Process, *, last: bool) -> None:
        """Handle the exit of a process whose zygote has died: its exit code is unknown, but not whether it was done."""
        pid_fd = process.take_pid_fd()
        if last:
            process.close(pid_fd)
        else:
            self._forget(process, pid_fd)
            self._read_remaining(process)
        self._take_exit(process, 0 if process.done else UNKNOWN_CODE, last=last)

    def _read_remaining(self, process: Process) -> None:
        """Read the messages that a rank sent before it exited, so that they are handled before the exit."""
        with contextlib.suppress(BlockingIOError):
            while process.channel_socket.fileno() in process.open:
                process.channel_socket.setblocking(False)
                self._read_channel(process)

    def _read_channel(self, process: Process) -> None:
        try:
            chunk, fds, _, _ = socket.recv_fds(process.channel_socket, 65536, 1)
        except ConnectionError:
            chunk, fds = b"", []
        if not chunk:
            self._forget(process, process.channel_socket.fileno())
            return
        process.pickle_fds.extend(fds)
        for kind, body in process.frames.feed(chunk):
            if kind == EVENT:
                self._listener.handle_event(process.slot, json.loads(body))
            elif kind == CONTROL:
                self._listener.handle_lost_world(process.slot, json.loads(body))
            else:
                self._take_outcome(process, kind, body, process.pickle_fds.pop(0))

    def _take_outcome(self, process: Process, kind: bytes, body: bytes, pickle_fd: int) -> None:
        try:
            outcome = unpack(pickle_fd)
        finally:
            os.close(pickle_fd)
        if kind == ANSWER:
            self._listener.handle_answer(process.slot, json.loads(body), outcome)
            return
        if kind == RESULT:
            process.result, process.done = outcome, True
            return
        process.failure = outcome
        self._listener.handle_failure(process.slot, outcome)

    def _read_output(self, process: Process, fd: int) -> None:
        chunk = os.read(fd, 65536)
        process.received_at = time.monotonic()
        # A progress bar ends its lines with a carriage return; a line without an end is forwarded in pieces.
        *lines, process.text[fd] = (process.text[fd] + chunk.replace(b"\r", b"\n")).split(b"\n")
        if len(process.text[fd]) > MAX_LINE:
            lines, process.text[fd] = [*lines, process.text[fd]], b""
        if not chunk:
            lines = [process.text[fd]] if process.text[fd] else []
            self._forget(process, fd)
        stream = "stdout" if fd == process.out else "stderr"
        for line in [*(line.decode(errors="replace") for line in lines), *([] if chunk else [None])]:
            shown, trace = process.traces[fd].take(line)
            if trace:
                self._listener.handle_event(process.slot, event("native_trace", text=trace))
            for text in shown:
                self._listener.handle_output(process.slot, text, stream)

    def _forget(self, process: Process, fd: int) -> None:
        """Stop listening to a descriptor of a process and close it; forget the process after its last descriptor."""
        self._selector.unregister(fd)
        process.close(fd)
        if not process.open:
            process.close_parent_ends()
            # A new list, because another thread may be iterating over the old one.
            self._processes = [other for other in self._processes if other is not process]


def turn(selector: selectors.BaseSelector, seconds: float) -> None:
    """Wait up to `seconds` for events of a selector, and handle them unless their file was closed in between."""
    for key, _ in selector.select(seconds):
        if selector.get_map().get(key.fd) is key:
            key.data()


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; a stop by a debugger does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
