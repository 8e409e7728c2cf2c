"""`manyhands cluster`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.core import SettingsError
from manyhands.data import as_source, data_digest
from manyhands.distributed import DirectChannel, RankInfo, World, reach, resolve, survey, this_host
from manyhands.distributed.network import listen
from manyhands.distributed.survey import RankFacts, differences
from manyhands.launcher import LocalEngine, meet
from manyhands.launcher.existing_cluster import _kept
from manyhands.testing import NamespaceHosts

from ..launcher.environments import SAMPLES, SLURM, tf_config
from ..launcher.test_tls import Signer
from .conftest import Invoke


def test_program_without_launcher_reports_no_cluster(invoke: Invoke) -> None:
    result = invoke("cluster", "small_task.py")
    assert result.exit_code == 0, result.output
    assert "no cluster: this program was started by hand" in result.stdout
    assert "data: 64 samples" in result.stdout


def test_detected_cluster_is_printed_with_its_source_variables(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unreachable_host_is_a_warning_and_exits_with_code_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"worker": ["localhost:1", "no-such-host.invalid:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config(roles)["TF_CONFIG"])
    result = invoke("cluster", "--timeout", 2)
    assert result.exit_code == 1
    assert "no-such-host.invalid cannot be reached: its name has no address" in result.stdout
    assert "; look at its name, its network and its firewall" in result.stdout


def test_token_and_tls_used_for_joining_are_printed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": ["localhost:1", "127.0.0.1:2"]})["TF_CONFIG"])
    assert "hosts join" not in invoke("cluster").stdout
    monkeypatch.setenv("MANYHANDS_TOKEN", "a" * 40)
    assert "hosts join by the token in MANYHANDS_TOKEN, without TLS" in invoke("cluster").stdout
    monkeypatch.setenv("MANYHANDS_TLS", Signer(tmp_path / "signer").host("host1"))
    result = invoke("cluster")
    assert f"under TLS with the certificate in {tmp_path / 'signer' / 'host1'}" in result.stdout
    assert result.exit_code == 0, result.output
    (tmp_path / "signer" / "host1" / "tls.key").unlink()
    result = invoke("cluster")
    assert result.exit_code == 1
    assert "TLS needs a folder with tls.crt, tls.key and ca.crt, in PEM format, but got" in result.stdout
    assert "a" * 40 not in result.output
    assert json.loads(invoke("cluster", "--json").stdout)["joining"]["token"] == "MANYHANDS_TOKEN"


def test_invalid_tf_config_exits_with_code_2(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    result = invoke("cluster")
    assert result.exit_code == 2
    assert "TF_CONFIG must be valid JSON" in result.stderr


SHELL = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
TWO = {**SHELL, "MASTER_ADDR": "host1", "MASTER_PORT": "29500", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            tf_config({"chief": ["host1:1", "host2:1"]}, "chief"),
            "a cluster must have one chief, but got host1:1, host2:1. Make the others workers",
        ),
        (
            {**TWO, **tf_config({"worker": ["host9:1", "host2:1"]})},
            "all sources must name the same first host, but got host1 by torchrun and host9 by TF_CONFIG. Set "
            "MANYHANDS_CLUSTER=torchrun or MANYHANDS_CLUSTER=TF_CONFIG to select one, or unset the other's variables",
        ),
        (
            tf_config({"worker": ["host1:1", "host2:1", "host2:1"]}),
            "TF_CONFIG must name every host once, but got host2:1 twice. Remove one of them, or give it a "
            "different port",
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
            "SLURM's hosts must have 5 ranks in total, but got 3 (gpu07 1, gpu08 1, big1 1). "
            "Start the missing ranks, or use fewer",
        ),
    ],
)
def test_invalid_environment_error_names_the_host_and_the_remedy(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = invoke("cluster")
    assert result.exit_code == 2, result.output
    assert f"error: {said}" in result.stderr


def test_rendezvous_error_names_the_occupied_port_or_missing_rank_0(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        for name, value in {**SHELL, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        held = invoke("cluster", "--meet", "--timeout", 1)
    assert held.exit_code == 2
    assert (
        f"error: port {port} of 127.0.0.1 must be free, but got a port that another program uses. "
        "Stop that program, or choose another port"
    ) in held.stderr
    monkeypatch.setenv("RANK", "1")
    alone = invoke("cluster", "--meet", "--timeout", 1)
    assert alone.exit_code == 2
    assert (
        f"error: rank 0 must answer {this_host()} within 1 s, but got no answer from 127.0.0.1:{port}. "
        "Start rank 0 there, and check the address, the network and the firewall"
    ) in alone.stderr


def test_rendezvous_timeout_names_missing_ranks_and_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(SettingsError) as caught:
        meet("127.0.0.1", port, RankInfo(size=3, timeout=1.0), DirectChannel(), names=["host1", "host2", "host3"])
    _kept.clear()
    assert str(caught.value) == (
        "all 3 ranks must connect within 1 s, but got 1; rank 1 on host2, 2 on host3 did not connect. "
        "Start the missing ranks with the same command, or use fewer ranks."
    )


def test_differences_between_hosts_are_reported() -> None:
    def facts(rank: int, **changed: Any) -> RankFacts:
        given = {"device": "cpu", "manyhands": "1", "torch": "2.13.0", "python": "3.11.7", "clock": 100.0}
        return RankFacts(rank=rank, host=f"host{rank}", **{**given, **changed})

    assert differences([facts(0), facts(1, python="3.11.9", clock=101.0)]) == []
    (data,) = differences(
        [facts(0, data="8 samples, ab"), facts(1, data="8 samples, ac"), facts(2, data="8 samples, ab")]
    )
    said = "the data differs: 8 samples, ab on host0 host2, 8 samples, ac on host1; give every host the same files"
    assert data == said
    (clock,) = differences([facts(0), facts(1, clock=130.0)])
    assert clock == "the clock of host1 is 30.0 s ahead of that of host0; run an NTP service"
    assert differences([facts(0), facts(1, torch="2.12.0", manyhands="2", python="3.12.1")]) == [
        "manyhands differs: 1 on host0, 2 on host1; install the same version everywhere",
        "torch differs: 2.13.0 on host0, 2.12.0 on host1; install the same version everywhere",
        "Python differs: 3.11 on host0, 3.12 on host1; use the same Python everywhere",
    ]


def test_data_digest_depends_on_length_and_samples() -> None:
    rows = torch.arange(100.0)
    changed = rows.clone()
    changed[99] = 0
    digests = [data_digest(as_source(data)) for data in (rows, rows.clone(), changed, rows[:99])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.root
def test_hosts_measure_bandwidth_and_latency_of_their_links(engine: LocalEngine) -> None:
    """Bandwidth and latency by host and interface; a host whose data is another is named; one that is not there too."""

    def look(world: World) -> Any:
        data = torch.arange(8.0) + (world.rank == 2)
        found = survey(world, data_digest(as_source(data)))
        probes = [reach(name, 7, 1.0).seconds is not None for name in ("10.77.0.1", "10.77.0.9")]
        return [(link.host, link.interface) for link in found.links], found.warnings, found.chosen, probes

    with NamespaceHosts(3, rate="400mbit") as hosts:
        results = engine.start(hosts.joined(look), resolve("cpu*3")[0], timeout=60).wait(
            lambda rank, entry: None, lambda *line: print(*line)
        )
    links, warnings, chosen, probes = results[1]
    assert links == [("host2", "eth0"), ("host3", "eth0")]
    assert results[0][:3] == results[2][:3] == results[1][:3]
    assert 10e6 < chosen["host2"].bytes_per_second < 100e6  # 400 Mbit/s are 50 MB/s
    assert 0 < chosen["host3"].seconds < 1
    assert len(warnings) == 1
    assert "the data differs" in warnings[0]
    assert "on host3" in warnings[0]
    assert probes == [True, False]
