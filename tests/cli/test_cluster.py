"""`manyhands cluster`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from manyhands.cluster import LocalEngine, World, reach, resolve, survey
from manyhands.cluster.survey import Facts, differences
from manyhands.data import as_source, data_digest
from manyhands.testing import Hosts

from ..cluster.environments import SAMPLES, tf_config
from .conftest import Invoke


def test_a_program_started_by_hand(invoke: Invoke) -> None:
    result = invoke("cluster", "small_task.py")
    assert result.exit_code == 0, result.output
    assert "no cluster: this program was started by hand" in result.stdout
    assert "data: 64 samples" in result.stdout


def test_what_was_understood_and_from_where(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SAMPLES["mpiexec on one host"][0].items():
        monkeypatch.setenv(name, value)
    result = invoke("cluster")
    assert result.exit_code == 0, result.output
    assert "MPI, read from PMI_RANK" in result.stdout
    assert "rank 1 of 2" in result.stdout
    assert "127.0.0.1  worker  2 ranks  answers in" in result.stdout
    told = json.loads(invoke("cluster", "--json").stdout)
    assert (told["source"], told["meeting"]) == ("MPI", "127.0.0.1:29500")
    assert told["standing"] == {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2}
    assert told["reach"][0]["interface"] == "lo"


def test_a_host_that_is_not_there_is_a_warning(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"worker": ["localhost:1", "no-such-host.invalid:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config(roles)["TF_CONFIG"])
    result = invoke("cluster", "--timeout", 2)
    assert result.exit_code == 1
    assert "no-such-host.invalid cannot be reached: its name has no address" in result.stdout


def test_nonsense_is_an_error(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    result = invoke("cluster")
    assert result.exit_code == 2
    assert "TF_CONFIG must be JSON" in result.stderr


def test_what_differs_between_hosts_is_named() -> None:
    def facts(rank: int, **changed: Any) -> Facts:
        given = {"device": "cpu", "manyhands": "1", "torch": "2.13.0", "python": "3.11.7", "clock": 100.0}
        return Facts(rank=rank, host=f"host{rank}", **{**given, **changed})

    assert differences([facts(0), facts(1, python="3.11.9", clock=101.0)]) == []
    (data,) = differences(
        [facts(0, data="8 samples, ab"), facts(1, data="8 samples, ac"), facts(2, data="8 samples, ab")]
    )
    assert data.startswith("the data differs: 8 samples, ab on host0 host2, 8 samples, ac on host1; ")
    (clock,) = differences([facts(0), facts(1, clock=130.0)])
    assert "the clock of host1 is 30.0 s before that of host0" in clock


def test_a_digest_sees_length_and_samples() -> None:
    rows = torch.arange(100.0)
    changed = rows.clone()
    changed[99] = 0
    digests = [data_digest(as_source(data)) for data in (rows, rows.clone(), changed, rows[:99])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.root
def test_hosts_measure_the_ways_between_them(engine: LocalEngine) -> None:
    """Bandwidth and latency by host and interface; a host whose data is another is named; one that is not there too."""

    def look(world: World) -> Any:
        data = torch.arange(8.0) + (world.rank == 2)
        found = survey(world, data_digest(as_source(data)))
        knocks = [reach(name, 7, 1.0).seconds is not None for name in ("10.77.0.1", "10.77.0.9")]
        return [(link.host, link.interface) for link in found.links], found.warnings, found.chosen, knocks

    with Hosts(3, rate="400mbit") as hosts:
        results = engine.start(hosts.joined(look), resolve("cpu*3")[0], timeout=60).wait(
            lambda rank, entry: None, lambda *line: print(*line)
        )
    links, warnings, chosen, knocks = results[1]
    assert links == [("host2", "eth0"), ("host3", "eth0")]
    assert results[0][:3] == results[2][:3] == results[1][:3]
    assert 10e6 < chosen["host2"].bytes_per_second < 100e6  # 400 Mbit/s are 50 MB/s
    assert 0 < chosen["host3"].seconds < 1
    assert len(warnings) == 1
    assert "the data differs" in warnings[0]
    assert "on host3" in warnings[0]
    assert knocks == [True, False]
