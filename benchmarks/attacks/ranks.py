"""Attacks on the ranks of a job, by a process of the same machine that knows no key and no token.

The attacker of a running job is forked from the same engine as its ranks, which only saves the time to import torch: it
uses nothing but the list of listening ports, which every process can read, and leaves other programs' ports alone.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from manyhands.core import ManyhandsError, RunError
from manyhands.distributed import ObjectGather, RankKey, World, resolve
from manyhands.distributed.network import listen
from manyhands.launcher import LocalEngine
from manyhands.launcher.joining.channel import MAX_MESSAGE, Channel, JoinTimeouts
from manyhands.launcher.joining.handshake import HostFacts, introduce
from manyhands.launcher.joining.listener import JoinListener
from manyhands.launcher.joining.token import JoinToken
from manyhands.testing import Faults, run_threads

from .outcome import Outcome

JOB_SECONDS = 20.0
ATTACK_SECONDS = 6.0
STEPS = 20
JOIN_TRIES = 5
"""A host with the right token whose connection is closed more often than that is kept out."""
IDLE_CONNECTIONS = 32
PAIRS = 8
ADDRESS_BYTES = 170
"""The length of an address as gloo writes it into the store."""


def impersonate_rank(engine: LocalEngine) -> Outcome:
    """Take the place of rank 1 in the store, and send a pickle that creates a file where it is opened."""
    return _against_job(engine, "impersonate_rank", _take_place)


def preset_store_keys(engine: LocalEngine) -> Outcome:
    """Write addresses and marks into the store before the ranks do; the job must not notice."""
    return _against_job(engine, "preset_store_keys", _preset, must_complete=True)


def inject_into_listeners(engine: LocalEngine) -> Outcome:
    """Connect to every port of gloo as soon as it listens, and claim each pair of ranks."""
    return _against_job(engine, "inject_into_listeners", _claim_pairs)


def fuzz_ports(engine: LocalEngine) -> Outcome:
    """Send random bytes to every port that a running job listens on."""
    return _against_job(engine, "fuzz_ports", _send_garbage, must_complete=True)


def replay_message() -> Outcome:
    """Send a message of objects a second time: in the next exchange of its group, and in another group."""
    reasons = _tampered(_again, groups=("whole", "whole")) + _tampered(_again)
    return Outcome("replay_message", len(reasons) < 2, "; ".join(reasons))


def flip_bits() -> Outcome:
    """Change single bits of messages of objects: in the length, the code and the content, of short and of long ones."""
    places = [(place, 10) for place in (0, 3, 8, 39, 40, 60)] + [(5000, 9000)]
    reasons = [reason for place, size in places for reason in _tampered(partial(_flipped, place=place), size)]
    return Outcome("flip_bits", len(reasons) < len(places), "; ".join(dict.fromkeys(reasons)))


def fill_join_port() -> Outcome:
    """Hold idle and slow connections to the port where hosts join, while a host with the right token joins."""
    token, said, joined = JoinToken(secrets.token_bytes(32)), list[str](), threading.Event()
    listener = listen("127.0.0.1")
    where = listener.getsockname()
    desk = JoinListener(listener, token, partial(_facts, "first"), 2, said.append, JOB_SECONDS)
    gathering = threading.Thread(target=desk.gather)
    dripping = threading.Thread(target=_drip, args=(where, joined))
    gathering.start()
    dripping.start()
    began = time.monotonic()
    try:
        tries = _join(where, token, joined)
        gathering.join()
    finally:
        seconds = time.monotonic() - began
        joined.set()
        dripping.join()
        desk.close("")
    reason = "; ".join(dict.fromkeys(text for text in said if "no join" in text)) or "idle connections were closed"
    detail: dict[str, float | str] = {"seconds": round(seconds, 2), "tries": float(tries)}
    return Outcome("fill_join_port", tries > JOIN_TRIES, reason, detail)


# -- a job under attack ---------------------------------------------------------------------------------------------


class _Evil:
    """Creates a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (pathlib.Path(self._path),)


def _work(world: World) -> list[float]:
    """What the attacked job computes."""
    found = []
    for step in range(STEPS):
        total = sum(world.gather_objects(world.rank * step))
        tensor = torch.full((4,), float(world.rank + step))
        world.all_reduce(tensor)
        found.append(total + float(tensor.sum()))
        time.sleep(0.02)
    world.mark("finished")
    world.wait_for("finished")
    return found


def _expected() -> list[float]:
    return [step + 4.0 * (2 * step + 1) for step in range(STEPS)]


def _against_job(
    engine: LocalEngine, name: str, attack: Callable[[pathlib.Path], str], *, must_complete: bool = False
) -> Outcome:
    """Start an attacker, then a job on two ranks; say what came of both.

    The attack has succeeded where its code was executed, where results are wrong or where the job ends without reason;
    with `must_complete` also where it ends at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "target").write_text(str(os.getpid()))
        attacker = engine.start(lambda world: attack(path), resolve("cpu")[0], timeout=60)
        said: list[Any] = []
        watching = threading.Thread(target=lambda: _waited(attacker, said))
        watching.start()
        try:
            while not (path / "ready").exists() and watching.is_alive():
                time.sleep(0.01)
            began = time.monotonic()
            # Where it must complete, its second rank may come late on a busy machine.
            timeout = 3 * JOB_SECONDS if must_complete else JOB_SECONDS
            job = engine.start(_work, resolve("cpu*2")[0], timeout=timeout)
            results, reason = _outcome(job)
            seconds = time.monotonic() - began
        finally:
            (path / "stop").touch()
            watching.join()
        executed = (path / "executed").exists()
        is_wrong = results is not None and results != [_expected()] * 2
        if results is not None and not is_wrong:
            reason = "the job was not affected: it completed with the right results"
        detail: dict[str, float | str] = {"seconds": round(seconds, 2), "completed": float(results is not None)}
        detail |= {"code_executed": float(executed), "attacker": str(said[0])[:500] if said else ""}
        is_stopped = results is None and (must_complete or not reason)
        return Outcome(name, executed or is_wrong or is_stopped, reason, detail)


def _outcome(job: Any) -> tuple[list[Any] | None, str]:
    try:
        return job.wait(lambda rank, entry: None, lambda *line: None), ""
    except ManyhandsError as error:
        return None, str(error).splitlines()[0]


def _waited(job: Any, said: list[Any]) -> None:
    try:
        said += job.wait(lambda rank, entry: None, lambda *line: None)
    except Exception as error:
        said.append(error)


def _new_ports(folder: pathlib.Path, seconds: float = ATTACK_SECONDS) -> Iterator[int]:
    """Ports of the attacked program that begin to listen, as soon as they do, until the attack ends.

    Ports of other programs on this machine are left alone.
    """
    target = int((folder / "target").read_text())
    known = set(_listening())
    (folder / "ready").touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (folder / "stop").exists():
        for inode, port in _listening().items():
            if inode not in known:
                known.add(inode)
                if f"socket:[{inode}]" in _sockets_of(target):
                    yield port
        time.sleep(0.0002)


def _listening() -> dict[str, int]:
    """The ports of this machine that listen, by the inodes of their sockets: every process may read them."""
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[9]: int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}


def _sockets_of(target: int) -> set[str]:
    """What the files of a process, and of those that it has started, are."""
    found = set()
    for process in [psutil.Process(target), *psutil.Process(target).children(recursive=True)]:
        for file in pathlib.Path(f"/proc/{process.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(file))
    return found


def _store_at(port: int, timeout: float = 3.0) -> dist.TCPStore | None:
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError):
        return None


class _Overwriting(dist.Store):
    """A view of the ranks' store that writes its values again and again, over those of the true rank."""

    def __init__(self, store: dist.TCPStore) -> None:
        super().__init__()
        self._store, self.written = store, {}  # type: ignore[var-annotated]

    def set(self, key: str, value: Any) -> None:
        self.written[key] = value
        self._store.set(key, value)

    def insist(self, folder: pathlib.Path) -> None:
        """Write everything once more, until the attack ends."""
        store = _store_at(self._store.port)
        while store is not None and not (folder / "stop").exists():
            for key, value in list(self.written.items()):
                with contextlib.suppress(RuntimeError):
                    store.set(key, value)
            time.sleep(0.001)

    def get(self, key: str) -> bytes:
        # A signature in front of the address does not help to read it.
        return self._store.get(key)[-ADDRESS_BYTES:]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timedelta(seconds=ATTACK_SECONDS))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def _take_place(folder: pathlib.Path) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for port in _new_ports(folder):
        if (real := _store_at(port)) is not None:
            return _as_rank_1(folder, real)
    return "no store was found"


def _as_rank_1(folder: pathlib.Path, real: dist.TCPStore) -> str:
    store = _Overwriting(real)
    insisting = threading.Thread(target=store.insist, args=(folder,))
    insisting.start()
    limit = timedelta(seconds=ATTACK_SECONDS)
    try:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("generation0", store), rank=1, world_size=2, timeout=limit
        )
        dist.new_group(timeout=limit)
        store.set("ports0/0/1", "0")
        _ = dist.isend(torch.zeros(32, dtype=torch.uint8), 0)
        for _ in range(3):
            dist.all_gather_object([None, None], _Evil(str(folder / "executed")))
        return "took the place of rank 1"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        while not (folder / "stop").exists():
            time.sleep(0.01)
        insisting.join()


def _preset(folder: pathlib.Path) -> str:
    """Values of every name that ranks will look up, written once, before they come."""
    for port in _new_ports(folder):
        if (store := _store_at(port)) is not None:
            groups = ("generation0/0//cpu//0", "generation0/0//1//cpu//0", "ports0/0")
            for key in (*(f"{group}/{rank}" for group in groups for rank in (0, 1)), "marks0/finished"):
                # Only where no rank was faster: to overwrite what a rank has written is another attack.
                store.compare_set(key, "", secrets.token_hex(ADDRESS_BYTES // 2))
            return "wrote every value"
    return "no store was found"


def _claim_pairs(folder: pathlib.Path) -> str:
    held = []
    for port in _new_ports(folder, seconds=2.0):
        for number in range(PAIRS):
            with contextlib.suppress(OSError):
                peer = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                held.append(peer)
                peer.sendall(number.to_bytes(8, "little"))
    for peer in held:
        peer.close()
    return f"{len(held)} connections"


def _send_garbage(folder: pathlib.Path) -> str:
    sent = 0
    for port in _new_ports(folder):
        # When all ranks have found each other: before that it would be another attack.
        time.sleep(0.2)
        for length in (1, 8, 64, 4096, 1 << 16):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as peer:
                peer.sendall(secrets.token_bytes(length))
                sent += 1
    return f"{sent} connections"


# -- the port where hosts join ----------------------------------------------------------------------------------------


def _facts(host: str) -> HostFacts:
    return HostFacts.here(resolve("cpu")[0], "work", host=host)


def _drip(where: tuple[str, int], joined: threading.Event) -> None:
    """Idle connections, and as many that send a byte now and then of a message that never ends."""
    held: list[socket.socket] = []
    end = time.monotonic() + JOB_SECONDS
    while time.monotonic() < end and not joined.wait(0.05):
        for one in list(held):
            try:
                one.send(b"\0" if held.index(one) % 2 == 0 else b"")
            except OSError:
                held.remove(one)
        while len(held) < IDLE_CONNECTIONS and not joined.is_set():
            held.append(socket.create_connection(where, timeout=1.0))
            if len(held) % 2:
                held[-1].sendall(struct.pack("!I", MAX_MESSAGE))
    for one in held:
        one.close()


def _join(where: tuple[str, int], token: JoinToken, joined: threading.Event) -> int:
    """Join as a host does that has the right token; return after how many tries."""
    time.sleep(0.3)
    tries, end = 0, time.monotonic() + JOB_SECONDS
    while time.monotonic() < end:
        tries += 1
        with contextlib.suppress(OSError, RunError):
            channel = Channel(socket.create_connection(where, timeout=2.0), JoinTimeouts(JOB_SECONDS))
            introduce(channel, token, _facts("second"))
            joined.set()
            return tries
        time.sleep(0.1)
    return tries


# -- messages of objects ----------------------------------------------------------------------------------------------


def _tampered(
    change: Callable[[list[torch.Tensor]], torch.Tensor], size: int = 10, groups: tuple[str, str] = ("whole", "other")
) -> list[str]:
    """Exchange two messages between ranks that are threads, the second one changed; return why it was refused, if so.

    `change` gets what rank 0 has received, in order, and returns what it receives instead of the last one.
    """
    key = RankKey.random()

    def rank(world: World) -> None:
        gathers = {group: ObjectGather(key, group, world.rank) for group in groups}
        seen: list[torch.Tensor] = []

        def receive(data: torch.Tensor) -> torch.Tensor:
            seen.append(world.all_gather(data))
            is_last = number == 1 and (size < 1000 or data.numel() > 5000)
            return change(seen) if world.is_first and is_last else seen[-1]

        for number in (0, 1):
            gathers[groups[number]]("x" * size, receive)

    found = run_threads(rank, 2, faults=Faults())[0]
    return [str(found)] if isinstance(found, ManyhandsError) else []


def _again(seen: list[torch.Tensor]) -> torch.Tensor:
    """Rank 1's first message in place of its last."""
    return torch.stack([seen[-1][0], seen[0][1]])


def _flipped(seen: list[torch.Tensor], place: int) -> torch.Tensor:
    changed = seen[-1].clone()
    changed[1, place] ^= 1
    return changed
