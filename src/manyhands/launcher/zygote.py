"""The zygote: a process with torch imported, from which ranks are forked in milliseconds.

A program starts it once and sends it requests over an inherited socket. The zygote never uses an accelerator and has a
single thread. When the program exits, the socket closes, and the zygote kills its children and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MAX_REQUEST = 65536
_PR_SET_PDEATHSIG = 1


def serve(fd: int, preload: list[str]) -> None:
    """Handle requests from the socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    control = socket.socket(fileno=fd)
    _Zygote(control).loop()


class _Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Maps a child's pidfd to its process id and the socket of its job."""

    def loop(self) -> None:
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._control:
                        self._reap(int(key.fd))
                    elif not self._answer():
                        return self._end()
        return self._end()

    def _answer(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 16)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            self._kill(request["kill"])
        else:
            *theirs, job = fds
            self._fork(request, theirs, socket.socket(fileno=job))
        return True

    def _fork(self, request: dict[str, Any], fds: list[int], job: socket.socket) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send(job, {"failed": str(error)})
            return
        if pid == 0:
            self._control.close()
            self._selector.close()
            job.close()
            for watch, (_, other) in self._children.items():
                os.close(watch)
                other.close()
            die_with_parent(zygote)
            _become_rank(request, fds)
        for fd in fds:
            os.close(fd)
        watch = os.pidfd_open(pid)
        self._children[watch] = pid, job
        self._selector.register(watch, selectors.EVENT_READ)
        _send(job, {"forked": True, "pid": pid})

    def _kill(self, pid: int) -> None:
        """Kill a child that is not reaped yet, so that the pid cannot belong to another process."""
        if any(pid == child for child, _ in self._children.values()):
            os.kill(pid, signal.SIGKILL)

    def _reap(self, watch: int) -> None:
        pid, job = self._children.pop(watch)
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(pid, 0)
        _send(job, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})
        job.close()

    def _end(self) -> None:
        for pid, _ in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _send(job: socket.socket, message: dict[str, Any]) -> None:
    """Send a job a message about its rank; the job may no longer exist."""
    with contextlib.suppress(OSError):
        job.send(json.dumps(message).encode())


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_rank(request: dict[str, Any], fds: list[int]) -> None:
    """Turn the forked child into a rank; never returns."""
    from .rank import run_rank

    code = 1
    try:
        channel, pickle_fd, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        # Line buffering instead of the block buffering of pipes, so that output is not lost when a rank is killed.
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        code = run_rank(request, socket.socket(fileno=channel), pickle_fd)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Exit handlers belong to the zygote and to libraries that it imported, not to this rank.
        os._exit(code)


class ZygoteHandle:
    """A program's connection to its zygote."""

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from manyhands.launcher.zygote import serve; serve({theirs.fileno()}, {list(preload)!r})"
        self._process = subprocess.Popen(
            # Without -P a file in this folder with the name of a standard library module would be imported instead.
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

    def fork(self, slot: int, info: dict[str, Any], fds: Sequence[int]) -> None:
        """Fork a rank; the zygote reports the fork and the exit on the last descriptor."""
        request = {"slot": slot, "rendezvous": info, "path": sys.path}
        socket.send_fds(self.socket, [json.dumps(request).encode()], list(fds))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"kill": pid}).encode())

    def kill_all(self) -> None:
        """Kill the zygote, and with it every rank."""
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
