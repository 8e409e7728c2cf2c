"""Ranks started by another launcher: torchrun, or a shell on every host with the same variables."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.distributed import Device, RankInfo, World
from manyhands.distributed.world import _current
from manyhands.launcher import SERVER, TRAINERS, launched
from manyhands.launcher.existing_cluster import _end_together
from manyhands.testing import NamespaceHosts, held_ports
from manyhands.training import joined_world

Ranks = Callable[[Callable[[World], Any], int], list[Any]]
SCRIPT = """
import json, os, sys
import psutil, torch
import manyhands as mh

hand = mh.hand()
total = float(hand.sum(hand.rank + 1.0))
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=(torch.arange(48.0).view(12, 4) / 48, torch.ones(12, 1)),
    batch_size=4,
)
ours = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
run = mh.fit(task, epochs=2, name="run", folder=sys.argv[1])
ranks = mh.launch(lambda hand: (hand.rank, hand.size))
told = {"rank": hand.rank, "total": total, "listens": sorted(set(ours)), "ranks": ranks,
        "steps": run.outcome.num_steps, "losses": run.losses, "spec": run.record["spec"]}
print(json.dumps(told))
"""


def environment(**more: Any) -> dict[str, str]:
    return {**os.environ, **{name: str(value) for name, value in more.items()}}


def told(texts: list[str]) -> list[dict[str, Any]]:
    """What the ranks printed; two of them may share a line, for each writes its text and its end apart."""
    decoder, found = json.JSONDecoder(), []
    for text in texts:
        at = text.find("{")
        while at >= 0:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
            at = text.find("{", end)
    return sorted(found, key=lambda value: value["rank"])


@pytest.mark.root
def test_environment_variables_on_every_host_form_one_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "host1", "MASTER_PORT": 29511}
    with NamespaceHosts(2) as hosts:
        ranks = [
            host.popen(
                [sys.executable, str(script), str(tmp_path)],
                env=environment(RANK=rank, **common), stdout=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        first, second = told([rank.communicate(timeout=90)[0] for rank in ranks])
    assert [first["total"], second["total"]] == [3.0, 3.0]
    assert (first["steps"], second["steps"]) == (6, 6)
    assert len(first["losses"]) == 6
    assert first["spec"] == second["spec"]
    assert second["ranks"] == [[1, 2]]
    # Nothing listens on all interfaces, nor on any other one.
    assert first["listens"] == ["10.77.0.1"]
    assert second["listens"] == ["10.77.0.2"]


def test_torchrun_ranks_form_one_world_with_a_shared_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TOKEN", "a" * 40)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=90)
    ranks = told([done.stdout])
    assert [rank["total"] for rank in ranks] == [3.0, 3.0], done.stderr
    assert [len(rank["losses"]) for rank in ranks] == [6, 6]


def test_program_without_launcher_variables_is_not_launched() -> None:
    assert launched(environ={"PATH": "/bin"}) is None
    alone = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert launched(environ={**alone, "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "4"}) is None


def test_tf_config_assigns_ranks_to_chief_and_workers(run_ranks: Ranks) -> None:
    """A cluster described by TF_CONFIG trains unchanged; processes that are not workers are refused."""
    roles = {"chief": [""], "worker": ["localhost:1"], "ps": ["localhost:2"]}

    def variables(role: str) -> dict[str, str]:
        return {"TF_CONFIG": json.dumps({"cluster": roles, "task": {"type": role, "index": 0}})}

    def join(world: World, parts: Sequence[str] = TRAINERS) -> tuple[int, int, float]:
        os.environ.update(variables(("chief", "worker", "ps")[world.rank]))
        world.close()
        _current.clear()  # as in a process that manyhands did not start
        joined_world(roles=parts)
        hand = mh.hand()
        return hand.rank, hand.size, float(hand.sum(hand.rank + 1.0))

    with held_ports(2) as ports:
        roles["chief"] = [f"localhost:{ports[0]}"]
        assert run_ranks(join, 2) == [(0, 2, 3.0), (1, 2, 3.0)]
        # Where servers are ranks too they come last.
        roles["chief"] = [f"localhost:{ports[1]}"]
        every = functools.partial(join, parts=(*TRAINERS, SERVER))
        assert run_ranks(every, 3) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    with pytest.raises(SettingsError, match="tasks of the role chief or worker.*got ps at localhost:2"):
        launched(environ=variables("ps"))


def test_store_server_rank_exits_last() -> None:
    """The last value in the store, that a file is written, is still there for slower ranks."""
    store = dist.HashStore()
    first, second = (RankInfo(rank=rank, size=2, device=Device("cpu"), timeout=600.0) for rank in range(2))
    ending = threading.Thread(target=_end_together, args=(store, first))
    ending.start()
    while store.add("ended0", 0) < 1:
        assert ending.is_alive()
    assert ending.is_alive()
    _end_together(store, second)
    ending.join(120)
    assert store.add("ended0", 0) == 2


def test_one_process_for_several_devices_is_rejected(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=4\nhost2 slots=4\n")
    with pytest.raises(SettingsError, match="one process for the 4 devices of localhost"):
        launched(str(hosts), {})
    met = launched(str(hosts), {}, per_host=True)  # to compare hosts, one rank of each is enough
    assert met is not None
    assert met.standing is not None
    assert (met.standing.rank, met.standing.size) == (0, 2)
    hosts.write_text("host2\nlocalhost\n")
    cluster = launched(str(hosts), {})
    assert cluster is not None
    assert cluster.standing is not None
    assert (cluster.standing.rank, cluster.standing.size, cluster.address) == (1, 2, "host2")
