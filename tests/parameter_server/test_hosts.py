"""Chief, servers and workers on separate hosts, by TF_CONFIG: links that go down, and killed members."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.core import WorkerFailed
from manyhands.distributed import World, resolve
from manyhands.distributed import world as worlds
from manyhands.launcher import LocalEngine, RunningJob
from manyhands.parameter_server.shared_memory import SharedSlots
from manyhands.parameter_server.sockets import Caller, ConnectionLost, MessageListener, new_context
from manyhands.testing import NamespaceHosts

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_faults import wait_for
from .test_roles import TOKEN
from .test_training import QUIET, events, farthest

PORT = 7077
TIMEOUT = 8.0
EPOCHS = 6
pytestmark = pytest.mark.root


class Slow(mh.Callback):
    """Takes its time, more of it until a log tells of two followers; and cuts a host off for a while, once."""

    def __init__(self, cut: Any = None, seconds: float = 0.0, log: Path | None = None) -> None:
        self.cut, self.seconds, self.log = cut, seconds, log

    def on_step(self, hand: mh.Hand) -> None:
        is_early = self.log is not None and self.log.read_text().count('"followed"') < 2
        time.sleep(0.3 if is_early else 0.05)
        if hand.num_steps == 4 and self.cut is not None:
            self.cut.link_down()
            threading.Timer(self.seconds, self.cut.link_up).start()


def member(
    world: World, host: Any, config: str, folder: str, followers: int, callbacks: Sequence[Any], resume: bool
) -> str:
    """One program of the cluster on its host, which shares no memory with the others."""
    worlds._current.clear()
    host.enter()
    os.environ.update(TF_CONFIG=config, MANYHANDS_TOKEN=TOKEN)
    SharedSlots.attached = classmethod(lambda cls, share, attach: None)  # type: ignore[assignment]
    try:
        mh.fit(
            problem("mlp", rows=96),
            mh.ParameterServer(precision="fp64", followers=followers),
            **fit_options(
                on="cpu",
                epochs=EPOCHS,
                folder=folder,
                name="ps",
                resume=resume,
                callbacks=list(callbacks),
                timeout=TIMEOUT,
                **QUIET,
            ),
        )
    except SystemExit as end:
        return str(end.code)
    return "done"


class Programs:
    """A cluster whose members can be started and killed one by one."""

    def __init__(
        self, engine: LocalEngine, hosts: NamespaceHosts, folder: Path, num_servers: int, followers: int = 0
    ) -> None:
        self._engine, self._hosts, self._folder, self._followers = engine, hosts, folder, followers
        roles = [("chief", 0), *(("ps", i) for i in range(num_servers)), ("worker", 0), ("worker", 1)]
        self.host = dict(zip(roles, hosts, strict=True))
        self._cluster: dict[str, list[str]] = {}
        for role, _ in roles:
            mine = [f"{self.host[key].address}:{PORT}" for key in roles if key[0] == role]
            self._cluster[role] = mine
        self._pool = ThreadPoolExecutor(len(roles) + 2)
        self.jobs: dict[tuple[str, int], tuple[RunningJob, Future[Any]]] = {}

    def start(self, role: str, index: int = 0, *callbacks: Any, resume: bool = False) -> None:
        config = json.dumps({"cluster": self._cluster, "task": {"type": role, "index": index}})
        work = functools.partial(
            member,
            host=self.host[role, index],
            config=config,
            folder=str(self._folder),
            followers=self._followers,
            callbacks=callbacks,
            resume=resume,
        )
        job = self._engine.start(work, resolve("cpu*1")[0], timeout=60)
        self.jobs[role, index] = job, self._pool.submit(job.wait, lambda rank, entry: None, print)

    def start_others(self) -> None:
        for role, index in self.host:
            if role != "chief":
                self.start(role, index)

    def kill(self, role: str, index: int = 0) -> None:
        job, done = self.jobs.pop((role, index))
        job.kill()
        assert isinstance(done.exception(timeout=30), WorkerFailed)

    def ends(self) -> dict[str, Any]:
        return {f"{role} {index}": done.result(timeout=60)[0] for (role, index), (_, done) in self.jobs.items()}

    def close(self) -> None:
        for job, _ in self.jobs.values():
            job.kill()
        self._pool.shutdown()


@pytest.fixture
def programs(request: pytest.FixtureRequest, engine: LocalEngine, tmp_path: Path) -> Iterator[Programs]:
    num_servers, followers = getattr(request, "param", (2, 0))
    with NamespaceHosts(3 + num_servers) as hosts:
        found = Programs(engine, hosts, tmp_path, num_servers, followers)
        try:
            yield found
        finally:
            found.close()


def require_equal(tmp_path: Path) -> mh.Run:
    """The run on hosts must be what one device gives."""
    task = problem("mlp", rows=96)
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=EPOCHS, folder=tmp_path, name="one", **QUIET)
    )
    run = mh.Run(tmp_path / "ps", task)
    assert run.num_steps == one.num_steps
    assert farthest(one, run) <= 1e-9
    return run


def test_worker_rejoins_after_network_link_failure(programs: Programs, tmp_path: Path) -> None:
    programs.start_others()
    programs.start("chief", 0, Slow(programs.host["worker", 1], 0.7 * TIMEOUT))
    assert programs.ends() == {"chief 0": "done", "ps 0": "0", "ps 1": "0", "worker 0": "0", "worker 1": "0"}
    assert events(require_equal(tmp_path), "servers")[-1]["lost_workers"] >= 1


def test_restarted_coordinator_reconnects_to_servers_and_workers(programs: Programs, tmp_path: Path) -> None:
    programs.start_others()
    programs.start("chief", 0, Slow())
    wait_for(lambda: list(tmp_path.glob("ps/checkpoints/step-*/COMMITTED")))
    programs.kill("chief")
    programs.start("chief", resume=True)
    assert programs.ends() == {"chief 0": "done", "ps 0": "0", "ps 1": "0", "worker 0": "0", "worker 1": "0"}
    require_equal(tmp_path)


def test_servers_and_workers_exit_when_coordinator_is_unreachable(programs: Programs, tmp_path: Path) -> None:
    programs.start_others()
    programs.start("chief", 0, Slow())
    wait_for(lambda: list(tmp_path.glob("ps/checkpoints/step-*/COMMITTED")))
    programs.kill("chief")
    ends = [str(done.exception(timeout=60)) for _, done in programs.jobs.values()]
    assert len(ends) == 4
    assert all(
        f"{programs.host['chief', 0].address}:{PORT} did not answer within {TIMEOUT:.0f} s" in end for end in ends
    )


@pytest.mark.parametrize("programs", [(2, 1)], indirect=True)
def test_follower_on_other_host_takes_over_and_gets_a_new_follower(programs: Programs, tmp_path: Path) -> None:
    programs.start_others()
    log = tmp_path / "ps" / "events.jsonl"
    programs.start("chief", 0, Slow(log=log))
    wait_for(lambda: log.exists() and '"step"' in log.read_text())
    programs.kill("ps", 0)
    programs.start("ps", 0)
    assert programs.ends() == {"chief 0": "done", "ps 0": "0", "ps 1": "0", "worker 0": "0", "worker 1": "0"}
    run = require_equal(tmp_path)
    assert not events(run, "recovered")
    assert events(run, "servers")[-1]["lost_servers"] == 1
    assert len(events(run, "followed")) == 2


def talk(world: World, hosts: Sequence[Any]) -> str:
    """Two hosts that speak, until the first one is off the network."""
    hosts[world.rank].enter()
    context = new_context()
    address = f"tcp://{hosts[0].address}:{PORT}"
    if world.rank == 0:
        listener = MessageListener(context, TOKEN.encode(), 2.0, hosts[0].address, PORT)
        while not listener._known:
            listener.receive()
        hosts[0].link_down()
        time.sleep(4)
        listener.close()
        context.term()
        return "gone"
    caller = Caller(context, TOKEN.encode(), address, 2.0, 20.0)
    try:
        caller.expect(None)
    except ConnectionLost as lost:
        return str(lost)
    finally:
        caller.close()
        context.term()
    return "a message arrived"


def test_vanished_host_is_detected_without_pending_request(engine: LocalEngine) -> None:
    with NamespaceHosts(2) as hosts:
        job = engine.start(functools.partial(talk, hosts=list(hosts)), resolve("cpu*2")[0], timeout=60)
        said = job.wait(lambda rank, entry: None, print)
    assert said == ["gone", f"the connection to tcp://{hosts[0].address}:{PORT} was lost"]
