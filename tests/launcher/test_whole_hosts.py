"""One process per host with several devices: hosts join with a rank per device, over the fastest way between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.distributed.links import MeasuredLink
from manyhands.launcher import whole_host
from manyhands.launcher.joining.probing import candidates, chosen
from manyhands.testing import NamespaceHosts

from .environments import tf_config

TOKEN = "a" * 40
SCRIPT = """
import manyhands as mh, torch
task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    data=(torch.arange(48.0).view(12, 4) / 48, torch.ones(12, 1)),
    batch_size=4,
)
run = mh.fit(task, epochs=2, name="run", folder="runs", on="cpu*2", options=mh.options.Recovery(timeout=60))
print(run.record["devices"], run.losses)
"""


@pytest.mark.root
def test_tf_config_hosts_with_two_devices_use_the_fastest_link(tmp_path: Path) -> None:
    """The switch is slow and a wire of their own is not: what ranks exchange goes over the wire."""
    (tmp_path / "script.py").write_text(SCRIPT)
    roles = {"worker": ["host1:7777", "host2:7777"]}
    path = {"PYTHONPATH": str(Path(mh.__file__).parents[1]), "OMP_NUM_THREADS": "1", "MANYHANDS_TOKEN": TOKEN}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with NamespaceHosts(2, rate="40mbit") as hosts:
        hosts.add_wire("eth1", "10.78.0")
        programs = [
            host.popen(
                [sys.executable, "script.py"],
                env={**os.environ, **path, **tf_config(roles, "worker", index)},
                **options,
            )
            for index, host in enumerate(hosts)
        ]
        said = [program.communicate(timeout=250) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    assert "['host1/cpu#0', 'host1/cpu#1', 'host2/cpu#0', 'host2/cpu#1']" in said[0][0]
    calm = mh.fit(
        _task(), mh.Single(), epochs=2, on="cpu", folder=tmp_path / "calm", options=mh.options.Display(progress=False)
    )
    run = mh.Run(tmp_path / "runs" / "run")
    assert run.losses == pytest.approx(calm.losses, rel=1e-5)
    told = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    ways = [entry["text"] for entry in told if entry["kind"] == "notice" and " reaches " in entry["text"]]
    assert len(ways) == 2, ways
    slow, fast = sorted(ways)
    assert re.match(r"host2 reaches 10\.77\.0\.1 by eth0: [\d.]+ Mbit/s", slow), slow
    assert fast.startswith("host2 reaches 10.78.0.1 by eth1: ")
    assert fast.endswith("µs, chosen")
    assert "chosen" not in slow


def _task() -> mh.Task:
    space: dict[str, Any] = {}
    exec(SCRIPT[: SCRIPT.index("run = ")], space)
    made: mh.Task = space["task"]
    return made


def test_whole_host_join_is_detected_from_environment_and_hosts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MANYHANDS_TOKEN", raising=False)
    two = tf_config({"chief": ["host1:7777"], "worker": ["host2:7777"], "evaluator": ["host3:1"]}, "worker")
    assert whole_host(environ={"PATH": "/bin"}) is None
    assert whole_host("cpu", two) is None, "one device each: the process itself is a rank"
    found = whole_host("cpu*2", two)
    assert found is not None
    assert (found.address, found.hosts, found.on) == ("host1:7777", 2, "cpu*2")
    assert whole_host("cpu", {**two, "MANYHANDS_TOKEN": TOKEN}) is not None
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=3\nhost2\n")
    listed = whole_host(str(hosts), {})
    assert listed is not None
    assert (listed.hosts, listed.on) == (2, "cpu*3")
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODEID": "1",
             "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "2"}  # fmt: skip
    task_per_node = whole_host(None, slurm)
    assert task_per_node is not None
    assert (task_per_node.address, task_per_node.hosts) == ("n1:15001", 2)
    with pytest.raises(SettingsError, match=r"shared token .* got no token. Run export MANYHANDS_TOKEN=\$\(openssl"):
        found.gather(None, 1.0, print)
    with pytest.raises(SettingsError, match="tasks of the role chief or worker, but got evaluator at host3"):
        whole_host("cpu*2", tf_config({"worker": ["host1:1", "host2:1"], "evaluator": ["host3:1"]}, "evaluator"))


def test_alternative_link_is_chosen_only_if_clearly_faster_and_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(*rates: tuple[str, str, float]) -> list[MeasuredLink]:
        return [MeasuredLink(host, "eth", address, 1e-4, rate) for host, address, rate in rates]

    assert chosen([], "10.0.0.1") == "10.0.0.1"
    assert chosen(ways(("b", "10.0.0.1", 1e9), ("b", "10.1.0.1", 1.2e9)), "10.0.0.1") == "10.0.0.1"
    some = ways(("b", "10.0.0.1", 1e6), ("c", "10.0.0.1", 1e6), ("b", "10.1.0.1", 1e9))
    assert chosen(some, "10.0.0.1") == "10.0.0.1", "not every host can go the faster way"
    monkeypatch.setattr(
        "manyhands.launcher.joining.probing.our_addresses",
        lambda: {"127.0.0.1": "lo", "10.0.0.1": "a", "10.1.0.1": "b", "8.8.4.4": "c"},
    )
    assert candidates("10.0.0.1") == ["10.0.0.1", "10.1.0.1"]
    assert candidates("8.8.4.4") == ["8.8.4.4", "10.0.0.1", "10.1.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "b")
    assert candidates("10.0.0.1") == ["10.1.0.1"]
