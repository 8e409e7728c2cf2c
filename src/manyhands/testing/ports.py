"""Ports for processes that get their port as an argument and start later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Reserve free loopback ports while a block runs.

    The ports stay bound, and listeners that reuse addresses, as all of manyhands do, can still listen on them. A port
    that was only looked up may be given to another process before it is used.

    >>> with held_ports(2) as ports:
    ...     len(set(ports))
    2
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in held]
