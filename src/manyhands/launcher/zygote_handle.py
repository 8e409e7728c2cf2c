"""A program's handle of its zygote: starts the zygote and sends it requests to fork and kill ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


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

    def fork(self, slot: int, summons: dict[str, Any], fds: Sequence[int]) -> None:
        """Fork a rank; the zygote reports the fork and the exit on the last descriptor."""
        request = {"slot": slot, "summons": summons, "path": sys.path}
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
