"""Clusters described by TF_CONFIG: chief, parameter servers and workers, each a separate program."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.app import app
from manyhands.cli.launch import _with_task
from manyhands.core import SettingsError
from manyhands.distributed import Device, World
from manyhands.distributed import world as worlds
from manyhands.parameter_server import find_role, run_member

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_training import QUIET, events, farthest

ROLES = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
TOKEN = "a secret of enough characters"


def cluster(*counts: tuple[str, int]) -> dict[str, list[str]]:
    """Return loopback addresses with free ports outside of the ephemeral range."""
    found: dict[str, list[str]] = {}
    ports = (port for port in random.sample(range(20_000, 30_000), 1000) if is_free(port))
    for role, count in counts:
        found[role] = [f"127.0.0.1:{next(ports)}" for _ in range(count)]
    return found


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def member(world: World, hosts: dict[str, list[str]], folder: str, late: float) -> str:
    """One program of the cluster, as a scheduler would start it; the last worker comes so many seconds later."""
    worlds._current.clear()
    role, index = ROLES[world.rank]
    if (role, index) == ROLES[-1]:
        time.sleep(late)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": hosts, "task": {"type": role, "index": index}})
    os.environ["MANYHANDS_TOKEN"] = TOKEN
    try:
        run = mh.fit(
            problem("mlp"),
            mh.ParameterServer(precision="fp64"),
            **fit_options(on="cpu", epochs=2, folder=folder, name="placed", timeout=60, **QUIET),
        )
    except SystemExit as end:
        return f"{role} ended with {end.code}"
    return f"{role} has {run.num_steps} steps"


@pytest.mark.parametrize("late", [pytest.param(0.0, id="together"), pytest.param(2.0, id="after the last step")])
def test_tf_config_cluster_matches_single_device_training(
    run_ranks: Callable[[Callable[[World], Any], int], list[Any]], tmp_path: Path, late: float
) -> None:
    hosts = cluster(("chief", 1), ("ps", 2), ("worker", 2))
    said = run_ranks(functools.partial(member, hosts=hosts, folder=str(tmp_path), late=late), len(ROLES))
    assert said == ["chief has 6 steps", *["ps ended with 0"] * 2, *["worker ended with 0"] * 2]
    task = problem("mlp")
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, folder=tmp_path, name="one", **QUIET)
    )
    placed = mh.Run(tmp_path / "placed", task)
    assert farthest(one, placed) <= 1e-9
    assert placed.record["spec"]["servers"] == placed.record["spec"]["replicas"] == 2


def environ(role: str, index: int = 0, token: str = TOKEN, **hosts: list[str]) -> dict[str, str]:
    config = {"cluster": hosts, "task": {"type": role, "index": index}}
    return {"TF_CONFIG": json.dumps(config), "MANYHANDS_TOKEN": token}


HOSTS = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1", "e:1", "f:1"]}


def test_find_role_reads_role_and_cluster_size_from_tf_config() -> None:
    place = find_role(environ("worker", 2, **HOSTS))
    assert place is not None
    assert (place.role, place.number, place.num_servers, place.num_workers) == ("worker", 2, 2, 3)
    assert TOKEN not in repr(place)
    assert place.fitted(mh.ParameterServer()) == mh.ParameterServer(servers=2, workers=3)
    with pytest.raises(SettingsError, match="same number of servers, but got 4 and 2"):
        place.fitted(mh.ParameterServer(servers=4))
    assert find_role({}) is None
    assert find_role(environ("worker", **{k: v for k, v in HOSTS.items() if k != "ps"})) is None


def test_cluster_without_token_or_chief_is_rejected() -> None:
    with pytest.raises(
        SettingsError, match=r"a secret of at least 16 characters in MANYHANDS_TOKEN, but got no secret"
    ):
        find_role(environ("ps", token="", **HOSTS))
    with pytest.raises(SettingsError, match="must have a chief and workers"):
        find_role(environ("worker", **{k: v for k, v in HOSTS.items() if k != "chief"}))


@pytest.mark.parametrize(("role", "index"), [("server", 0), ("ps", 3), ("evaluator", 0)])
def test_unknown_role_or_index_is_rejected_with_valid_tasks(role: str, index: int) -> None:
    says = f"chief 0, ps 0 to 1, worker 0 to 2.*, but got --role {role} --index {index}. Name one of these tasks"
    with pytest.raises(SettingsError, match=says):
        _with_task(json.dumps({"cluster": HOSTS}), role, index)


def test_index_needs_role_and_show_cluster_warns_without_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    alone = CliRunner().invoke(app, ["launch", str(script), "--index", "1"])
    assert "--index must be given together with --role, but got --index 1 alone" in " ".join(alone.stderr.split())
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"chief": ["127.0.0.1:9"], "ps": ["127.0.0.1:11"]}}))
    told = json.loads(CliRunner().invoke(app, ["cluster", "--json", "--timeout", "0.2"]).stdout)
    assert [host["role"] for host in told["hosts"]] == ["chief", "ps"]
    assert any("does not say which task this is" in text for text in told["warnings"])


def test_worker_logs_wait_for_chief_and_fails_after_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from manyhands.parameter_server import sockets as post
    from manyhands.parameter_server.sockets import ConnectionLost

    monkeypatch.setattr(post, "SOON", 0.2)
    hosts = cluster(("chief", 1), ("ps", 1), ("worker", 1))
    place = find_role(environ("worker", **hosts))
    assert place is not None
    with pytest.raises(ConnectionLost, match="did not answer within 1 s"):
        run_member(place, problem("mlp"), place.fitted(mh.ParameterServer()), Device("cpu"), timeout=1.0)
    assert f"waiting up to 1 s for the coordinator at {hosts['chief'][0]}" in capsys.readouterr().err


def test_resume_on_one_device_logs_no_unrequested_setting_changes(tmp_path: Path) -> None:
    run = mh.fit(problem("mlp"), mh.ParameterServer(1, 2), **fit_options(on="cpu*2", steps=2, folder=tmp_path, **QUIET))
    again = mh.fit(problem("mlp"), mh.Single(), **fit_options(on="cpu", resume=run, **QUIET))
    assert not [entry for entry in events(again, "notice") if "the run continues with" in entry["text"]]


def test_role_and_index_options_override_tf_config_task() -> None:
    config = json.dumps({"cluster": HOSTS, "task": {"type": "worker", "index": 0}})
    assert json.loads(_with_task(config, "ps", 1)) == {"cluster": HOSTS, "task": {"type": "ps", "index": 1}}
    with pytest.raises(
        SettingsError, match="--role needs a TF_CONFIG that describes the cluster, but got no TF_CONFIG"
    ):
        _with_task("", "ps", 1)
