"""Followers: one of them replaces a failed server, with every acknowledged update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import StrategyError

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_faults import SetTrap, die_if
from .test_training import QUIET, events, farthest, recommender

POINTS: dict[str, tuple[str, bool, bool]] = {
    "a push arrives": ("_take", True, False),
    "it was taken, and not acknowledged": ("_enter", True, True),
    "a step was closed": ("_take_step", True, True),
    "the follower takes a push": ("_enter", False, False),
}
"""When a server dies: in which function, whether the leader or a follower, and whether after the call."""


def mortal(make: Callable[[nn.Module], Any], trap: str, point: str) -> Callable[[nn.Module], Any]:
    """An optimizer's factory that lays a trap in the servers' processes, where it is called too."""
    name, leads, after = POINTS[point]
    parent = os.getpid()

    def optimizer(model: nn.Module) -> Any:
        from manyhands.parameter_server.server import ParameterShardServer

        if os.getpid() != parent:
            plain = getattr(ParameterShardServer, name)

            def deadly(self: ParameterShardServer, *rest: Any) -> Any:
                if self.leads == leads and not after:
                    die_if(trap)
                found = plain(self, *rest)
                if self.leads == leads and after:
                    die_if(trap)
                return found

            setattr(ParameterShardServer, name, deadly)
        return make(model)

    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("point", "mode"),
    [
        ("a push arrives", {"staleness": 0}),
        ("a push arrives", {"staleness": None}),
        ("it was taken, and not acknowledged", {"staleness": None}),
        ("a step was closed", {"staleness": 0}),
        ("a step was closed", {"staleness": 2}),
        ("the follower takes a push", {"staleness": 0}),
        ("the follower takes a push", {"staleness": None}),
    ],
)
def test_every_gradient_is_applied_once_despite_server_or_follower_failure(
    point: str, mode: dict[str, Any], tmp_path: Path
) -> None:
    trap = str(tmp_path / "trap")
    task = problem("mlp", rows=96).replace(optimizer=mortal(sgd, trap, point), clip=1.0)
    spec = mh.ParameterServer(servers=2, workers=2, followers=1, precision="fp64", **mode)
    run = mh.fit(
        task,
        spec,
        **fit_options(on="cpu*2", epochs=3, folder=tmp_path, name="ps", callbacks=[SetTrap(trap, 4)], **QUIET),
    )
    told = events(run, "servers")[-1]
    died = "lost_followers" if point.startswith("the follower") else "lost_servers"
    assert {"lost_servers": 0, "lost_followers": 0, **{died: 1}}.items() <= told.items()
    # Nothing was taken back: every gradient of the whole run is in both servers' ledgers, once.
    assert not events(run, "recovered")
    assert run.num_steps == 18
    assert told["ledger"] == [18 if spec.staleness is None else 36] * 2
    if spec.staleness == 0:
        one = mh.fit(
            task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=3, folder=tmp_path, name="one", **QUIET)
        )
        assert farthest(one, run) <= 1e-9
        assert run.losses == pytest.approx(one.losses, rel=1e-9)


class SetTrapAgain(mh.Callback):
    """Sets a trap after the first steps, and once more when the one that took over has a follower."""

    def __init__(self, trap: str, log: Path) -> None:
        self.trap, self.log = trap, log
        self.is_set = 0

    def on_step(self, hand: mh.Hand) -> None:
        filled = self.log.read_text().count('"followed"')
        if (hand.num_steps >= 4 and not self.is_set) or (filled == 3 and self.is_set == 1):
            self.is_set += 1
            Path(self.trap).touch()
        if self.is_set == 1:
            time.sleep(0.05)


def test_embedding_rows_survive_two_server_failures_with_followers(tmp_path: Path) -> None:
    trap = str(tmp_path / "trap")
    task = recommender("Adagrad")
    assert task.optimizer is not None
    task = task.replace(optimizer=mortal(task.optimizer, trap, "a step was closed"))
    spec = mh.ParameterServer(servers=2, workers=2, followers=1, precision="fp64")
    traps = [SetTrapAgain(trap, tmp_path / "ps" / "events.jsonl")]
    run = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=30, folder=tmp_path, name="ps", callbacks=traps, **QUIET))
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=30, folder=tmp_path, name="one", **QUIET)
    )
    assert events(run, "servers")[-1]["lost_servers"] == 2
    assert not events(run, "recovered")
    assert farthest(one, run) <= 1e-9


def test_followers_must_be_zero_or_one_and_need_parameter_servers() -> None:
    with pytest.raises(StrategyError, match=r"followers must be 0 or 1, but got 2. Pass followers=1"):
        mh.ParameterServer(servers=2, followers=2)
    with pytest.raises(StrategyError, match="followers can only be used with parameter servers"):
        mh.StrategySpec(replicas=2, followers=1)
    assert str(mh.ParameterServer(2, 4, followers=1)) == "replicas=4,servers=2,followers=1"
