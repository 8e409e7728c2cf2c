"""Fuzz targets of what hosts and ranks say to each other, and of what schedulers say about them.

Each takes any bytes and raises only on a defect; a decoder may refuse with an error of the project.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import socket
from collections.abc import Callable

import msgspec

from manyhands.core import ManyhandsError
from manyhands.distributed import resolve
from manyhands.launcher.joining.channel import Channel, JoinTimeouts, checked
from manyhands.launcher.joining.handshake import HostFacts, HostVerifier
from manyhands.launcher.joining.reachability import PeerBeats
from manyhands.launcher.joining.token import JoinToken
from manyhands.launcher.resolvers.hosts_file import HostsFile
from manyhands.launcher.resolvers.registry import understood
from manyhands.launcher.resolvers.tf_config import TfConfig
from manyhands.parameter_server import messages

from .files import folder

REFUSED = (ManyhandsError, OSError)
"""A connection that says something else is ended, by either."""
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID",
    "SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_PROCID",
    "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX",
    "PET_NNODES", "MANYHANDS_CLUSTER", "TF_CONFIG",
)  # fmt: skip
"""What schedulers set; a line of an input is the value of one."""


def parameter_server(data: bytes) -> None:
    """Read bytes as a message between workers and parameter servers; what is accepted is written alike."""
    try:
        message = messages.decode(data)
    except (msgspec.DecodeError, *REFUSED):
        return
    if messages.decode(messages.encode(message)) != message and "nan" not in repr(message):
        raise AssertionError(f"another message when it is read again: {message}")


def join_message(data: bytes) -> None:
    """Read bytes as the body of a message between hosts, and as the facts of a host that joins."""
    with contextlib.suppress(*REFUSED):
        message = checked(data)
        if isinstance(message.get("facts"), dict):
            mine = _facts()
            mine.differences(HostFacts.read(message["facts"]))


def join_handshake(data: bytes) -> None:
    """Send bytes to the host that conducts a job, as the first that another one says.

    An even first byte means a message with the right length before it, an odd one the bytes as they are.
    """
    data = _framed(data[1:]) if data[:1] and data[0] % 2 == 0 else data[1:]
    ours, theirs = _pair()
    with ours, theirs:
        theirs.sendall(data[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(*REFUSED):
            HostVerifier(Channel(ours, JoinTimeouts(timeout=4.0)), JoinToken(bytes(32)), {}, _facts)
            raise AssertionError("a host without the token was taken in")


def peer_datagram(data: bytes) -> None:
    """Send bytes from one joined host to another as a heartbeat; nothing without the token counts."""
    with contextlib.closing(PeerBeats("a", "127.0.0.1", JoinToken(bytes(32)), selectors.DefaultSelector())) as beats:
        beats.introduce({"b": ("127.0.0.1", beats.port)}, "salt")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(data[:4096], ("127.0.0.1", beats.port))
        beats._receive()
        if beats._heard:
            raise AssertionError("a host without the token was heard")


def tf_config(data: bytes) -> None:
    """Read bytes as a TF_CONFIG."""
    text = data.decode("utf-8", "surrogateescape")
    resolver = TfConfig()
    with contextlib.suppress(*REFUSED):
        if resolver.is_present({"TF_CONFIG": text}):
            resolver.read({"TF_CONFIG": text})


def scheduler(data: bytes) -> None:
    """Read bytes as the environment that a scheduler or a launcher makes."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    environ = {name: line for name, line in zip(VARIABLES, lines, strict=False) if line}
    with contextlib.suppress(*REFUSED):
        understood(environ)


def hosts_file(data: bytes) -> None:
    """Read bytes as a file that names hosts."""
    path = folder("hosts") / "hosts.txt"
    path.write_bytes(data)
    with contextlib.suppress(*REFUSED):
        HostsFile(path, lambda name: name == "host1").read({})


def _facts() -> HostFacts:
    return HostFacts.here(resolve("cpu")[0], "work")


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection on loopback: channels set options that other sockets do not have."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


TARGETS: dict[str, Callable[[bytes], None]] = {
    "parameter_server": parameter_server,
    "join_message": join_message,
    "join_handshake": join_handshake,
    "peer_datagram": peer_datagram,
    "tf_config": tf_config,
    "scheduler": scheduler,
    "hosts_file": hosts_file,
}


def _join() -> bytes:
    body = {"kind": "join", "nonce": "00", "facts": dataclasses.asdict(_facts()), "proof": "00", "again": ""}
    return json.dumps(body).encode()


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + bytes(32) + body


_TF = b'{"cluster": {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "task": {"type": "worker", "index": 0}}'
SEEDS: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "parameter_server": lambda: tuple(
        messages.encode(one)
        for one in (
            messages.Hello(bytes(16)),
            messages.JoinRequest("worker", 1, "a:1", 2),
            messages.WorkPart(1, 2, 3, 4, 5, [0.1]),
            messages.Delivered(1, 2, 0.5, 4.0, 1.0, 0),
        )
    ),
    "join_message": lambda: (_join(), b'{"kind": "beat"}', b'{"kind": "hello", "nonce": "00"}'),
    "join_handshake": lambda: (b"\0" + _join(), b"\1" + _framed(b'{"kind": "beat"}') * 2),
    "peer_datagram": lambda: (b"b\x001\0" + JoinToken(b"x" * 32).prove("peer", "salt", "b", "a", "1").encode(), b""),
    "tf_config": lambda: (_TF,),
    "scheduler": lambda: tuple(
        "\n".join(values.get(name, "") for name in VARIABLES).encode()
        for values in (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
            {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]",
             "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0"},
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        )
    ),
    "hosts_file": lambda: (b"host1 slots=2\n# a comment\nhost2:4\n", b"host1\nhost2\n"),
}  # fmt: skip
"""Good inputs to begin with, by target; made when they are asked for."""
