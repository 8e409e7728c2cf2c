"""Jobs whose coordinator is elected by a real etcd, over hosts with a network of their own: the first host fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.chaos import work
from benchmarks.chaos.hosts_job import HostsJob

import manyhands as mh
from manyhands.testing import NamespaceHosts
from tests.etcd import Etcd

pytestmark = pytest.mark.root
STEPS = 240
FAILOVER_SECONDS = 15.0


class ElectedJob(HostsJob):
    """A job over the first hosts, and an etcd on the last one."""

    def __init__(self, count: int, folder: Path) -> None:
        self.network = NamespaceHosts(count + 1).__enter__()
        arbiter = self.network[count]
        self.etcd = Etcd(folder / "etcd", arbiter.address, 2379, arbiter)
        super().__init__(self.network[:count], folder, steps=STEPS)
        self.killed: set[int] = set()

    def start(self, *more: str) -> None:
        super().start("--coordination", self.etcd.address, *more)

    def kill(self, index: int) -> None:
        """Kill all processes of a host at once, and cut its network, so that nothing reports its end."""
        self.network[index].link_down()
        for one in self.programs[index].family():
            one.send_signal(signal.SIGKILL)
        self.killed.add(index)

    def until(self, what: Callable[[], object], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not what():
            codes = [one.code for index, one in enumerate(self.programs) if index not in self.killed]
            assert time.monotonic() < end, self.said()
            assert codes == [None] * len(codes), self.said()
            time.sleep(0.05)

    def takes_steps(self) -> None:
        """Wait until further steps were reported."""
        step = self.step
        self.until(lambda: self.step > step + 2)

    def end(self) -> None:
        self.hurry.touch()
        for index, program in enumerate(self.programs):
            assert index in self.killed or program.process.wait(300) == 0, self.said()

    def close(self) -> None:
        super().close()
        self.etcd.close()
        self.network.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[[int], ElectedJob]]:
    held: list[ElectedJob] = []

    def make(count: int) -> ElectedJob:
        held.append(ElectedJob(count, tmp_path))
        return held[-1]

    yield make
    for one in held:
        one.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> mh.Run:
    """Train on one device without faults, as the reference."""
    folder = tmp_path_factory.mktemp("calm")
    quiet = mh.options.Display(progress=False)
    return mh.fit(work.task, "single,precision=fp64", steps=STEPS, epochs=1000, on="cpu", folder=folder, options=quiet)


def assert_same(job: HostsJob, calm: mh.Run) -> None:
    run = mh.Run(job.run)
    assert len(run.losses) == STEPS
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(calm.losses), rtol=1e-9, atol=1e-12)
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], tensor, rtol=0, atol=1e-9)
    assert work.wrong_samples(run.state_dict(), STEPS) == 0


def test_run_continues_when_the_first_host_is_gone_for_good(jobs: Callable[[int], ElectedJob], calm: mh.Run) -> None:
    job = jobs(3)
    job.start()
    job.until(lambda: job.step > 3)
    job.kill(0)
    began = time.time()
    job.until(lambda: job.events("recovered"))
    job.until(lambda: job.size == 2)
    job.takes_steps()
    steps = next(entry for entry in job.events("steps") if entry["t"] > job.events("coordinator")[-1]["t"])
    assert steps["t"] - began <= FAILOVER_SECONDS, job.said()
    print(f"seconds from the death of the first host to the next steps: {steps['t'] - began:.1f}")
    terms = [entry["term"] for entry in job.events("coordinator")]
    assert terms == sorted(set(terms))
    assert job.events("coordinator")[0]["host"] == "host1"
    assert job.events("coordinator")[-1]["host"] in ("host2", "host3")
    assert job.events("recovered")[-1]["source"].startswith("the memory of rank")

    # A new process of the first host joins the coordinator that was elected meanwhile.
    job.network[0].link_up()
    job.programs[0].process.wait()
    psutil.wait_procs(job.programs[0].family(), timeout=60)
    job.programs[0].start()
    job.killed.clear()
    job.until(lambda: job.size == 3)
    job.takes_steps()
    job.end()
    assert_same(job, calm)


def test_separated_coordinator_pauses_is_fenced_and_rejoins(jobs: Callable[[int], ElectedJob], calm: mh.Run) -> None:
    job = jobs(3)
    job.start()
    job.until(lambda: job.step > 3)
    job.network.partition(0)
    job.until(lambda: len(job.events("coordinator")) == 2)
    job.until(lambda: job.size == 2)
    job.takes_steps()
    assert "host1 could not renew its lease" in job.programs[0].output.read_text(), job.said()
    assert "the ranks of this host keep their state and wait" in job.programs[0].output.read_text()
    job.network.heal()
    job.until(lambda: job.size == 3)
    job.takes_steps()

    # Frozen for longer than its lease: what it does when it wakes up changes nothing.
    index = next(n for n in range(3) if job.network[n].name == job.events("coordinator")[-1]["host"])
    frozen = job.programs[index]
    os.kill(frozen.pid, signal.SIGSTOP)
    job.until(lambda: len(job.events("coordinator")) == 3)
    job.until(lambda: job.size == 2)
    job.takes_steps()
    os.kill(frozen.pid, signal.SIGCONT)
    job.until(lambda: job.size == 3)
    job.takes_steps()
    job.end()
    assert_same(job, calm)


def test_two_hosts_need_the_arbiter_and_pause_without_it(jobs: Callable[[int], ElectedJob], calm: mh.Run) -> None:
    job = jobs(2)
    job.start()
    job.until(lambda: job.step > 3)
    job.network[2].link_down()
    job.until(lambda: "could not renew its lease" in job.programs[0].output.read_text())
    job.until(lambda: "etcd does not answer" in job.programs[1].output.read_text())
    step = job.step
    job.network[2].link_up()
    job.until(lambda: len(job.events("coordinator")) == 2)
    job.until(lambda: job.size == 2 and job.step > step + 2)
    job.kill(0)
    job.until(lambda: job.events("coordinator")[-1]["host"] == "host2")
    job.until(lambda: job.size == 1)
    job.takes_steps()
    job.end()
    assert_same(job, calm)
