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
from benchmarks.chaos.programs import Events, Program

import manyhands as mh
from manyhands.storage import CheckpointStore
from manyhands.testing import NamespaceHosts
from tests.etcd import Etcd

pytestmark = pytest.mark.root
STEPS = 360
FAILOVER_SECONDS = 15.0


class ElectedJob(HostsJob):
    """A job whose hosts have an etcd: a member on each of them, or one on a further host, the arbiter."""

    def __init__(self, count: int, folder: Path, *, has_arbiter: bool, has_own_disks: bool) -> None:
        self.network = NamespaceHosts(count + has_arbiter).__enter__()
        places = [self.network[count]] if has_arbiter else list(self.network)
        members = () if has_arbiter else [host.address for host in places]
        self.etcds = [Etcd(folder / f"etcd-{host.name}", host.address, host=host, members=members) for host in places]
        super().__init__(self.network[:count], folder, steps=STEPS)
        self.killed: set[int] = set()
        self._has_own_disks = has_own_disks
        self.runs.mkdir()
        if has_own_disks:
            self.watch(0)

    def watch(self, index: int) -> None:
        """Read the events that are on the disk of a host."""
        self.run = self.folder / f"disk-{index}" / "run"
        self._events = Events(self.run / "events.jsonl")

    def start(self, *more: str) -> None:
        """Start the command on all hosts; a host's own disk is mounted where its runs are."""
        words = [*self._words, "--coordination", f"etcd://{','.join(one.endpoint for one in self.etcds)}", *more]
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        for index, host in enumerate(self.hosts):
            own, command = self.folder / f"disk-{index}", words
            if self._has_own_disks:
                own.mkdir()
                command = ["unshare", "--mount", "sh", "-c", mount, str(own), str(self.runs), *words]
            env = {"HURRY": str(self.hurry), "MANYHANDS_TEST": "1"}
            program = Program(host.name, command, self.folder / f"output-{index}", host=host, env=env)
            program.start()
            self.programs.append(program)
        self.until(lambda: self.step > 3)

    def kill(self, index: int) -> None:
        """Kill all processes of a host at once, and cut its network, so that nothing reports its end."""
        self.network[index].link_down()
        for one in self.programs[index].family():
            one.send_signal(signal.SIGKILL)
        self.killed.add(index)

    def restart(self, index: int) -> None:
        """Start the command on a host that was killed."""
        self.network[index].link_up()
        self.programs[index].process.wait()
        psutil.wait_procs(self.programs[index].family(), timeout=60)
        self.programs[index].start()
        self.killed.discard(index)

    def said_by(self, index: int) -> str:
        """Return what the command on a host has printed."""
        return self.programs[index].output.read_text()

    def until(self, what: Callable[[], object], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not what():
            codes = [one.code for index, one in enumerate(self.programs) if index not in self.killed]
            assert time.monotonic() < end, self.said()
            assert codes == [None] * len(codes), self.said()
            time.sleep(0.05)

    def continues(self, size: int) -> None:
        """Wait until ranks of this number have reported further steps."""
        self.until(lambda: self.size == size)
        step = self.step
        self.until(lambda: self.step > step + 2)

    def end(self) -> None:
        self.hurry.touch()
        for index, program in enumerate(self.programs):
            assert index in self.killed or program.process.wait(300) == 0, self.said()

    def close(self) -> None:
        super().close()
        for etcd in self.etcds:
            etcd.close()
        self.network.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., ElectedJob]]:
    held: list[ElectedJob] = []

    def make(count: int, *, has_arbiter: bool = False, has_own_disks: bool = False) -> ElectedJob:
        held.append(ElectedJob(count, tmp_path, has_arbiter=has_arbiter, has_own_disks=has_own_disks))
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


def test_run_continues_when_the_first_host_is_gone_for_good(jobs: Callable[..., ElectedJob], calm: mh.Run) -> None:
    """With the host goes a member of etcd, which may be its leader."""
    job = jobs(3)
    job.start()
    began = time.time()
    job.etcds[0].process.kill()
    job.kill(0)
    job.until(lambda: len(job.events("coordinator")) == 2)
    job.continues(2)
    first, second = job.events("coordinator")
    steps = next(entry for entry in job.events("steps") if entry["t"] > second["t"])
    assert steps["t"] - began <= FAILOVER_SECONDS, job.said()
    print(f"seconds from the death of the first host to the next steps: {steps['t'] - began:.1f}")
    assert first["host"] == "host1"
    assert second["host"] in ("host2", "host3")
    assert second["term"] > first["term"]
    assert job.events("recovered")[-1]["source"].startswith("the memory of rank")

    # Neither of the two is in a majority of the three hosts.
    job.network.partition(2)
    for index in (1, 2):
        job.until(lambda: "etcd does not answer" in job.said_by(index))  # noqa: B023
        assert "the ranks of this host keep their state and wait" in job.said_by(index)
    step = job.step
    job.network.heal()
    job.until(lambda: len(job.events("coordinator")) == 3)
    job.continues(2)
    assert job.events("recovered")[-1]["step"] >= step
    job.end()
    assert_same(job, calm)


def test_separated_coordinator_pauses_is_fenced_and_rejoins(jobs: Callable[..., ElectedJob], calm: mh.Run) -> None:
    job = jobs(3, has_arbiter=True)
    job.start()
    job.network.partition(0)
    job.until(lambda: len(job.events("coordinator")) == 2)
    job.continues(2)
    assert "host1 could not renew its lease" in job.said_by(0), job.said()
    assert "the ranks of this host keep their state and wait" in job.said_by(0)
    job.network.heal()
    job.continues(3)

    # Frozen for longer than its lease: what it does when it wakes up changes nothing.
    index = ["host1", "host2", "host3"].index(job.events("coordinator")[-1]["host"])
    os.kill(job.programs[index].pid, signal.SIGSTOP)
    job.until(lambda: len(job.events("coordinator")) == 3)
    job.continues(2)
    os.kill(job.programs[index].pid, signal.SIGCONT)
    job.continues(3)
    job.end()
    assert_same(job, calm)


def test_of_two_hosts_with_own_disks_either_one_continues_alone(jobs: Callable[..., ElectedJob], calm: mh.Run) -> None:
    """The second host has a copy of the events and of the checkpoints."""
    job = jobs(2, has_arbiter=True, has_own_disks=True)
    job.start()
    job.until(CheckpointStore(job.folder / "disk-1" / "run" / "checkpoints").steps)
    job.kill(0)
    job.watch(1)
    job.until(lambda: job.events("coordinator")[-1]["host"] == "host2")
    job.continues(1)

    # A new process of the first host joins the coordinator that was elected meanwhile, and is elected after it.
    job.restart(0)
    job.continues(2)
    job.kill(1)
    job.watch(0)
    job.until(lambda: job.events("coordinator")[-1]["host"] == "host1")
    job.continues(1)
    job.end()
    run = mh.Run(job.run)
    assert run.losses[-1] == pytest.approx(calm.losses[-1], rel=1e-9)
    assert work.wrong_samples(run.state_dict(), STEPS) == 0
