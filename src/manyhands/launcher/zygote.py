"""The zygote: a process with torch imported, from which ranks are forked in milliseconds.

A program starts it once and sends it requests over an inherited socket. The zygote never uses an accelerator and has a
single thread. When the program exits, the socket closes, and the zygote kills its children and exits. When the zygote
dies, its children live on, and the program starts another zygote for later ones.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

MAX_REQUEST = 65536
DYING_SECONDS = 2.0
"""Seconds for which the end of a zygote that has closed its connections is waited for."""


_life = -1
"""In a rank: file descriptor of a pipe by which the kernel kills the rank when the program exits; -1 elsewhere."""


def serve(fd: int, preload: list[str]) -> None:
    """Fork ranks on requests from the socket `fd` until it closes; `preload` are modules to import first."""
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
        *theirs, job = fds
        self._fork(json.loads(data), theirs, socket.socket(fileno=job))
        return True

    def _fork(self, request: dict[str, Any], fds: list[int], job: socket.socket) -> None:
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
            *fds, life = fds
            _die_with_program(life)
            _become_rank(request, fds)
        for fd in fds:
            os.close(fd)
        watch = os.pidfd_open(pid)
        self._children[watch] = pid, job
        self._selector.register(watch, selectors.EVENT_READ)
        _send(job, {"forked": True, "pid": pid}, [watch])

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


def _send(job: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message about a rank to its job, unless the job no longer exists."""
    with contextlib.suppress(OSError):
        socket.send_fds(job, [json.dumps(message).encode()], fds)


def life_descriptor() -> int:
    """Return the descriptor that a rank must keep open, so that the kernel kills it when its program exits."""
    return _life


def _die_with_program(life: int) -> None:
    """Let the kernel kill this process when the program exits, but not when the zygote does.

    `life` is the read end of a pipe whose write end only the program has. The kernel sends the signal when anything
    happens to the pipe. Each rank has its own pipe, because a sandboxed rank can open its pipe for writing.
    """
    global _life
    _life = life
    os.set_inheritable(life, False)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life, 0)
    if poll.poll(0):
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
    """A program's connection to its zygote, which is replaced if it dies."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = list(preload)
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()
        atexit.register(self.close)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from manyhands.launcher.zygote import serve; serve({theirs.fileno()}, {self._preload!r})"
        self._process = subprocess.Popen(
            # Without -P a file in this folder with the name of a standard library module would be imported instead.
            [sys.executable, "-P", "-c", program],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self.socket = ours

    def revive(self, *, is_dying: bool = False) -> None:
        """Start another zygote if this one has died, or is dying, as its closed connections show."""
        with self._lock:
            if is_dying and not self._is_closed:
                # A process closes its connections before its exit can be noticed.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(DYING_SECONDS)
            if self._is_closed or self._process.poll() is None:
                return
            code = self._process.returncode
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            print(f"the process that starts ranks has died ({how}) and is replaced; ranks continue", file=sys.stderr)
            self.socket.close()
            self._start()

    def fork(self, slot: int, info: dict[str, Any], fds: Sequence[int]) -> None:
        """Fork a rank; the zygote reports the fork and the exit on the last descriptor.

        The one before it is the read end of a pipe: the rank is killed when its write end is closed.
        """
        request = json.dumps({"slot": slot, "rendezvous": info, "path": sys.path}).encode()
        self.revive()
        try:
            socket.send_fds(self.socket, [request], list(fds))
        except ConnectionError:
            # The zygote is dying at this moment.
            self._process.wait()
            self.revive()
            socket.send_fds(self.socket, [request], list(fds))

    def kill(self) -> None:
        """Kill a zygote that does not answer."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Stop the zygote, which kills all its ranks."""
        with self._lock:
            self._is_closed = True
        atexit.unregister(self.close)
        self.socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
