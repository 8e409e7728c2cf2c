"""Clusters that somebody else laid out: chief, servers and workers by a TF_CONFIG, each a program by itself."""

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
import typer

import manyhands as mh
from manyhands.cli.cluster import cluster as show_cluster
from manyhands.cli.launch import _with_task, launch
from manyhands.core import SettingsError
from manyhands.distributed import Device, World
from manyhands.distributed import world as worlds
from manyhands.training import place_here, take_part

from ..training.problems import problem
from .test_training import QUIET, events, farthest

ROLES = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
TOKEN = "a secret of enough characters"


def cluster(*counts: tuple[str, int]) -> dict[str, list[str]]:
    """Addresses on loopback, at free ports that the system gives to nobody who asks for just any."""
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
            on="cpu",
            epochs=2,
            folder=folder,
            name="placed",
            timeout=60,
            **QUIET,
        )
    except SystemExit as end:
        return f"{role} ended with {end.code}"
    return f"{role} has {run.num_steps} steps"


@pytest.mark.parametrize("late", [pytest.param(0.0, id="together"), pytest.param(2.0, id="after the last step")])
def test_a_tf_config_with_servers_trains_what_one_device_trains(
    run_ranks: Callable[[Callable[[World], Any], int], list[Any]], tmp_path: Path, late: float
) -> None:
    hosts = cluster(("chief", 1), ("ps", 2), ("worker", 2))
    said = run_ranks(functools.partial(member, hosts=hosts, folder=str(tmp_path), late=late), len(ROLES))
    assert said == ["chief has 6 steps", *["ps ended with 0"] * 2, *["worker ended with 0"] * 2]
    task = problem("mlp")
    one = mh.fit(task, mh.Single(precision="fp64"), on="cpu", epochs=2, folder=tmp_path, name="one", **QUIET)
    placed = mh.Run(tmp_path / "placed", task)
    assert farthest(one, placed) <= 1e-9
    assert placed.record["spec"]["servers"] == placed.record["spec"]["replicas"] == 2


def environ(role: str, index: int = 0, token: str = TOKEN, **hosts: list[str]) -> dict[str, str]:
    config = {"cluster": hosts, "task": {"type": role, "index": index}}
    return {"TF_CONFIG": json.dumps(config), "MANYHANDS_TOKEN": token}


HOSTS = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1", "e:1", "f:1"]}


def test_a_place_is_understood() -> None:
    place = place_here(environ("worker", 2, **HOSTS))
    assert place is not None
    assert (place.role, place.number, place.num_servers, place.num_workers) == ("worker", 2, 2, 3)
    assert TOKEN not in repr(place)
    assert place.fitted(mh.ParameterServer()) == mh.ParameterServer(servers=2, workers=3)
    with pytest.raises(SettingsError, match="same number of servers, but got 4 and 2"):
        place.fitted(mh.ParameterServer(servers=4))
    assert place_here({}) is None
    assert place_here(environ("worker", **{k: v for k, v in HOSTS.items() if k != "ps"})) is None


def test_a_cluster_without_a_secret_or_a_chief_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"a secret of at least 16 characters in MANYHANDS_TOKEN, but got none"):
        place_here(environ("ps", token="", **HOSTS))
    with pytest.raises(SettingsError, match="has a chief and workers"):
        place_here(environ("worker", **{k: v for k, v in HOSTS.items() if k != "chief"}))


@pytest.mark.parametrize(("role", "index"), [("server", 0), ("ps", 3), ("evaluator", 0)])
def test_a_role_that_the_cluster_does_not_have_is_named(role: str, index: int) -> None:
    says = f"chief 0, ps 0 to 1, worker 0 to 2, but got --role {role} --index {index}; name one of these"
    with pytest.raises(SettingsError, match=says):
        _with_task(json.dumps({"cluster": HOSTS}), role, index)


def test_an_index_without_a_role_and_a_cluster_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SettingsError, match="--index needs --role, but got --index 1 alone"):
        launch(str(script), index=1)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"chief": ["127.0.0.1:9"], "ps": ["127.0.0.1:11"]}}))
    with pytest.raises(typer.Exit):
        show_cluster(as_json=True, timeout=0.2)
    told = json.loads(capsys.readouterr().out)
    assert [host["role"] for host in told["hosts"]] == ["chief", "ps"]
    assert any("does not say which task this is" in text for text in told["warnings"])


def test_who_waits_for_a_chief_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from manyhands.strategies.served import LinkLost
    from manyhands.strategies.served import sockets as post

    monkeypatch.setattr(post, "SOON", 0.2)
    hosts = cluster(("chief", 1), ("ps", 1), ("worker", 1))
    place = place_here(environ("worker", **hosts))
    assert place is not None
    with pytest.raises(LinkLost, match="did not answer within 1 s"):
        take_part(place, problem("mlp"), place.fitted(mh.ParameterServer()), Device("cpu"), timeout=1.0)
    assert f"waiting up to 1 s for the chief at {hosts['chief'][0]}" in capsys.readouterr().err


def test_a_run_of_servers_goes_on_elsewhere_without_settings_that_nobody_made(tmp_path: Path) -> None:
    run = mh.fit(problem("mlp"), mh.ParameterServer(1, 2), on="cpu*2", steps=2, folder=tmp_path, **QUIET)
    again = mh.fit(problem("mlp"), mh.Single(), on="cpu", resume=run, **QUIET)
    assert not [entry for entry in events(again, "notice") if "the run goes on with" in entry["text"]]


def test_a_role_is_put_into_the_cluster() -> None:
    config = json.dumps({"cluster": HOSTS, "task": {"type": "worker", "index": 0}})
    assert json.loads(_with_task(config, "ps", 1)) == {"cluster": HOSTS, "task": {"type": "ps", "index": 1}}
    with pytest.raises(SettingsError, match="--role names a part of the cluster in TF_CONFIG, but got no TF_CONFIG"):
        _with_task("", "ps", 1)
