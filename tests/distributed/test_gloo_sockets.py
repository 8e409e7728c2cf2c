"""Aborting blocked collectives of gloo: the effect on the process's sockets."""

from __future__ import annotations

import os
import socket

from manyhands.distributed.gloo_sockets import shut_down


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_repeated_failures_hold_a_connection_once() -> None:
    """The connection to the store outlives generations, and each of them ends its collectives by the store's port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            before = num_files()
            for _ in range(10):
                shut_down({port}, 5.0)
            assert num_files() == before + 2
