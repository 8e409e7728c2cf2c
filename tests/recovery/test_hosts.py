"""Recovery over hosts in network namespaces: failed ranks and hosts, partitions, and one consistent history."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.chaos import work
from benchmarks.chaos.hosts_job import HostsJob

import manyhands as mh
from manyhands.storage import CheckpointStore
from manyhands.testing import NamespaceHosts
from tests.launcher.test_tls import Signer

pytestmark = pytest.mark.root
STEPS = 240


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[[int], HostsJob]]:
    held: list[tuple[NamespaceHosts, HostsJob]] = []

    def make(count: int) -> HostsJob:
        hosts = NamespaceHosts(count).__enter__()
        held.append((hosts, HostsJob(hosts, tmp_path, steps=STEPS)))
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


def goes_on(job: HostsJob, size: int, since: int) -> None:
    """Wait until a world of this size has been called together for the n-th time, and has taken steps."""
    job.until(lambda: len(job.events("recovered")) >= since)
    job.until(lambda: job.size == size)
    step = job.step
    job.until(lambda: job.step > step + 2)


def assert_same(job: HostsJob, calm: mh.Run) -> None:
    run = mh.Run(job.run)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(calm.losses), rtol=1e-9, atol=1e-12)
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], tensor, rtol=0, atol=1e-9)
    assert work.wrong_samples(run.state_dict(), STEPS) == 0


def test_three_hosts_survive_kills_freezes_and_network_partitions(
    jobs: Callable[[int], HostsJob], calm: mh.Run
) -> None:
    """All traffic between hosts is under TLS; the first host is restarted as a supervisor would do it."""
    job = jobs(3)
    job.start("--resume", "auto", "--tls", Signer(job.folder / "signer").host("host"))
    job.until(lambda: job.step > 3, 90)

    os.kill(job.programs[1].forks()[0].pid, signal.SIGKILL)
    goes_on(job, 3, since=1)
    assert "was killed by signal 9" in job.events("lost")[-1]["reason"]
    assert job.events("lost")[-1]["host"] == "host2"

    os.kill(job.programs[2].forks()[0].pid, signal.SIGSTOP)
    goes_on(job, 3, since=2)
    assert "was frozen" in job.events("lost")[-1]["reason"]

    job.hosts[2].link_down()
    goes_on(job, 2, since=3)
    assert {entry["host"] for entry in job.events("lost")[2:]} == {"host3"}
    job.hosts[2].link_up()
    goes_on(job, 3, since=4)

    # The first host is alone on its side of the partition. It coordinates, so it continues; the others wait.
    job.hosts.partition(1, 2)
    job.until(lambda: job.size == 1)
    goes_on(job, 1, since=5)
    job.hosts.heal()
    job.until(lambda: job.size == 3)

    # One way only: what the last host sends to the first is lost, and it still hears the others.
    job.hosts[2].mute(job.hosts[0].address)
    job.until(lambda: job.size == 2)
    job.hosts[2].unmute(job.hosts[0].address)
    job.until(lambda: job.size == 3)

    # Two hosts reach the first one, but one does not hear the other: one of them waits, and both are named.
    number = len(job.events("lost"))
    job.hosts[1].mute(job.hosts[2].address)
    job.until(lambda: job.size == 2)
    told = [(entry["host"], entry["reason"]) for entry in job.events("lost")[number:]]
    assert ("host2", "and host3 do not reach each other; host2 waits until they do") in told, told
    job.hosts[1].unmute(job.hosts[2].address)
    job.until(lambda: job.size == 3)

    for _ in range(2):
        step = job.step
        job.until(lambda: job.step > step + 2)  # noqa: B023
        dies_and_is_started_again(job)
    job.end()
    assert_same(job, calm)
    assert CheckpointStore(job.run / "checkpoints").load().step == STEPS
    assert {entry["source"].split(" rank")[0] for entry in job.events("recovered")} == {"the memory of"}
    assert len(mh.Run(job.run).losses) == STEPS


def dies_and_is_started_again(job: HostsJob) -> None:
    """The first host is killed and started by the same command; the others have what it had."""
    first = job.programs[0]
    family = first.family()
    first.kill()
    first.process.wait()
    psutil.wait_procs(family, timeout=60)
    step, times = job.step, len(job.events("recovered"))
    first.start()
    job.until(lambda: len(job.events("recovered")) > times, 60)
    went_on = job.events("recovered")[-1]
    assert went_on["source"] in ("the memory of rank 1", "the memory of rank 2")
    assert went_on["step"] >= step, "no reported step is lost"
    assert went_on["size"] == 3, job.said()
