"""Rendezvous of a server with the replicas it has started: a Unix socket in a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
from pathlib import Path

from .replica_process import MAX_MESSAGE

_CREDENTIALS = struct.Struct("3i")


class Arrival:
    """A replica process that has connected; it has loaded nothing yet."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket, self.pid = sock, pid


class ReplicaRendezvous:
    """Wait for replicas, each identified by a secret key."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="manyhands-")
        self.path = str(Path(self._folder) / "meeting")
        self._expected: dict[str, asyncio.Future[Arrival]] = {}
        self._guests: set[socket.socket] = set()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def expect(self) -> tuple[str, asyncio.Future[Arrival]]:
        """Return a new key, and a future for the replica that will connect with it."""
        key = secrets.token_hex(16)
        self._expected[key] = self._loop.create_future()
        return key, self._expected[key]

    def forget(self, key: str) -> None:
        """Stop expecting the replica with this key."""
        future = self._expected.pop(key, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Cancel all pending futures, disconnect unidentified peers and close the socket."""
        for key in list(self._expected):
            self.forget(key)
        for guest in list(self._guests):
            self._dismiss(guest)
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            guest, _ = self._socket.accept()
            guest.setblocking(False)
            self._guests.add(guest)
            self._loop.add_reader(guest.fileno(), self._on_readable, guest)

    def _on_readable(self, guest: socket.socket) -> None:
        """Read a peer's first message; disconnect it unless it has an expected key and comes from this user."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            credentials = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(credentials)
            hello = json.loads(guest.recv(MAX_MESSAGE))
            future = self._expected.pop(hello["key"]) if uid == os.geteuid() else None
            if future is not None and not future.cancelled():
                self._loop.remove_reader(guest.fileno())
                self._guests.discard(guest)
                future.set_result(Arrival(guest, pid))
                return
        self._dismiss(guest)

    def _dismiss(self, guest: socket.socket) -> None:
        self._loop.remove_reader(guest.fileno())
        self._guests.discard(guest)
        guest.close()
