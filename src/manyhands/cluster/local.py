"""The local engine: a process per device on this machine, forked from one zygote."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..core import DeviceError, RunError, WorkerFailed
from .devices import Device, this_host
from .engine import Engine, Job, OnEvent, OnOutput
from .line import EVENT, RESULT, Frames, frame
from .network import LOOPBACK, listen, serve_store
from .parcel import pack, unpack
from .rank import Assignment, TorchSettings
from .world import DEFAULT_TIMEOUT, World
from .zygote import MAX_REQUEST

MAX_LINE = 65536
"""Bytes of a line that a rank may print before it is passed on in pieces."""
ENDING_SECONDS = 5.0
_PRELOAD = ["manyhands.cluster", "cloudpickle", "numpy"]


class LocalEngine(Engine):
    """Forks ranks from a zygote that it starts once and keeps for the life of the program."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = [*_PRELOAD, *preload]
        self._zygote: _ZygoteHandle | None = None
        self._starting = threading.Lock()

    def warm_up(self) -> _ZygoteHandle:
        """Starts the zygote, which takes as long as importing torch, without waiting for it."""
        with self._starting:
            if self._zygote is None or not self._zygote.alive:
                self._zygote = _ZygoteHandle(self._preload)
            return self._zygote

    def start(self, fn: Callable[[World], Any], devices: Sequence[Device], *, timeout: float = DEFAULT_TIMEOUT) -> Job:
        _require_linux()
        assignment = Assignment(
            fn=fn,
            devices=list(devices),
            timeout=timeout,
            generation=0,
            cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0],
            cwd=_folder(),
            environ=dict(os.environ),
            argv=list(sys.argv),
            torch=TorchSettings.now(),
        )
        parcel = pack(assignment)
        try:
            return _LocalJob(self.warm_up(), parcel, len(devices), timeout)
        finally:
            os.close(parcel)

    def close(self) -> None:
        """Ends the zygote and whatever still runs under it."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


class _ZygoteHandle:
    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from manyhands.cluster.zygote import serve; serve({theirs.fileno()}, {list(preload)!r})"
        self._process = subprocess.Popen(
            # Without -P a file in this folder that is called like a module of Python's would be imported instead.
            [sys.executable, "-P", "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self.socket = ours
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, rank: int, port: int, fds: Sequence[int]) -> None:
        """Forks a rank that meets the others at a store on this port; the last descriptor hears of its end."""
        request = {"rank": rank, "port": port, "path": sys.path}
        socket.send_fds(self.socket, [json.dumps(request).encode()], list(fds))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"kill": pid}).encode())

    def kill_all(self) -> None:
        """Ends the zygote at once, and with it every rank."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Rank:
    """The controller's end of one rank: its line, its output, what became of it."""

    def __init__(self) -> None:
        self.line, self.their_line = socket.socketpair()
        self.out, self.their_out = os.pipe()
        self.err, self.their_err = os.pipe()
        self.pid = 0
        self.exit_code: int | None = None
        self.heard_at = 0.0
        self.parcels: list[int] = []
        self.result: Any = None
        self.done = False
        self.failure: dict[str, Any] | None = None
        self.frames = Frames()
        self.text = {self.out: b"", self.err: b""}
        self.open: set[int] = {self.line.fileno(), self.out, self.err}

    def close_theirs(self) -> None:
        self.their_line.close()
        os.close(self.their_out)
        os.close(self.their_err)

    @property
    def over(self) -> bool:
        """Whether it has ended and said all; a process that it left behind may keep its pipes open."""
        return self.exit_code is not None and (not self.open or time.monotonic() > self.heard_at + 1.0)


class _LocalJob(Job):
    def __init__(self, zygote: _ZygoteHandle, parcel: int, size: int, timeout: float) -> None:
        self._zygote, self._timeout = zygote, timeout
        self._server, port = _open_store(size)
        self._ranks = [_Rank() for _ in range(size)]
        self._first: int | None = None
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()
        self._fates, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector.register(self._fates, selectors.EVENT_READ, None)
        for index, rank in enumerate(self._ranks):
            fds = [rank.their_line.fileno(), parcel, rank.their_out, rank.their_err, theirs.fileno()]
            zygote.fork(index, port, fds)
            rank.close_theirs()
            for fd in rank.open:
                self._selector.register(fd, selectors.EVENT_READ, index)
        theirs.close()

    def wait(self, on_event: OnEvent, on_output: OnOutput) -> list[Any]:
        try:
            while not all(rank.over for rank in self._ranks):
                self._turn(on_event, on_output)
        finally:
            self._finish()
        self._raise_first_failure()
        return [rank.result for rank in self._ranks]

    def stop(self) -> None:
        self._tell({"stop": True})

    def kill(self) -> None:
        for rank in self._ranks:
            if rank.exit_code is None and rank.pid:
                self._zygote.kill(rank.pid)

    def _turn(self, on_event: OnEvent, on_output: OnOutput) -> None:
        for key, _ in self._selector.select(0.5):
            if key.data is None:
                self._hear_fate(on_event)
            elif key.fd not in self._ranks[key.data].open:
                continue
            elif key.fd == self._ranks[key.data].line.fileno():
                self._hear_rank(key.data, on_event)
            else:
                self._hear_output(key.data, key.fd, on_output)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def _hear_fate(self, on_event: OnEvent) -> None:
        """A rank was forked, or has ended."""
        data = self._fates.recv(MAX_REQUEST)
        if not data:
            if any(rank.exit_code is None for rank in self._ranks):
                raise RunError("the process that starts ranks has died; see its output above")
            self._selector.unregister(self._fates)
            return
        message = json.loads(data)
        if "failed" in message:
            raise RunError(f"rank {message['rank']} could not be started: {message['failed']}")
        if "forked" in message:
            self._ranks[message["forked"]].pid = message["pid"]
            return
        for index, rank in enumerate(self._ranks):
            if rank.pid == message["exited"]:
                self._hear_last_words(index, on_event)
                rank.exit_code, rank.heard_at = message["code"], time.monotonic()
                if rank.exit_code != 0 or not rank.done:
                    self._lose(index)

    def _hear_last_words(self, index: int, on_event: OnEvent) -> None:
        """What a rank said before it ended comes before its end, in whatever order they arrive."""
        rank = self._ranks[index]
        rank.line.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while rank.line.fileno() in rank.open:
                self._hear_rank(index, on_event)

    def _hear_rank(self, index: int, on_event: OnEvent) -> None:
        rank = self._ranks[index]
        try:
            chunk, fds, _, _ = socket.recv_fds(rank.line, 65536, 1)
        except ConnectionError:
            chunk, fds = b"", []
        if not chunk:
            self._forget(rank, rank.line.fileno())
            return
        rank.parcels.extend(fds)
        for kind, body in rank.frames.feed(chunk):
            if kind == EVENT:
                on_event(index, json.loads(body))
            else:
                self._take_outcome(index, kind, rank.parcels.pop(0))

    def _take_outcome(self, index: int, kind: bytes, parcel: int) -> None:
        rank = self._ranks[index]
        try:
            outcome = unpack(parcel)
        finally:
            os.close(parcel)
        if kind == RESULT:
            rank.result, rank.done = outcome, True
            return
        rank.failure = outcome
        if not outcome["echo"]:
            self._lose(index)

    def _hear_output(self, index: int, fd: int, on_output: OnOutput) -> None:
        rank = self._ranks[index]
        chunk = os.read(fd, 65536)
        rank.heard_at = time.monotonic()
        # A progress bar ends its lines with a carriage return; a line without any end is passed on in pieces.
        *lines, rank.text[fd] = (rank.text[fd] + chunk.replace(b"\r", b"\n")).split(b"\n")
        if len(rank.text[fd]) > MAX_LINE:
            lines, rank.text[fd] = [*lines, rank.text[fd]], b""
        if not chunk:
            lines = [rank.text[fd]] if rank.text[fd] else []
            self._forget(rank, fd)
        for line in lines:
            on_output(index, line.decode(errors="replace"), "stdout" if fd == rank.out else "stderr")

    def _forget(self, rank: _Rank, fd: int) -> None:
        self._selector.unregister(fd)
        rank.open.discard(fd)

    def _lose(self, index: int) -> None:
        """The first failure ends the job: the others are told who was lost, then given a short time."""
        if self._first is not None:
            return
        self._first = index
        rank = self._ranks[index]
        self._tell({"lost": f"rank {index} on {this_host()} {_fate(rank)}"}, without=index)
        self._deadline = time.monotonic() + min(10.0, self._timeout / 5)

    def _tell(self, message: dict[str, Any], without: int | None = None) -> None:
        for index, rank in enumerate(self._ranks):
            if index != without and rank.exit_code is None:
                with contextlib.suppress(OSError):
                    rank.line.sendall(frame(message))

    def _finish(self) -> None:
        """Leaves no process, pipe or port behind, however the wait ended."""
        self.kill()
        self._fates.settimeout(ENDING_SECONDS)
        try:
            while any(rank.exit_code is None for rank in self._ranks):
                self._hear_fate(lambda rank, entry: None)
                self.kill()
        except (RunError, OSError):
            # The zygote does not answer; its ranks end with it.
            self._zygote.kill_all()
        self._selector.close()
        self._fates.close()
        for rank in self._ranks:
            rank.line.close()
            os.close(rank.out)
            os.close(rank.err)
        self._server = None

    def _raise_first_failure(self) -> None:
        if self._first is None:
            return
        rank = self._ranks[self._first]
        failure = rank.failure or {}
        cause = failure.get("error")
        failed = WorkerFailed(
            self._first, this_host(), failure.get("reason") or _fate(rank), failure.get("traceback", "")
        )
        if cause is not None:
            raise cause from failed
        raise failed


def _folder() -> str:
    """The current folder, or the root of the machine when it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def _require_linux() -> None:
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        raise DeviceError("several processes need Linux", got=sys.platform, remedy="use one device here: mh.Single()")


def _fate(rank: _Rank) -> str:
    if rank.failure is not None:
        return f"raised {rank.failure['reason']}"
    code = rank.exit_code or 0
    if code < 0:
        hint = "; often the system ran out of memory" if -code == signal.SIGKILL else ""
        return f"was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
    return f"ended with exit code {code} before it was done"


def _open_store(size: int) -> tuple[object, int]:
    """A store for the ranks to meet at, on loopback alone."""
    if size == 1:
        return None, 0
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    return serve_store(listener), port
