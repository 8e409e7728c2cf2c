"""Ranks that somebody else launched: by torchrun, or by a shell on every host with the same variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.cluster import launched
from manyhands.core import SettingsError
from manyhands.testing import Hosts

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
run = mh.fit(task, epochs=2, name="run", folder=sys.argv[1], progress=False)
ranks = mh.launch(lambda hand: (hand.rank, hand.size))
told = {"rank": hand.rank, "total": total, "listens": sorted(set(ours)), "ranks": ranks,
        "steps": run.outcome.num_steps, "losses": run.losses, "spec": run.record["spec"]}
print(json.dumps(told))
"""


def environment(**more: Any) -> dict[str, str]:
    return {**os.environ, **{name: str(value) for name, value in more.items()}}


def told(texts: list[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.mark.root
def test_a_shell_on_every_host_makes_one_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "host1", "MASTER_PORT": 29511}
    with Hosts(2) as hosts:
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


def test_torchrun_makes_one_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=90)
    ranks = told([done.stdout])
    assert [rank["total"] for rank in ranks] == [3.0, 3.0], done.stderr
    assert [len(rank["losses"]) for rank in ranks] == [6, 6]


def test_a_plain_program_was_not_launched() -> None:
    assert launched(environ={"PATH": "/bin"}) is None
    alone = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert launched(environ={**alone, "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "4"}) is None


def test_a_tf_config_gives_its_workers_ranks(tmp_path: Path) -> None:
    """A cluster that TensorFlow set up trains as it is; whoever is no worker there is refused."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    roles = {"chief": ["localhost:29523"], "worker": ["localhost:29524"], "ps": ["localhost:29525"]}

    def variables(role: str) -> dict[str, str]:
        return environment(TF_CONFIG=json.dumps({"cluster": roles, "task": {"type": role, "index": 0}}))

    command = [sys.executable, str(script), str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=variables(role), stdout=subprocess.PIPE, text=True) for role in ("chief", "worker")
    ]
    first, second = told([rank.communicate(timeout=90)[0] for rank in ranks])
    assert [first["total"], second["total"]] == [3.0, 3.0]
    assert first["losses"] == second["losses"]
    with pytest.raises(SettingsError, match="chief and worker train.*got ps at localhost:29525"):
        launched(environ=variables("ps"))


def test_a_process_for_many_devices_is_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=4\nhost2 slots=4\n")
    with pytest.raises(SettingsError, match="one process for the 4 devices of localhost"):
        launched(str(hosts), {})
    hosts.write_text("host2\nlocalhost\n")
    cluster = launched(str(hosts), {})
    assert cluster is not None
    assert cluster.place is not None
    assert (cluster.place.rank, cluster.place.size, cluster.address) == (1, 2, "host2")
