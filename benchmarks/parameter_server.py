"""Parameter servers: a slow worker among eight, bytes per server, sparse tables, and how much of the transport is left.

`python -m benchmarks.parameter_server [--quick]`. Two cores cannot hold eight workers, so their compute is a sleep by
the number of samples, and one of them takes twice as long. The baseline is `mh.Mirrored(8)`: an all-reduce waits for
the slowest. Bandwidth is that of a network of 64 MiB pushed and pulled, beside bare copies over the same transport.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
import zmq
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import read_events
from manyhands.distributed import Device, World, current_world
from manyhands.launcher import LocalEngine
from manyhands.parameter_server import messages
from manyhands.parameter_server.client import ParameterClient
from manyhands.parameter_server.layout import cut, frames_of, tensor_of
from manyhands.parameter_server.messages import EndOfWork, JoinRequest, Load, Loaded, ServerList
from manyhands.parameter_server.server import ParameterShardServer
from manyhands.parameter_server.shard import ServerShard
from manyhands.parameter_server.shared_memory import SharedSlots
from manyhands.parameter_server.sockets import Caller, MessageListener, new_context, new_token

from .peers import tensorflow_servers
from .report import Check, Report, arguments

WORKERS = 8
BATCH = 128
ROWS, DIM, TABLE_BATCH = 10_000_000, 16, 1024
QUICK_ROWS = 1_000_000
MODES = {
    "all-reduce": mh.Mirrored(WORKERS),
    "servers, synchronous": mh.ParameterServer(servers=2, workers=WORKERS),
    "servers, asynchronous": mh.ParameterServer(servers=2, workers=WORKERS, staleness=None),
    "servers, three steps ahead": mh.ParameterServer(servers=2, workers=WORKERS, staleness=3),
    "servers, one backup worker": mh.ParameterServer(servers=2, workers=WORKERS, backup=1),
}
BASELINE = "all-reduce"
WIDTHS = [784, 1024, 896, 200, 10]
PEER = "TensorFlow 2.21, custom loop"


def main() -> None:
    """Measures all cases."""
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    report = Report("parameter_server", quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speed = straggler(report, folder, quick)
        report.checks["async_with_straggler"] = Check(value=speed["servers, asynchronous"], at_least=1.65)
        report.checks["backup_with_straggler"] = Check(value=speed["servers, one backup worker"], at_least=1.5)
        ratio = bytes_per_server(report, folder)
        report.checks["bytes_per_server_ratio"] = Check(value=ratio, at_most=0.525)
        share, gigabytes = sparse(folder, 10 if quick else 50, QUICK_ROWS if quick else ROWS)
        report.checks["sparse_bytes_ratio"] = Check(value=share, at_most=0.01)
        report.notes["sparse_gib_in_all"] = round(gigabytes, 2)
        shares = transport(report, 12 if quick else 60)
        report.checks["transport_share"] = Check(value=min(shares.values()), at_least=0.6)
        report.notes.update({f"transport_share_{name}": round(value, 3) for name, value in shares.items()})
        if not quick:
            beside_tensorflow(report, folder)
    report.finish()


# -- TensorFlow's servers ---------------------------------------------------------------------------------------------


def beside_tensorflow(report: Report, folder: Path, num_updates: int = 200) -> None:
    """Updates of 1.9 million parameters by two workers that do not wait, here and by TensorFlow's custom loop."""
    theirs = tensorflow_servers.measure(WIDTHS, 64, 1, 2, num_updates)
    ours = asynchronous(folder, num_updates)
    times = {"servers, asynchronous": [ours]}
    if isinstance(theirs, str):
        print(theirs, flush=True)
        report.notes[f"no peer: {theirs}"] = 0.0
    else:
        times[PEER] = [theirs]
        report.notes["updates per second over TensorFlow's"] = round(theirs / ours, 2)
    report.add("2 workers, 1 server, 1.9M parameters", times, PEER if PEER in times else "servers, asynchronous")


def asynchronous(folder: Path, num_updates: int) -> float:
    """Seconds per update of manyhands, in the middle of a run."""
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    count = 64 * (num_updates + 40)
    task = mh.Task(
        model=lambda: nn.Sequential(*layers[:-1]),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        data=(torch.randn(count, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (count,))),
        batch_size=64,
    )
    spec = mh.ParameterServer(servers=1, workers=2, staleness=None)
    run = mh.fit(
        task,
        spec,
        on="cpu*2",
        steps=num_updates + 40,
        folder=folder,
        callbacks=[Clock()],
        options=mh.options.Display(progress=False),
    )
    clocks = [e["values"]["clock"] for e in read_events(run.path / "events.jsonl") if e["kind"] == "log"]
    return float((clocks[-11] - clocks[20]) / (len(clocks) - 31))


# -- a slow worker ----------------------------------------------------------------------------------------------------


def sleepy_loss(model: nn.Module, batch: Any, seconds: float) -> Tensor:
    """A small loss after a sleep by the number of samples, twice as long on the first device."""
    world = current_world()
    if world is not None:
        time.sleep(seconds * len(batch[0]) * (2 if world.rank_info.device.slot == 0 else 1))
    return (model(batch[0]) - batch[1]).square().mean()


class Clock(mh.Callback):
    """Writes down when each step was done."""

    def on_step(self, hand: mh.Hand) -> None:
        """A step is done."""
        hand.log(clock=time.monotonic())


def straggler(report: Report, folder: Path, quick: bool) -> dict[str, float]:
    """Samples per second of every mode, over those of the all-reduce."""
    part = 0.1 if quick else 0.4
    num_steps = 32 if quick else 64
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)),
        loss=functools.partial(sleepy_loss, seconds=part * WORKERS / BATCH),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(torch.randn(BATCH * num_steps, 32), torch.randn(BATCH * num_steps, 1)),
        batch_size=BATCH,
    )
    seconds = {}
    for name, spec in MODES.items():
        if quick and name in ("servers, synchronous", "servers, three steps ahead"):
            continue
        # Asynchronous workers take a whole batch each: their first round is still in step.
        steps = num_steps if spec.staleness is None else num_steps // 2
        run = mh.fit(
            task,
            spec,
            on=f"cpu*{WORKERS}",
            steps=steps,
            folder=folder,
            callbacks=[Clock()],
            options=mh.options.Display(progress=False),
        )
        seconds[name] = seconds_per_step(run, spec.staleness is None)
    report.add("8 workers, one at half speed", {name: [value] for name, value in seconds.items()}, BASELINE)
    return {name: seconds[BASELINE] / value for name, value in seconds.items()}


def seconds_per_step(run: mh.Run, is_free: bool) -> float:
    """In the middle of a run, without its beginning and its end.

    Workers that do not wait come in bursts: seven fast ones twice for every time that the slow one comes.
    """
    clocks = [e["values"]["clock"] for e in read_events(run.path / "events.jsonl") if e["kind"] == "log"]
    edge, burst = (WORKERS, 2 * WORKERS - 1) if is_free else (2, 1)
    count = (len(clocks) - 2 * edge) // burst * burst
    return float((clocks[edge + count] - clocks[edge]) / count)


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_per_server(report: Report, folder: Path) -> float:
    """What a server's workers send and get, with four servers over with two."""
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(torch.randn(512, 512), torch.randint(0, 10, (512,))),
        batch_size=64,
    )
    most = {}
    for servers in (2, 4):
        spec = mh.ParameterServer(servers=servers, workers=2)
        run = mh.fit(task, spec, on="cpu*2", folder=folder, options=mh.options.Display(progress=False))
        most[servers] = max(run.record["servers"]["bytes"])
    report.notes["bytes_per_server_and_step_of_2"] = most[2] / 8
    report.notes["bytes_per_server_and_step_of_4"] = most[4] / 8
    return most[4] / most[2]


class Recommender(nn.Module):
    """Users and items in one large table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = mh.strategies.Embedding(rows, DIM, optimizer="adagrad", std=0.1, seed=1)
        self.out = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """How much each user likes an item."""
        return self.out(self.table(ids).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


class Memory(mh.Callback):
    """The most memory that the program and its processes took together, shared pages counted once."""

    def __init__(self) -> None:
        self.most = 0

    def look(self) -> None:
        """Looks at all of them."""
        me = psutil.Process()
        total = 0
        for process in (me, *me.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.most = max(self.most, total)

    def on_step(self, hand: mh.Hand) -> None:
        """A step is done."""
        if hand.num_steps % 5 == 0:
            self.look()

    def on_end(self, hand: mh.Hand) -> None:
        """The last checkpoint, with the whole table, is still in memory."""
        self.look()


def sparse(folder: Path, num_steps: int, rows: int) -> tuple[float, float]:
    """Bytes per step over those of the whole table there and back by every worker; GiB of all processes."""
    generator = torch.Generator().manual_seed(0)
    # Popular rows are asked for more often than others.
    ids = (torch.rand(TABLE_BATCH * num_steps, 2, generator=generator) ** 3 * rows).long()
    task = mh.Task(
        model=lambda: Recommender(rows),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=(ids, torch.randn(len(ids), generator=generator)),
        batch_size=TABLE_BATCH,
    )
    memory = Memory()
    run = mh.fit(
        task,
        mh.ParameterServer(servers=2, workers=2),
        on="cpu*2",
        folder=folder,
        callbacks=[memory],
        options=mh.options.Display(progress=False),
    )
    moved = sum(run.record["servers"]["bytes"]) / num_steps
    dense = 2 * 2 * rows * DIM * 4
    return moved / dense, memory.most / 2**30


# -- the transport ----------------------------------------------------------------------------------------------------


def big_network() -> nn.Module:
    """64 MiB of parameters."""
    return nn.Sequential(*(nn.Linear(1448, 1448, bias=False) for _ in range(8)))


def transport(report: Report, rounds: int) -> dict[str, float]:
    """Our push and pull over bare copies of as many bytes, through shared memory and over TCP."""
    engine = LocalEngine()
    shares = {}
    try:
        for name, may_share in (("shared_memory", True), ("tcp", False)):
            ours = Pair(engine, serve_network, may_share)
            bare = Pair(engine, serve_bare, may_share)
            times: dict[str, list[float]] = {"bare": [], "push and pull": []}
            for turn in range(rounds + 2):
                for label, seconds in (("push and pull", ours.round(turn)), ("bare", bare.bare_round())):
                    if turn >= 2:
                        times[label].append(seconds)
            report.add(name.replace("_", " "), times, "bare")
            shares[name] = median(times["bare"]) / median(times["push and pull"])
            ours.close()
            bare.close()
    finally:
        engine.close()
    return shares


class Pair:
    """A server in a process of its own, and a worker here."""

    def __init__(self, engine: LocalEngine, serve: Callable[..., Any], may_share: bool) -> None:
        self._token, self._context = new_token(), new_context()
        self._chief = MessageListener(self._context, self._token, 60.0)
        work = functools.partial(serve, chief=self._chief.address, token=self._token)
        self._job = engine.start(work, [Device("cpu")])
        while (got := self._chief.receive()) is None:
            self._chief.socket.poll(100)
        self._peer, join, _ = got
        self.model = big_network()
        self.share = cut(self.model, 1, whole=False)[0]
        frames = frames_of([torch.zeros(slab.length) for slab in self.share])
        slots: list[Any] = [{} for slab in self.share for _ in slab.pieces]
        self._chief.send(self._peer, Load(1, 0, slots, []), frames)
        while (got := self._chief.receive()) is None:
            self._chief.socket.poll(100)
        self._client = ParameterClient(self.model, [self.share], 0, None, self._token, 60.0)
        self._client.may_share = may_share
        self._client.connect(ServerList(1, [join.address]))
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        self._flat = [torch.zeros(slab.length) for slab in self.share]

    def round(self, ticket: int) -> float:
        """Seconds of one push that is applied, and one pull that is put into the network."""
        began = time.perf_counter()
        self._client.push(ticket, 1.0, [0.1])
        self._client.pull(0)
        return time.perf_counter() - began

    def bare_round(self) -> float:
        """Seconds of as many bytes there and back, copied and nothing else."""
        link = self._client._links[0]
        began = time.perf_counter()
        for buffer, values in zip(link.pushed, self._flat, strict=True):
            buffer.copy_(values)
        push = messages.Push(1, 0, 0, link.is_shared, [])
        link.caller.send(push, [] if link.is_shared else frames_of(link.pushed))
        link.caller.expect(60.0)
        link.caller.send(messages.Pull(1, 0, link.is_shared))
        _, frames = link.caller.expect(60.0)
        for index, values in enumerate(self._flat):
            values.copy_(link.pulled[index] if link.is_shared else tensor_of(frames[index], values.dtype))
        return time.perf_counter() - began

    def close(self) -> None:
        """Ends both."""
        self._client.close()
        self._chief.send(self._peer, EndOfWork())
        self._job.wait(lambda rank, entry: None, lambda rank, text, stream: print(text))
        self._chief.close()
        self._context.term()


def serve_network(world: World, chief: str, token: bytes) -> None:
    """The real server, with plain SGD."""
    torch.set_num_threads(1)
    model = big_network()
    share = cut(model, 1, whole=False)[0]
    shard = ServerShard(0, share, model, torch.optim.SGD(model.parameters(), lr=0.1))
    ParameterShardServer(shard, mh.ParameterServer(staleness=None, workers=1), chief, token, 60.0).run()


def serve_bare(world: World, chief: str, token: bytes) -> None:
    """A server that only copies."""
    torch.set_num_threads(1)
    share = cut(big_network(), 1, whole=False)[0]
    context = new_context()
    listener = MessageListener(context, token, 60.0)
    caller = Caller(context, token, chief, 60.0)
    caller.send(JoinRequest("server", 0, listener.address))
    held = [torch.zeros(slab.length) for slab in share]
    slots: dict[bytes, SharedSlots | None] = {}
    poller = zmq.Poller()
    poller.register(listener.socket, zmq.POLLIN)
    poller.register(caller.socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if caller.socket in ready:
            message, _ = caller.expect(1.0)
            if isinstance(message, EndOfWork):
                break
            caller.send(Loaded(1))
        while (got := listener.receive()) is not None:
            peer, message, frames = got
            if isinstance(message, messages.Attach):
                slots[peer] = SharedSlots.attached(share, message)
                listener.send(peer, messages.Attached(True))
            elif isinstance(message, messages.Push):
                mine = slots.get(peer)
                for index, buffer in enumerate(held):
                    buffer.copy_(mine.pushed[index] if mine else tensor_of(frames[index], buffer.dtype))
                listener.send(peer, messages.Pushed(0, 0, True))
            elif isinstance(message, messages.Pull):
                mine = slots.get(peer)
                for index, buffer in enumerate(held if mine else ()):
                    mine.pulled[index].copy_(buffer)
                listener.send(peer, messages.Values(0), [] if mine else frames_of(held))
    listener.close()
    caller.close()
    context.term()


if __name__ == "__main__":
    main()
