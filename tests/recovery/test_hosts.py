"""Recovery over hosts with a network of their own: ranks and hosts are lost, parted and found; one history is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import manyhands as mh
from manyhands.core import read_events
from manyhands.launcher import write_token
from manyhands.storage import CheckpointStore
from manyhands.testing import NamespaceHosts
from tests.launcher.test_tls import Signer
from tests.recovery import work

pytestmark = pytest.mark.root
STEPS = 240
SOURCE = Path(mh.__file__).parents[1]


class Servers:
    """A job on some hosts: their commands, what the first one wrote, and ways to hurt them."""

    def __init__(self, hosts: NamespaceHosts, folder: Path) -> None:
        self.hosts, self.folder, self.programs = hosts, folder, {}
        self._told: tuple[int, list[dict[str, Any]]] = (0, [])
        self.hurry = folder / "hurry"
        write_token(folder / "token")

    def start(self, index: int, *more: str) -> None:
        command = [
            sys.executable, "-m", "manyhands", "fit", str(Path(work.__file__)), "--hosts", str(len(self.hosts)),
            "--join", "host1:7777", "--token-file", str(self.folder / "token"), "--on", "cpu", "--epochs", "1000",
            "--steps", str(STEPS), "--strategy", "mirrored,precision=fp64", "--save-every", "50",
            "--folder", str(self.folder / "runs"), "--name", "run", *more,
        ]  # fmt: skip
        env = {
            **os.environ, "HURRY": str(self.hurry), "OMP_NUM_THREADS": "1", "MANYHANDS_TEST": "1",
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(Path(work.__file__).parents[2])]),
        }  # fmt: skip
        with (self.folder / f"output-{index}").open("a") as output:
            self.programs[index] = self.hosts[index].popen(command, env=env, stdout=output, stderr=output)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "run" / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._told[0]:
            self._told = size, list(read_events(path))
        return [entry for entry in self._told[1] if entry["kind"] == kind]

    @property
    def step(self) -> int:
        return max((entry["steps"][-1] for entry in self.events("steps")), default=0)

    def until(self, what: Callable[[], Any], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.said()
            assert self.programs[0].poll() is None, self.said()
            time.sleep(0.05)

    def goes_on(self, size: int, since: int) -> None:
        """Waits until a world of this size has been called together for the n-th time, and has taken steps."""
        self.until(lambda: len(self.events("recovered")) >= since)
        self.until(lambda: self.events("recovered")[-1]["size"] == size)
        step = self.step
        self.until(lambda: self.step > step + 2)

    def rank_of(self, index: int) -> int:
        zygote = psutil.Process(self.programs[index].pid).children()[0]
        return int(zygote.children()[0].pid)

    def end(self) -> None:
        self.hurry.touch()
        for index, program in self.programs.items():
            assert program.wait(150) == 0, self.said(index)

    def said(self, index: int | None = None) -> str:
        which = self.programs if index is None else [index]
        return "\n".join(f"-- {i}\n" + (self.folder / f"output-{i}").read_text() for i in which)

    def close(self) -> None:
        for program in self.programs.values():
            family = [program, *psutil.Process(program.pid).children(recursive=True)] if program.poll() is None else []
            for process in family:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            program.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[[int], Servers]]:
    held: list[tuple[NamespaceHosts, Servers]] = []

    def make(count: int) -> Servers:
        hosts = NamespaceHosts(count).__enter__()
        held.append((hosts, Servers(hosts, tmp_path)))
        return held[-1][1]

    yield make
    for hosts, one in held:
        one.close()
        hosts.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    """Train on one device without faults, as the reference."""
    folder = tmp_path_factory.mktemp("calm")
    return mh.fit(
        work.task,
        "single,precision=fp64",
        steps=STEPS,
        epochs=1000,
        on="cpu",
        folder=folder,
        options=mh.options.Display(progress=False),
    )


def assert_same(servers: Servers, calm: mh.Run) -> None:
    run = mh.Run(servers.folder / "runs" / "run")
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(calm.losses), rtol=1e-9, atol=1e-12)
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], tensor, rtol=0, atol=1e-9)


def test_three_hosts_survive_kills_freezes_and_network_partitions(
    servers: Callable[[int], Servers], calm: mh.Run
) -> None:
    """All traffic between hosts is under TLS; the first host is restarted as a supervisor would do it."""
    job = servers(3)
    words = "--resume", "auto", "--tls", Signer(job.folder / "signer").host("host")
    for index in range(3):
        job.start(index, *words)
    job.until(lambda: job.step > 3, 90)

    os.kill(job.rank_of(1), signal.SIGKILL)
    job.goes_on(3, since=1)
    assert "was killed by signal 9" in job.events("lost")[-1]["reason"]
    assert job.events("lost")[-1]["host"] == "host2"

    os.kill(job.rank_of(2), signal.SIGSTOP)
    job.goes_on(3, since=2)
    assert "was frozen" in job.events("lost")[-1]["reason"]

    job.hosts[2].link_down()
    job.goes_on(2, since=3)
    assert {entry["host"] for entry in job.events("lost")[2:]} == {"host3"}
    job.hosts[2].link_up()
    job.goes_on(3, since=4)

    # The first host is alone on its side of the partition. It coordinates, so it continues; the others wait.
    job.hosts.partition(1, 2)
    job.until(lambda: job.events("recovered")[-1]["size"] == 1)
    job.goes_on(1, since=5)
    job.hosts.heal()
    job.until(lambda: job.events("recovered")[-1]["size"] == 3)

    # One way only: what the last host sends to the first is lost, and it still hears the others.
    job.hosts[2].mute(job.hosts[0].address)
    job.until(lambda: job.events("recovered")[-1]["size"] == 2)
    job.hosts[2].unmute(job.hosts[0].address)
    job.until(lambda: job.events("recovered")[-1]["size"] == 3)

    # Two hosts reach the first one, but one does not hear the other: one of them waits, and both are named.
    number = len(job.events("lost"))
    job.hosts[1].mute(job.hosts[2].address)
    job.until(lambda: job.events("recovered")[-1]["size"] == 2)
    told = [(entry["host"], entry["reason"]) for entry in job.events("lost")[number:]]
    assert ("host2", "and host3 do not reach each other; host2 waits until they do") in told, told
    job.hosts[1].unmute(job.hosts[2].address)
    job.until(lambda: job.events("recovered")[-1]["size"] == 3)

    for _ in range(2):
        step = job.step
        job.until(lambda: job.step > step + 2)  # noqa: B023
        dies_and_is_started_again(job, words)
    job.end()
    assert_same(job, calm)
    assert CheckpointStore(job.folder / "runs" / "run" / "checkpoints").load().step == STEPS
    assert {entry["source"].split(" rank")[0] for entry in job.events("recovered")} == {"the memory of"}
    assert len(mh.Run(job.folder / "runs" / "run").losses) == STEPS


def dies_and_is_started_again(job: Servers, words: tuple[str, ...]) -> None:
    """The first host is killed and started by the same command; the others have what it had."""
    family = psutil.Process(job.programs[0].pid).children(recursive=True)
    job.programs[0].kill()
    job.programs[0].wait()
    psutil.wait_procs(family, timeout=60)
    step, times = job.step, len(job.events("recovered"))
    job.start(0, *words)
    job.until(lambda: len(job.events("recovered")) > times, 60)
    went_on = job.events("recovered")[-1]
    assert went_on["source"] in ("the memory of rank 1", "the memory of rank 2")
    assert went_on["step"] >= step, "no reported step is lost"
    assert went_on["size"] == 3, job.said()
