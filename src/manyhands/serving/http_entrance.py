"""Entrance: connections whose first request head is incomplete, which cost a server only a socket each."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from .connections import Slot
from .http import refusal_response
from .limits import Limits

NUM_READ = 1 << 14
"""Bytes read for the parser at a time."""
_BACKLOG = 1024
"""Accept backlog of the listening sockets; the event loop accepts a few connections at a time."""
_NUM_ACCEPTED, _NUM_LOOKED, _NUM_ENTERING, _ENTER_SECONDS = 8, 16, 4, 0.001
"""Connections accepted, examined and admitted per turn, and the pause between turns."""
_OVER = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class PendingConnection:
    """A connection whose first request head is incomplete: only a socket, without transport or parser."""

    __slots__ = ("has_begun", "since", "slot", "socket")

    def __init__(self, sock: socket.socket, slot: Slot) -> None:
        self.socket, self.slot = sock, slot
        self.since = time.monotonic()
        self.has_begun = False
        """Whether the client has sent anything."""

    def refuse(self, status: int, reason: str) -> None:
        """Send an error response if the client has sent anything, then close the connection."""
        if self.has_begun:
            # Closing a socket with unread data would reset the connection and lose the response.
            with contextlib.suppress(OSError):
                self.socket.recv(NUM_READ)
            with contextlib.suppress(OSError):
                self.socket.send(refusal_response(status, reason))
        self.socket.close()


def has_input(stream: Any) -> bool:
    """Return whether unread data waits at a socket or transport."""
    number = stream.fileno() if isinstance(stream, socket.socket) else stream.get_extra_info("socket").fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


_FIRST_LINE = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r?\n")


def _is_begun_head(data: bytes, headers: int) -> bool:
    """Return whether bytes may be the start of a request head with at most `headers` lines, but not a complete head.

    >>> [_is_begun_head(data, 100) for data in (b"GET /", b"GET / HTTP/1.1\\r\\n\\r\\n", b"GET\\r\\n", b"?")]
    [True, False, False, False]
    """
    num = data.count(b"\n")
    if not data[:1].isupper() or num > headers or b"\r\n\r\n" in data:
        return False
    return not num or _FIRST_LINE.match(data) is not None


class Entrance:
    """Accept connections a few at a time and keep them until their first request head is complete.

    Until then a connection has no transport, parser or buffer, and its data stays in the kernel. Clients that open many
    connections, stay silent or send half a head therefore cost the event loop little.

    Args:
        enter: Called with an accepted socket and the client's address; returns None where there is no room for it.
        go_in: Called with a connection whose head is complete, or too long.
        leave: Called with a connection that its client has closed.
        limits: Bytes and lines that an incomplete head may have.
        is_secured: Whether connections use TLS, so that heads cannot be inspected and any byte admits the connection.
    """

    def __init__(
        self,
        enter: Callable[[socket.socket, str], PendingConnection | None],
        go_in: Callable[[PendingConnection], None],
        leave: Callable[[PendingConnection], None],
        limits: Limits,
        *,
        is_secured: bool,
    ) -> None:
        self._enter, self._go_in, self._leave = enter, go_in, leave
        self._max_head, self._max_headers = min(limits.head, NUM_READ // 2), limits.headers
        self._is_secured = is_secured
        self._most = 1 if is_secured else _NUM_ENTERING
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, PendingConnection] = {}
        self._epoll = select.epoll()
        self._sockets: list[socket.socket] = []
        self._readers: dict[int, Callable[[], bool]] = {}
        self._watch(self._epoll.fileno(), self._poll)

    async def open(self, host: str, port: int) -> int:
        """Listen on all addresses of a host; return the port of the first."""
        for family, kind, protocol, _, address in await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            self._sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setblocking(False)
            try:
                sock.bind(address)
                sock.listen(_BACKLOG)
            except OSError:
                self.close()
                raise
            self._watch(sock.fileno(), functools.partial(self._accept, sock))
        return int(self._sockets[0].getsockname()[1])

    def forget(self, pending: PendingConnection) -> None:
        """Stop watching a connection."""
        number = pending.socket.fileno()
        if self._pending.pop(number, None) is not None:
            self._epoll.unregister(number)

    def stop(self) -> None:
        """Stop accepting connections, after those that clients have already established."""
        for sock in self._sockets:
            self._unwatch(sock.fileno())
            # Closing a listening socket resets the connections in its backlog.
            for _ in range(_BACKLOG // _NUM_ACCEPTED):
                if not self._accept(sock):
                    break
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """Stop accepting connections and close the epoll object."""
        self.stop()
        if not self._epoll.closed:
            self._unwatch(self._epoll.fileno())
            self._epoll.close()

    def _watch(self, number: int, work: Callable[[], bool]) -> None:
        self._readers[number] = work
        self._loop.add_reader(number, self._work, number)

    def _unwatch(self, number: int) -> None:
        self._readers.pop(number, None)
        self._loop.remove_reader(number)

    def _work(self, number: int) -> None:
        """Run a bounded piece of work; if more is left, resume after a pause so that other requests go first."""
        if self._readers[number]():
            self._loop.remove_reader(number)
            self._loop.call_later(_ENTER_SECONDS, self._resume, number)

    def _resume(self, number: int) -> None:
        if number in self._readers:
            self._loop.add_reader(number, self._work, number)

    def _accept(self, sock: socket.socket) -> bool:
        """Accept some connections; return whether there may be more."""
        for _ in range(_NUM_ACCEPTED):
            try:
                accepted, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError:
                # No file descriptor is free; pending connections stay in the backlog.
                return True
            accepted.setblocking(False)
            pending = self._enter(accepted, str(peer[0]) if isinstance(peer, tuple) else "")
            if pending is not None:
                self._pending[accepted.fileno()] = pending
                # Edge-triggered: data that was already seen is not reported again.
                self._epoll.register(accepted.fileno(), select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        return True

    def _poll(self) -> bool:
        """Examine some connections that have new data; return whether there may be more."""
        num_in = 0
        for _ in range(_NUM_LOOKED):
            # One event at a time: an edge-triggered event that is polled but not handled would be lost.
            events = self._epoll.poll(0, 1)
            if not events:
                return False
            number, event = events[0]
            num_in += self._check_pending(self._pending[number], is_over=bool(event & _OVER))
            if num_in == self._most:
                break
        return True

    def _check_pending(self, pending: PendingConnection, *, is_over: bool) -> bool:
        """Admit a connection with a complete head or close an ended one; return whether it was admitted."""
        try:
            data = pending.socket.recv(NUM_READ, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        is_begun = not self._is_secured and len(data) <= self._max_head and _is_begun_head(data, self._max_headers)
        if not data or (is_begun and is_over):
            self.forget(pending)
            self._leave(pending)
            pending.socket.close()
            return False
        if not pending.has_begun:
            pending.has_begun, pending.since = True, time.monotonic()
        if is_begun:
            return False
        self.forget(pending)
        self._go_in(pending)
        return True
