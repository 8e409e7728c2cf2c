"""Simultaneous and repeated failures of members, and restarts from the initial weights."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import NoProgress
from manyhands.strategies.optimizer_traits import NUM_STEPS

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_training import QUIET, events, farthest


class KillAll(mh.Callback):
    """Ends all processes that have left their number in a folder, once."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.step:
            self.step = -1
            for file in self.folder.glob("pid*"):
                os.kill(int(file.name[3:]), signal.SIGKILL)


def marked(task: mh.Task, folder: Path, roles: tuple[str, ...]) -> mh.Task:
    """A task whose members of these roles leave their number in a folder."""
    parent, make = os.getpid(), task.optimizer
    assert make is not None

    def optimizer(model: nn.Module) -> Any:
        from manyhands.parameter_server.server import ParameterShardServer

        if os.getpid() != parent:
            plain = ParameterShardServer._join

            def join(self: ParameterShardServer) -> None:
                if ("server" if self.leads else "follower") in roles:
                    (folder / f"pid{os.getpid()}").touch()
                plain(self)

            ParameterShardServer._join = join  # type: ignore[method-assign]
        return make(model)

    return task.replace(optimizer=optimizer)


@pytest.mark.parametrize("followers", [0, 1])
def test_simultaneously_failed_servers_are_restored_from_checkpoint(followers: int, tmp_path: Path) -> None:
    task = marked(problem("mlp", rows=96), tmp_path, ("server", "follower"))
    one = mh.fit(
        problem("mlp", rows=96),
        mh.Single(precision="fp64"),
        **fit_options(on="cpu", epochs=3, folder=tmp_path, **QUIET),
    )
    spec = mh.ParameterServer(servers=2, workers=2, followers=followers, precision="fp64")
    killer = KillAll(tmp_path, 8)
    run = mh.fit(
        task, spec, **fit_options(on="cpu*2", epochs=3, folder=tmp_path, name="ps", callbacks=[killer], **QUIET)
    )
    assert events(run, "recovered")[0]["step"] == 6
    assert events(run, "servers")[-1]["lost_servers"] >= 2
    assert run.num_steps == 18
    assert farthest(one, run) <= 1e-9
    told = [entry["text"] for entry in events(run, "notice") if "was killed" in entry["text"]]
    assert len(told) == len(set(told)) <= 4


def test_server_failure_while_another_server_reduces_does_not_lose_the_step(tmp_path: Path) -> None:
    """Its answer bears the term from before the loss, and still counts."""
    parent = os.getpid()

    def optimizer(model: nn.Module) -> Any:
        from manyhands.parameter_server.server import ParameterShardServer

        if os.getpid() != parent:
            plain = ParameterShardServer._take_step

            def slow(self: ParameterShardServer, message: Any) -> None:
                number = self.shard.number
                if self.leads and message.step == 5 and first(tmp_path / f"lead{number}"):
                    time.sleep(0.1 if number == 0 else 1.0)
                    if number == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                plain(self, message)

            ParameterShardServer._take_step = slow  # type: ignore[method-assign]
        return torch.optim.SGD(model.parameters(), lr=0.1)

    task = problem("mlp", rows=96).replace(optimizer=optimizer, clip=1.0)
    spec = mh.ParameterServer(servers=2, workers=2, followers=1, precision="fp64")
    run = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=2, folder=tmp_path, name="ps", timeout=10, **QUIET))
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=2, folder=tmp_path, name="one", **QUIET)
    )
    assert events(run, "servers")[-1]["lost_servers"] == 1
    assert not events(run, "recovered")
    assert farthest(one, run) <= 1e-9


def first(file: Path) -> bool:
    """Return whether this is the first call."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Poisoned(torch.optim.SGD):
    """An update that always ends its process, at the same step, which is later than any of a trial before training."""

    FATAL = NUM_STEPS + 4

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                slots["count"] = float(slots.get("count", 0.0)) + 1
                if slots["count"] == self.FATAL:
                    os.kill(os.getpid(), signal.SIGKILL)


def test_server_failing_at_same_update_repeatedly_raises_no_progress(tmp_path: Path) -> None:
    task = problem("mlp", rows=96).replace(optimizer=lambda model: Poisoned(model.parameters(), lr=0.05, momentum=0.1))
    with pytest.raises(
        NoProgress, match="server 0 was killed by signal 9.*, repeatedly, without completing a step"
    ) as info:
        mh.fit(
            task,
            mh.ParameterServer(servers=1, workers=1),
            **fit_options(on="cpu", epochs=6, folder=tmp_path, name="r", **QUIET),
        )
    assert info.value.exit_code == 70
    assert len(events(mh.Run(tmp_path / "r", task), "member_lost")) == 4


def test_rollback_to_start_restores_initial_weights(tmp_path: Path) -> None:
    """The save of step 6 is left out, because steps are; what it brought to the chief must not count."""
    parent, calls = os.getpid(), [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        factor = float("nan") if os.getpid() != parent and 4 <= calls[0] <= 7 else 1.0
        return factor * nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = problem("mlp", rows=160).replace(max_skipped=4, not_finite="skip")
    spec = mh.ParameterServer(servers=1, workers=1, precision="fp64")
    where: dict[str, Any] = {"on": "cpu", "save_every": 6, "folder": tmp_path, **QUIET}
    sound = mh.fit(task, spec, **fit_options(name="sound", **where))
    run = mh.fit(task.replace(loss=loss), spec, **fit_options(name="run", **where))
    assert events(run, "recovered")[0]["source"] == "its beginning"
    assert run.losses == pytest.approx(sound.losses, rel=1e-9)
    assert farthest(sound, run) <= 1e-9
