"""The replica process as security boundary: its code reaches nothing outside and harms no other process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from benchmarks.attacks import models
from torch import Tensor

from manyhands.core import ArchiveError, Predictor, RunError, Signature, TensorSpec
from manyhands.distributed import Device, resolve
from manyhands.launcher import LocalEngine
from manyhands.serving import Replicas
from manyhands.serving.compute import REFUSED, REPLY
from manyhands.serving.replica import ServingReplica
from manyhands.serving.replica_process import Exported
from manyhands.serving.replica_rendezvous import ReplicaRendezvous
from manyhands.serving.sandbox import MAX_FILE_BYTES, MAX_TASKS, Sandbox, make_folder
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
    "inherits descriptors": lambda self: _unexpected(os.listdir("/proc/self/fd")),
    "has capabilities": lambda self: _more_than_reading(Path("/proc/self/status").read_text()),
    "may gain privileges": lambda self: _may_gain_privileges(Path("/proc/self/status").read_text()),
}


def _unexpected(names: list[str]) -> list[str]:
    """Standard streams, the socket to the server, the pipe that ends with the server, and the list itself."""
    if len(names) <= 6:
        raise OSError("none")
    return names


def _more_than_reading(status: str) -> str:
    """Return the capabilities of a process if they are more than reading files of other users (bit 2)."""
    held = re.findall(r"Cap(?:Inh|Prm|Eff|Amb):\s*([0-9a-f]+)", status)
    if len(held) == 4 and not any(int(one, 16) & ~(1 << 2) for one in held):
        raise OSError("none")
    return status


def _may_gain_privileges(status: str) -> str:
    if re.search(r"NoNewPrivs:\s*1", status):
        raise OSError("it may not")
    return status


@dataclass(frozen=True)
class Escaping:
    """A source that, in the sandbox of an exported model, tries everything and reports what worked as its error."""

    path: Path
    other: str
    port: int
    memory: int = 256 << 20
    server: int = field(default_factory=os.getpid)
    compiles: bool = False
    kind: str = "predictor"
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


def test_sandboxed_replica_cannot_escape(
    engine: LocalEngine, adder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_TEST_SECRET", SECRET)
    other = tmp_path / "other.json"
    other.write_text("secret")

    async def start(device: Device, port: int) -> None:
        rendezvous = ReplicaRendezvous()
        try:
            await ServingReplica.start(
                engine, rendezvous, Escaping(adder, str(other), port), device, (1,), quietly=False
            )
        finally:
            rendezvous.close()

    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ArchiveError) as caught:
        asyncio.run(start(resolve("cpu")[0][0], listening.getsockname()[1]))
    assert json.loads(str(caught.value)) == {"escaped": {}, "tried": len(ESCAPES)}
    assert other.read_text() == "secret"


@dataclass(frozen=True)
class WritingIntoPipes(Escaping):
    """A source that opens every pipe of its process again for writing: the kernel kills its readers then."""

    def open(self, device: str) -> Predictor:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.write(os.open(f"/proc/self/fd/{name}", os.O_WRONLY | os.O_NONBLOCK), b"x")
        raise ArchiveError("no pipe could be written")


def test_replica_cannot_kill_other_replicas_through_the_pipe_that_ends_them(engine: LocalEngine, adder: Path) -> None:
    async def start() -> bool:
        rendezvous, device = ReplicaRendezvous(), resolve("cpu")[0][0]
        honest = await ServingReplica.start(engine, rendezvous, Exported(adder), device, (1,), quietly=False)
        try:
            source = WritingIntoPipes(adder, "", 0)
            with pytest.raises((RunError, ArchiveError)):
                await ServingReplica.start(engine, rendezvous, source, device, (1,), quietly=False)
            return psutil.Process(honest.pid).status() != psutil.STATUS_ZOMBIE
        finally:
            honest.close()
            rendezvous.close()

    assert asyncio.run(start())


def _limit_of(pid: int) -> int:
    """Sets the limit of open files of another process to what it is."""
    limits = ctypes.create_string_buffer(16)
    ctypes.CDLL(None).prlimit(os.getpid(), 7, None, limits)
    return _syscall(302, pid, 7, ctypes.addressof(limits), 0)


def _spawn_many(num: int) -> int:
    """Starts processes that sleep and print, until there are many more than may be; returns how many there were."""
    pids = []
    try:
        for _ in range(num):
            pid = os.fork()
            if pid == 0:
                while True:
                    os.write(1, b"still here\n")
                    time.sleep(0.05)
            pids.append(pid)
    except OSError:
        return len(pids)
    raise AssertionError("there is no limit")


def _write_sparse(size: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)


def _nest(depth: int) -> str:
    """Folders so deep that removing them recursively fails, and a link that leads out."""
    os.chdir(tempfile.mkdtemp())
    os.symlink("/", "link")
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    return tempfile.gettempdir()


COMPILING_ESCAPES: dict[str, Callable[[CompilingEscaping], Any]] = {
    "signals the server": lambda self: os.kill(self.server, 0),
    "signals its own process group": lambda self: os.kill(0, 0),
    "signals a process of the user": lambda self: os.kill(self.victim, signal.SIGKILL),
    "signals by thread": lambda self: _syscall(234, self.victim, self.victim, signal.SIGKILL),
    "sets limits of another process": lambda self: _limit_of(self.victim),
    "sets its own limits": lambda self: _syscall(
        302, 0, 1, ctypes.addressof(ctypes.create_string_buffer(b"\xff" * 16)), 0
    ),
    "makes a namespace of users": lambda self: _syscall(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
    "makes a sibling": lambda self: _syscall(56, 0x00008000 | signal.SIGCHLD, 0, 0, 0, 0),
    "writes a large sparse file": lambda self: _write_sparse(1 << 40),
    "writes beyond its largest file": lambda self: _write_sparse(MAX_FILE_BYTES + 1),
    "writes beside its folder": lambda self: Path("/tmp/manyhands-escaped").write_text("x"),
    "opens a Unix socket": lambda self: socket.socket(socket.AF_UNIX),
    "sends a datagram to a Unix socket": lambda self: _send_datagram(self.listening, socket.SOCK_DGRAM),
    "sends a datagram by a raw pair": lambda self: _send_datagram(self.listening, socket.SOCK_RAW),
    "leaves its process group": lambda self: _left(os.getpgid(0)),
}


def _send_datagram(path: str, kind: int) -> None:
    """Needs no socket() and no connect(), which are refused."""
    for one in socket.socketpair(socket.AF_UNIX, kind):
        one.sendto(b"escaped", path)


def _left(before: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.setpgid(0, 0)
        os._exit(int(os.getpgid(0) != before))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        raise OSError("it is still in it")


@dataclass(frozen=True)
class CompilingEscaping:
    """A source that, in the sandbox of a model that may be compiled, tries what the wider list could allow."""

    path: Path
    victim: int
    listening: str
    server: int = field(default_factory=os.getpid)
    compiles: bool = True
    kind: str = "predictor"
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        return Exported(self.path, replicas=Replicas(compile=True)).sandbox(device, group)

    def open(self, device: str) -> Predictor:
        subprocess.run(["/bin/true"], check=True, start_new_session=True)
        for one in socket.socketpair():
            one.close()
        escaped = []
        for name, attempt in COMPILING_ESCAPES.items():
            try:
                attempt(self)
                escaped.append(name)
            except OSError:
                continue
        folder = _nest(2000)
        told = {"escaped": escaped, "folder": folder, "group": os.getpgid(0), "pid": os.getpid()}
        told["num"] = _spawn_many(4 * MAX_TASKS)
        raise ArchiveError(json.dumps(told))


def test_compiling_replica_cannot_escape_and_leaves_no_processes_or_files(
    engine: LocalEngine, adder: Path, tmp_path: Path
) -> None:
    listening = str(tmp_path / "socket")

    async def start(device: Device, victim: int) -> None:
        rendezvous = ReplicaRendezvous()
        try:
            source = CompilingEscaping(adder, victim, listening)
            await ServingReplica.start(engine, rendezvous, source, device, (1,), quietly=False)
        finally:
            rendezvous.close()

    zygote = engine.warm_up()._process
    with subprocess.Popen(["/bin/sleep", "600"]) as victim, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(listening)
        try:
            with pytest.raises(ArchiveError) as caught:
                asyncio.run(start(resolve("cpu")[0][0], victim.pid))
            assert victim.poll() is None
        finally:
            victim.kill()
    told = json.loads(str(caught.value))
    assert told["escaped"] == []
    assert 0 < told["num"] < MAX_TASKS
    assert told["group"] == told["pid"]
    # The processes that it left, and the folder, go with the replica.
    until(lambda: not [one for one in psutil.process_iter() if _group_of(one.pid) == told["group"]])
    until(lambda: not os.path.lexists(told["folder"]))
    # The process that starts all replicas is still the same.
    assert engine.warm_up()._process is zygote
    assert Path("/usr").is_dir()


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_temporary_folder_of_a_killed_replica_is_removed(
    engine: LocalEngine, adder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr("manyhands.serving.replica.make_folder", lambda: made.append(make_folder()) or made[-1])

    @dataclass(frozen=True)
    class Compiling:
        """A predictor that is not compiled, in the sandbox of one that may be."""

        compiles: bool = False
        kind: str = "predictor"
        patience: float = 60.0

        def sandbox(self, device: Device, group: str) -> Sandbox | None:
            return Exported(adder, replicas=Replicas(compile=True)).sandbox(device, group)

        def open(self, device: str) -> Predictor:
            Path(tempfile.gettempdir(), "made").write_text("x")
            return Moody()

    async def run() -> None:
        rendezvous = ReplicaRendezvous()
        try:
            device = resolve("cpu")[0][0]
            replica = await ServingReplica.start(engine, rendezvous, Compiling(), device, (1,), quietly=False)
            assert (Path(made[0]) / "made").exists()
            os.kill(replica.pid, signal.SIGKILL)
            await replica.ended()
        finally:
            rendezvous.close()

    asyncio.run(run())
    assert len(made) == 1
    assert not os.path.lexists(made[0])


LIMITED = """
import os, sysconfig
from manyhands.serving.sandbox import Sandbox
sysconfig.get_paths()  # That user may not be able to read Python's files.
os.setgid(65534); os.setuid(65534)
protection = Sandbox(compiles=True, folder=os.environ["FOLDER"]).enter()
pids = []
try:
    while len(pids) < 4 * MAX:
        pid = os.fork()
        if pid == 0:
            os.read(0, 1)
            os._exit(0)
        pids.append(pid)
except BlockingIOError:
    pass
print(len(pids), str(protection))
"""


@pytest.mark.root
def test_process_count_is_limited_without_a_cgroup(tmp_path: Path) -> None:
    """As another user, to whom RLIMIT_NPROC applies; its processes wait for the end of their input."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    environ = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    code = LIMITED.replace("MAX", str(MAX_TASKS))
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        num, _, layers = process.stdout.readline().partition(" ")
        process.communicate()
    # Threads by which the number of tasks was found may have counted.
    assert 0 < int(num) < 2 * MAX_TASKS
    assert "RLIMIT_NPROC" in layers


LINKED = """
import os, sys
from manyhands.serving.sandbox import Sandbox
Sandbox(reads=(sys.argv[1],)).enter()
try:
    print("read", len(os.listdir(sys.argv[2])))
except PermissionError:
    print("refused")
"""


def test_model_folder_replaced_by_a_link_gives_the_replica_no_access(tmp_path: Path) -> None:
    """Between the scan of a folder and the start of a replica, a model's author may put a link in its place."""
    private, version = tmp_path / "private", tmp_path / "1"
    private.mkdir()
    for make, answer in ((version.mkdir, "read 0"), (lambda: version.symlink_to(private), "refused")):
        make()
        where = version if answer == "read 0" else private
        done = subprocess.run(
            [sys.executable, "-c", LINKED, str(version), str(where)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == answer, done.stderr
        if answer == "read 0":
            version.rmdir()


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


def test_parent_environment_is_erased_from_replica_memory() -> None:
    """In a program of its own, whose first environment holds the secret; it searches all of its memory."""
    first, second = secrets.token_hex(12), secrets.token_hex(12)
    environ = {**os.environ, "MANYHANDS_TEST_SECRET": first + second, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SEARCH, first[::-1], second[::-1]]
    made = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert made.stdout == "found 0\n", made.stderr


def test_shared_memory_of_a_replica_cannot_be_truncated() -> None:
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


def test_replica_that_violates_the_protocol_is_replaced(start: Start) -> None:
    liars = {f"liar-{name}": Liar(message) for name, message in LIES.items()}
    server = start({"moody": Moody(), **liars})
    for name in liars:
        assert ask(server.url, name, [[1.0]]).status_code == 500
        assert ask(server.url, "moody", [[1.0]]).json()["outputs"] == [[2.0]]
        assert until(lambda name=name: ask(server.url, name, [[0.0]]).status_code == 200)


class ExportedLiar(Exported):
    """An exported model whose author controls its process: it says that the request is invalid, with a text."""

    def open(self, device: str) -> Predictor:
        return Liar(REPLY.pack(1, REFUSED, 0) + b"a text of the author")


def test_sandboxed_replica_cannot_choose_the_text_of_a_refusal(
    adder: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.serving.version_loader.Exported", ExportedLiar)
    publish(adder, tmp_path / "models" / "liar", 1)
    server = start(tmp_path / "models", log=tmp_path / "log")
    answer = ask(server.url, "liar", [[1.0]])
    assert answer.status_code == 500
    assert "author" not in answer.text
    assert "a text of the author" in (tmp_path / "log" / "events.jsonl").read_text()


@pytest.fixture(scope="module")
def hostile(adder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an honest model, hostile ones that load, and two that must not take over."""
    root = tmp_path_factory.mktemp("hostile")
    publish(adder, root / "adder", 2)
    loaded = models.allocates, models.computes_long, models.empties, models.raises
    for build in (*loaded, models.wrong_shape, models.wrong_dtype):
        build(root / build.__name__)
    models.FORGERIES["read_by_reshape_alias"](root / "reader")
    models.FORGERIES["changes_a_weight"](root / "changer")
    return root


def test_hostile_models_do_not_affect_other_models(
    hostile: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.serving.replica.STUCK_SECONDS", 0.5)
    server = start(hostile, log=tmp_path / "log", timeout=2.0)

    def loaded() -> dict[str, Any]:
        state = {one["name"]: one["versions"][0] for one in server.state()["models"]}
        return state if all(one["error"] or one["state"] == "AVAILABLE" for one in state.values()) else {}

    state = until(loaded, 60.0)

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

    assert ask(server.url, "empties", [[2.0**27, 0.0, 0.0, 0.0]]).status_code == 500
    assert is_honest_served()
    assert ask(server.url, "empties", [[3.0, 0.0, 0.0, 0.0]]).json()["outputs"] == [[[], [], []]]

    assert ask(server.url, "computes_long", [[4096.0, 0.0, 0.0, 0.0]]).status_code in (503, 504)
    assert is_honest_served()


def test_crashing_model_is_restarted_while_other_models_are_served(start: Start, tmp_path: Path) -> None:
    server = start({"moody": Moody(), "other": Moody()}, log=tmp_path)
    for _ in range(2):
        assert ask(server.url, "moody", [[666.0]]).status_code == 500
        assert ask(server.url, "other", [[1.0]]).json()["outputs"] == [[2.0]]
    (version,) = [one for one in server.state()["models"] if one["name"] == "moody"]
    assert version["versions"][0]["state"] == "AVAILABLE"
    assert until(lambda: ask(server.url, "moody", [[1.0]]).status_code == 200)
    losses = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(one["kind"] == "replica_lost" and one["model"] == "moody" for one in losses) >= 4


def test_backoff_doubles_after_consecutive_replica_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.serving import version as module

    lost = module.Version.__new__(module.Version)
    lost._losses = {}
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    device = resolve("cpu")[0][0]
    assert [lost._backoff(device) for _ in range(4)] == [0.0, 0.1, 0.2, 0.4]
    now[0] = module.CALM_SECONDS
    assert lost._backoff(device) == 0.0


class Wide(Predictor):
    """Has rows of outputs of any size, which take no memory until they are copied into shared memory."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.signature = Signature(
            {"x": TensorSpec("float32", (None, 1))}, {"y": TensorSpec("float32", (None, self.width))}
        )

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"].expand(-1, self.width)}


@dataclass(frozen=True)
class Confined:
    """A predictor in the sandbox of an exported model, on a machine where no cgroup can be made."""

    predictor: Predictor
    path: Path
    memory: int = 128 << 20
    compiles: bool = False
    kind: str = "predictor"
    patience: float = 60.0

    def sandbox(self, device: Device, group: str) -> Sandbox | None:
        return Exported(self.path, memory=self.memory).sandbox(device, "")

    def open(self, device: str) -> Predictor:
        return self.predictor


def start_confined(engine: LocalEngine, source: Confined, rows: int) -> ServingReplica:
    async def start() -> ServingReplica:
        rendezvous = ReplicaRendezvous()
        try:
            device = resolve("cpu")[0][0]
            replica = await ServingReplica.start(engine, rendezvous, source, device, (rows,), quietly=False)
            replica.close()
            await replica.ended()
            return replica
        finally:
            rendezvous.close()

    return asyncio.run(start())


@pytest.mark.parametrize(
    ("width", "reason"),
    [(1 << 24, "may have 1024 MiB; lower max_rows"), (1 << 21, "took more than 128 MiB of memory while it was loaded")],
)
def test_shared_memory_counts_toward_the_model_memory_limit(
    engine: LocalEngine, adder: Path, width: int, reason: str
) -> None:
    with pytest.raises(RunError, match=reason):
        start_confined(engine, Confined(Wide(width), adder), 32)
    assert start_confined(engine, Confined(Wide(4), adder), 32).pid


class Flooding(Moody):
    """Prints without end, once it is asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            os.write(1, self.data)
        return {"y": inputs["x"] + 1}


FLOODS = {
    "lines": b"\n" * 4096,
    "one line": b"x" * 4096,
    "stack traces": b"error\nframe #0: gloo::transport\n" * 128,
    "frames of stack traces": b"frame #0: gloo::transport\n" * 128,
    "lines like stack traces": b"#0 a" + b" from b" * 9000 + b"\n",
}


@pytest.mark.parametrize("data", FLOODS.values(), ids=FLOODS.keys())
def test_replica_that_floods_its_output_is_killed(engine: LocalEngine, adder: Path, data: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match="SIGKILL"):
        start_confined(engine, Confined(Flooding(data), adder), 1)
    assert time.monotonic() - began < 15
