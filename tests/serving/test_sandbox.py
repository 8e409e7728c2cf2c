"""The process of a replica is the boundary: what runs in it reaches nothing and harms neither server nor others."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from benchmarks.attacks import models
from torch import Tensor

from manyhands.core import ArchiveError, Predictor, Signature, TensorSpec
from manyhands.distributed import Device, resolve
from manyhands.launcher import LocalEngine
from manyhands.serving.replica import ServingReplica
from manyhands.serving.replica_process import REPLY, Exported
from manyhands.serving.replica_rendezvous import ReplicaRendezvous
from manyhands.serving.sandbox import Sandbox
from manyhands.serving.slots import ReplicaSlots, SlotLayout

from .conftest import Start, publish
from .test_versions import Moody, until

SECRET = "a-secret-that-no-model-may-read-4711"


def _syscall(*arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(*(ctypes.c_long(one) for one in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return int(result)


ESCAPES: dict[str, Callable[[Escaping], Any]] = {
    "reads /etc/passwd": lambda self: Path("/etc/passwd").read_text(),
    "reads another model": lambda self: Path(self.other).read_text(),
    "lists the folder of models": lambda self: os.listdir(Path(self.other).parent),
    "reads the server's environment": lambda self: Path(f"/proc/{self.server}/environ").read_bytes(),
    "reads the server's memory": lambda self: Path(f"/proc/{self.server}/maps").read_text(),
    "reads its own environment": lambda self: os.environ["MANYHANDS_TEST_SECRET"],
    "writes a file": lambda self: Path(self.other).write_text("x"),
    "writes a temporary file": lambda self: Path("/tmp/manyhands-escaped").write_text("x"),
    "connects over TCP": lambda self: socket.create_connection(("127.0.0.1", self.port), 2),
    "opens a Unix socket": lambda self: socket.socket(socket.AF_UNIX),
    "executes a program": lambda self: subprocess.run(["/bin/true"], check=True),
    "executes in place": lambda self: os.execv("/bin/true", ["true"]),
    "forks": lambda self: os.fork(),
    "signals the server": lambda self: os.kill(self.server, 0),
    "signals by thread": lambda self: _syscall(234, self.server, self.server, 0),
    "signals by pidfd": lambda self: os.pidfd_open(self.server),
    "traces the server": lambda self: _syscall(101, 16, self.server, 0, 0),
    "reads memory of the server": lambda self: _syscall(310, self.server, 0, 0, 0, 0, 0),
    "makes a namespace": lambda self: _syscall(272, 0x10000000),
    "slows the server": lambda self: os.sched_setaffinity(self.server, {0}),
    "raises its limits": lambda self: _syscall(
        302, 0, 2, ctypes.addressof(ctypes.create_string_buffer(b"\xff" * 16)), 0
    ),
    "allocates ten times its limit": lambda self: torch.ones(10 * self.memory // 4).sum(),
    "allocates ten times its limit in parts": lambda self: [torch.ones(self.memory // 40) for _ in range(100)],
    "inherits descriptors": lambda self: _more_than_four(os.listdir("/proc/self/fd")),
}


def _more_than_four(names: list[str]) -> list[str]:
    """Standard streams, the socket to the server, and the list itself."""
    if len(names) <= 5:
        raise OSError("none")
    return names


@dataclass(frozen=True)
class Escaping:
    """A source that, in the sandbox of an exported model, tries everything and reports what worked as its error."""

    path: Path
    other: str
    port: int
    memory: int = 256 << 20
    server: int = field(default_factory=os.getpid)
    compiles: bool = False
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        return Exported(self.path, memory=self.memory).sandbox(device, group)

    def open(self, device: str) -> Predictor:
        assert list(self.path.iterdir()), "the model itself can be read"
        assert float(torch.ones(100, 100).matmul(torch.ones(100, 100)).sum()) == 1e6
        escaped = {}
        for name, attempt in ESCAPES.items():
            try:
                attempt(self)
                escaped[name] = "worked"
            except (OSError, KeyError, RuntimeError, ValueError, MemoryError):
                continue
        raise ArchiveError(json.dumps({"escaped": escaped, "tried": len(ESCAPES)}))


def test_code_in_a_replica_reaches_nothing(
    engine: LocalEngine, adder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_TEST_SECRET", SECRET)
    other = tmp_path / "other.json"
    other.write_text("secret")

    async def start(device: Device, port: int) -> None:
        meeting = ReplicaRendezvous()
        try:
            await ServingReplica.start(engine, meeting, Escaping(adder, str(other), port), device, (1,), quietly=False)
        finally:
            meeting.close()

    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ArchiveError) as caught:
        asyncio.run(start(resolve("cpu")[0][0], listening.getsockname()[1]))
    assert json.loads(str(caught.value)) == {"escaped": {}, "tried": len(ESCAPES)}
    assert other.read_text() == "secret"


SEARCH = """
import sys
from manyhands.serving.sandbox import Sandbox
first, second = (part[::-1].encode() for part in sys.argv[1:])
Sandbox().enter()
found = []
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in list(maps):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1][0] == "r" and not line.split()[-1].startswith(("[v", "/")):
            memory.seek(start)
            held = memory.read(end - start) or b""
            at = held.find(first)
            while at >= 0:
                found += [line] if held[at + len(first) : at + 2 * len(first)] == second else []
                at = held.find(first, at + 1)
            del held
print("found", len(found))
"""


def test_the_environment_of_a_program_is_wiped_from_the_memory_of_its_replicas() -> None:
    """In a program of its own, whose first environment holds the secret; it searches all of its memory."""
    first, second = secrets.token_hex(12), secrets.token_hex(12)
    environ = {**os.environ, "MANYHANDS_TEST_SECRET": first + second, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SEARCH, first[::-1], second[::-1]]
    made = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert made.stdout == "found 0\n", made.stderr


def test_memory_that_is_shared_with_a_replica_cannot_be_truncated() -> None:
    signature = Signature({"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, 2))})
    slots, fd = ReplicaSlots.create(SlotLayout(signature, 4))
    try:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.truncate(fd, size)
    finally:
        os.close(fd)
    for shape in ((3,), (-2,), (2, 1)):
        with pytest.raises(ValueError, match=r"must be float32\[\*, 2\]|zip"):
            slots.outputs(0, 1, [shape])


class Liar(Predictor):
    """Says something else on the socket to its server, once it is asked for that."""

    signature = Moody.signature

    def __init__(self, message: bytes) -> None:
        self.message = message

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if inputs["x"].any():
            for name in os.listdir("/proc/self/fd"):
                try:
                    sock = socket.socket(fileno=os.dup(int(name)))
                    if sock.type == socket.SOCK_SEQPACKET:
                        sock.send(self.message)
                except OSError:
                    continue
        return {"y": inputs["x"] + 1}


LIES = {
    "slot": REPLY.pack(77, 0, 0) + struct.pack("<q", 1),
    "shape": REPLY.pack(1, 0, 0) + struct.pack("<q", -(2**62)),
    "other-shape": REPLY.pack(1, 0, 0) + struct.pack("<q", 2**40),
    "short": b"\0",
}


def ask(url: str, model: str, rows: list[list[float]], **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/models/{model}:predict", json={"inputs": rows}, timeout=60, **options)


def test_a_replica_that_tells_nonsense_is_replaced_and_others_serve_on(start: Start) -> None:
    liars = {f"liar-{name}": Liar(message) for name, message in LIES.items()}
    server = start({"moody": Moody(), **liars})
    for name in liars:
        assert ask(server.url, name, [[1.0]]).status_code == 500
        assert ask(server.url, "moody", [[1.0]]).json()["outputs"] == [[2.0]]
        assert until(lambda name=name: ask(server.url, name, [[0.0]]).status_code == 200)


@pytest.fixture(scope="module")
def hostile(adder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an honest model, hostile ones that load, and two that must not take over."""
    root = tmp_path_factory.mktemp("hostile")
    publish(adder, root / "adder", 2)
    for build in (models.allocates, models.computes_long, models.raises, models.wrong_shape, models.wrong_dtype):
        build(root / build.__name__)
    models.FORGERIES["read_by_reshape_alias"](root / "reader")
    models.FORGERIES["changes_a_weight"](root / "changer")
    return root


def test_hostile_models_harm_themselves_alone(
    hostile: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.serving.replica.STUCK_SECONDS", 0.5)
    server = start(hostile, log=tmp_path / "log", timeout=2.0)
    state = {one["name"]: one["versions"][0] for one in server.state()["models"]}

    def is_honest_served() -> bool:
        return bool(ask(server.url, "adder", [[1.0, 2.0, 3.0]]).json()["outputs"] == [[3.0, 4.0, 5.0]])

    refused = {name: one["error"] for name, one in state.items() if one["state"] != "AVAILABLE"}
    assert set(refused) == {"wrong_shape", "wrong_dtype", "reader", "changer"}
    assert "must be float32[*, 9]" in refused["wrong_shape"]
    assert "must be float32[*, 4]" in refused["wrong_dtype"]
    assert "aten._reshape_alias.default" in refused["reader"]
    assert "changes a weight" in refused["changer"]
    assert is_honest_served()

    answer = ask(server.url, "raises", [[9.0, 0.0, 0.0, 0.0]])
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("the model failed: raises version 1, error ")
    number = answer.json()["error"].split("error ")[1].split()[0]
    events = [json.loads(line) for line in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    (detail,) = [one["detail"] for one in events if one["kind"] == "model_failed" and one["error"] == number]
    assert "narrow" in detail or "length" in detail
    layers = [one["sandbox"] for one in events if one["kind"] == "replica_protected"]
    assert layers
    assert all("landlock" in one and "seccomp" in one for one in layers)

    assert ask(server.url, "allocates", [[2.0**37, 0.0, 0.0, 0.0]]).status_code == 500
    assert is_honest_served()
    assert ask(server.url, "allocates", [[2.0, 0.0, 0.0, 0.0]]).json()["outputs"] == [[4.0, 2.0, 2.0, 2.0]]

    assert ask(server.url, "computes_long", [[4096.0, 0.0, 0.0, 0.0]]).status_code in (503, 504)
    assert is_honest_served()


def test_a_model_that_kills_its_process_again_and_again_is_restarted_ever_later(start: Start, tmp_path: Path) -> None:
    server = start({"moody": Moody(), "other": Moody()}, log=tmp_path)
    for _ in range(2):
        assert ask(server.url, "moody", [[666.0]]).status_code == 500
        assert ask(server.url, "other", [[1.0]]).json()["outputs"] == [[2.0]]
    (version,) = [one for one in server.state()["models"] if one["name"] == "moody"]
    assert version["versions"][0]["state"] == "AVAILABLE"
    assert until(lambda: ask(server.url, "moody", [[1.0]]).status_code == 200)
    losses = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(one["kind"] == "replica_lost" and one["model"] == "moody" for one in losses) >= 4


def test_backoff_doubles_while_replicas_are_lost_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.serving import version as module

    lost = module.Version.__new__(module.Version)
    lost._losses = {}
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    device = resolve("cpu")[0][0]
    assert [lost._backoff(device) for _ in range(4)] == [0.0, 0.1, 0.2, 0.4]
    now[0] = module.CALM_SECONDS
    assert lost._backoff(device) == 0.0
