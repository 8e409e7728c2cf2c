"""Resolvers: the environment of every scheduler gives the same kind of description, and invalid values raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.core import SettingsError
from manyhands.launcher import ResolvedCluster
from manyhands.launcher.resolvers.hosts_file import HostsFile
from manyhands.launcher.resolvers.registry import understood

from .environments import HYDRA, JOBSET, OPEN_MPI, PYTORCHJOB, SAMPLES, SHELLS, SLURM, TORCHRUN, tf_config


@pytest.mark.parametrize("name", SAMPLES)
def test_scheduler_environment_is_resolved_to_a_cluster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, said = SAMPLES[name]
    monkeypatch.setenv("RANK", "7")  # not asked: a resolver is a function of what it is given
    cluster = understood(environ)
    assert cluster is not None
    assert cluster.source == said["source"]
    assert [str(host) for host in cluster.hosts] == said["hosts"]
    assert cluster.here == said["here"]
    assert f"{cluster.address}:{cluster.port}" == said["at"]
    standing = cluster.standing
    assert (standing and (standing.rank, standing.size, standing.local_rank, standing.local_size)) == said["ranks"]
    assert cluster.generation == said.get("generation", 0)
    assert cluster.variables
    assert all(name in environ for name in cluster.variables)
    assert "size" not in said or cluster.size == said["size"]
    assert said.get("warns", "") in " ".join(cluster.warnings)
    assert understood({**environ, "UNRELATED": "x"}) == cluster


def test_environment_without_launcher_has_no_cluster() -> None:
    assert understood({}) is None
    assert understood({"TF_CONFIG": "{}", "PATH": "/bin", "MASTER_ADDR": "x"}) is None


def test_tf_config_roles_are_ordered_and_master_becomes_chief() -> None:
    roles = {"chief": ["a:1"], "ps": ["p:1", "q:1"], "worker": {"1": "c:1", "0": "b:1"}}
    cluster = understood(tf_config(roles, "ps", "1"))
    assert cluster is not None
    assert [(str(host), host.role) for host in cluster.hosts] == [
        ("a:1", "chief"), ("b:1", "worker"), ("c:1", "worker"), ("p:1", "ps"), ("q:1", "ps"),
    ]  # fmt: skip
    assert cluster.host.name == "q"
    old = understood(tf_config({"master": ["a:1"], "worker": ["b:1"]}, "master"))
    assert old is not None
    assert old.host.role == "chief"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"TF_CONFIG": '{"cluster": '}, "TF_CONFIG must be valid JSON"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG must have a cluster"),
        ({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}, "must name the task of this process"),
        (tf_config({"worker": ["a:1"]}, "worker", 3), "(worker 0 to 0), but got worker 3"),
        (tf_config({"worker": ["a:1"]}, "worker", -1), "whole number, but got -1"),
        (tf_config({"worker": ["a:1", "a:1"]}), "every host once, but got a:1 twice"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "one chief, but got a:1, b:1"),
        (tf_config({"worker": ["a"]}), "HOST:PORT, but got 'a' of worker"),
        (tf_config({"worker": ["a:99999"]}), "HOST:PORT"),
        (tf_config({"wroker": ["a:1"]}, "wroker"), "but got 'wroker'"),
        (tf_config({"ps": ["a:1"]}, "ps"), "a chief or a worker"),
        ({**SHELLS, "RANK": "2"}, "must number the 2 ranks from 0, but got rank 2"),
        ({**SHELLS, "RANK": "one"}, "RANK must be a whole number, but got 'one'"),
        ({**SHELLS, "MASTER_PORT": "0"}, "between 1 and 65535"),
        ({k: v for k, v in SHELLS.items() if k != "MASTER_ADDR"}, "no MASTER_ADDR"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 on"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-08,big1"}, "node[01-03,07],login1"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[08-07],big1"}, "range of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-08],gpu08"}, "every host once, but got gpu08 twice"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "5 ranks in total, but got 6 (gpu07 2, gpu08 2, big1 2)"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5"}, "each of the 3 hosts"),
        ({**PYTORCHJOB, "PET_NODE_RANK": "3"}, "must number the 3 hosts from 0, but got number 3"),
        ({**PYTORCHJOB, "PET_MASTER_ADDR": "other"}, "one master, but got MASTER_ADDR=digits-master-0 and"),
        ({**PYTORCHJOB, "PET_NNODES": "1:4"}, "number of pods, but got '1:4'"),
        ({k: v for k, v in JOBSET.items() if k != "MASTER_ADDR"}, "neither PET_MASTER_ADDR nor MASTER_ADDR is set"),
        ({k: v for k, v in OPEN_MPI.items() if k != "MASTER_ADDR"}, "mpirun -x MASTER_ADDR"),
    ],
)  # fmt: skip
def test_invalid_environment_raises_with_remedy(environ: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        understood(environ)
    assert text in str(caught.value)
    assert caught.value.remedy


def test_innermost_launcher_wins_and_conflicting_sources_raise() -> None:
    slurm = {**SLURM, "SLURM_STEP_NODELIST": "node-a,node-b", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
             "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "1"}  # fmt: skip
    both = understood({**TORCHRUN, **slurm})
    assert both is not None
    assert both.source == "torchrun"
    assert "SLURM is also set" in both.warnings[0]
    with pytest.raises(SettingsError, match="2 hosts, 4 ranks by torchrun and 3 hosts, 5 ranks by SLURM.*CLUSTER"):
        understood({**TORCHRUN, **SLURM})
    with pytest.raises(SettingsError, match="the same first host, but got node-a by torchrun and node-z by TF_CONFIG"):
        understood({**TORCHRUN, **tf_config({"worker": ["node-z:1", "node-b:1"]})})
    chosen = understood({**TORCHRUN, **SLURM, "MANYHANDS_CLUSTER": "slurm"})
    assert chosen is not None
    assert chosen.source == "SLURM"
    with pytest.raises(SettingsError, match="MANYHANDS_CLUSTER must name a scheduler"):
        understood({**HYDRA, "MANYHANDS_CLUSTER": "slurm"})


def read(path: Path, text: str, here: str) -> ResolvedCluster:
    path.write_text(text)
    return HostsFile(path, lambda name: name == here).read({})


def test_hosts_file_is_parsed_with_slots_and_comments(tmp_path: Path) -> None:
    text = "# our machines\nhost1 slots=4\n\nhost2:2   # the old one\nhost3\n"
    cluster = read(tmp_path / "hosts.txt", text, "host2")
    assert [(host.name, host.num_devices) for host in cluster.hosts] == [("host1", 4), ("host2", 2), ("host3", None)]
    assert (cluster.here, cluster.address, cluster.size, cluster.standing) == (1, "host1", None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host1\nhost2\nhost2\n", "every host once, but got host2 twice"),
        ("host1\nhost1\n", "must name this machine exactly once, but got host1, host1"),
        ("host2\n", "must name this machine exactly once, but got none of host2"),
        ("host1 4\n", "'host1 4' in line 1"),
        ("host1:0\n", "'host1:0' in line 1"),
        ("# no host\n", "must name at least one host, but got none"),
    ],
)
def test_invalid_hosts_file_raises_settings_error(tmp_path: Path, text: str, said: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path / "hosts.txt", text, "host1")
    assert said in str(caught.value)
