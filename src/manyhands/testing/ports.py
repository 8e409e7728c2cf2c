"""Ports for processes that are told where to listen, and start a while later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of loopback that nobody else is given meanwhile.

    They stay bound, and free to listen on for whoever may reuse an address, as all listeners of manyhands may. A port
    that was only looked up is soon another process's: the system hands out the same ones for every connection.

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
