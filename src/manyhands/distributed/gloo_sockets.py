"""Sockets of gloo: gloo cannot abort a collective, so a blocked collective is ended by shutting down its sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

DRAIN_SECONDS = 0.005
"""Seconds between two attempts to read what peers still send."""
_PAIR = struct.Struct("@n")
"""Format in which gloo's listeners read the number of a pair, gloo's name for a connection between two ranks."""
_drained: set[int] = set()
"""Inodes of the sockets that a thread drains."""


def sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets, which the caller must close."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock
        else:
            sock.close()


def listening_ports() -> Iterator[int]:
    """Yield the TCP ports that this process listens on."""
    for sock in sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield sock.getsockname()[1]


def inodes() -> set[int]:
    """Return the inodes of this process's TCP sockets."""
    found = set()
    for sock in sockets():
        with sock:
            found.add(os.fstat(sock.fileno()).st_ino)
    return found


def shut_down(ports: set[int], seconds: float) -> None:
    """End every collective that is blocked on a connection with one of the ports at either end.

    Gloo fails all pending operations of a connection when it reads the end of the stream. But when a write fails, it
    does not notify the thread that waits for this write (`Pair::signalException` skips the operation that is being
    written), and the thread stays blocked until gloo's timeout. So only the reading side is shut down. For `seconds`
    seconds the sockets stay open, and what peers still send is read, so that their writes do not fail either.
    """
    held = []
    for sock in sockets():
        try:
            # A connection to the store has one port in all generations: its duplicate must not be duplicated again.
            inode = os.fstat(sock.fileno()).st_ino
            if inode in _drained or not ports & {sock.getsockname()[1], sock.getpeername()[1]}:
                raise OSError
            sock.shutdown(socket.SHUT_RD)
            _drained.add(inode)
            held.append(sock)
        except OSError:
            sock.close()
    if held:
        threading.Thread(target=_drain, args=(held, seconds), name="manyhands-drain", daemon=True).start()


def _drain(held: list[socket.socket], seconds: float) -> None:
    """Read and discard what arrives on sockets that gloo has closed, then close them."""
    deadline = time.monotonic() + seconds
    mine = {sock.fileno(): os.fstat(sock.fileno()).st_ino for sock in held}
    while time.monotonic() < deadline:
        in_use = _inodes_without(set(mine))
        for sock in held:
            # Gloo would misread the stream if bytes were missing, so its own end comes first.
            if mine[sock.fileno()] not in in_use:
                with contextlib.suppress(OSError):
                    while sock.recv(1 << 20, socket.MSG_DONTWAIT):
                        pass
        time.sleep(DRAIN_SECONDS)
    for sock in held:
        _drained.discard(mine[sock.fileno()])
        sock.close()


def _inodes_without(fds: set[int]) -> set[int]:
    """Return the inodes of this process's open files, except those of the descriptors `fds`."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in fds:
            with contextlib.suppress(OSError):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def break_off(before: set[int], size: int) -> None:
    """Wake threads that wait in gloo for a connection that no peer will make; gloo itself waits until its timeout.

    A connecting peer sends gloo's listener the number of a pair (a connection between two ranks). This function
    connects with every number, and closes the connection at once. Pending connections to other peers are shut down.

    Args:
        before: Inodes of older sockets, which are left alone.
        size: Number of ranks.
    """
    for sock in sockets():
        with sock, contextlib.suppress(OSError):
            if os.fstat(sock.fileno()).st_ino in before:
                continue
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)
                continue
            for number in range(2 * size):
                with socket.create_connection(sock.getsockname()[:2], timeout=1.0) as peer:
                    peer.sendall(_PAIR.pack(number))
