"""Failures of members at every stage, and a ledger that shows each gradient applied exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import RunError

from ..grouped_options import fit_options
from ..training.problems import problem
from .test_training import QUIET, events, farthest


class Mortal(torch.optim.SGD):
    """Exit after an update and before its acknowledgement, when a file asks for it."""

    def __init__(self, parameters: Any, trap: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.trap = trap

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        die_if(self.trap)


def die_if(trap: str) -> None:
    """Ends this process if the trap is set; it is sprung once."""
    try:
        os.unlink(trap)
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class SetTrap(mh.Callback):
    """Sets a trap after a step."""

    def __init__(self, trap: str, step: int) -> None:
        self.trap, self.step = trap, step

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps == self.step:
            self.step = -1
            Path(self.trap).touch()


@pytest.mark.parametrize("staleness", [0, None])
def test_server_killed_between_update_and_reply_is_restored(staleness: int | None, tmp_path: Path) -> None:
    trap = str(tmp_path / "trap")
    task = problem("mlp", rows=96).replace(optimizer=lambda model: Mortal(model.parameters(), trap))
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=3, folder=tmp_path, name="one", **QUIET)
    )
    spec = mh.ParameterServer(servers=2, workers=2, staleness=staleness, precision="fp64")
    run = mh.fit(
        task,
        spec,
        **fit_options(on="cpu*2", epochs=3, folder=tmp_path, name="ps", callbacks=[SetTrap(trap, 8)], **QUIET),
    )
    told = events(run, "servers")[-1]
    assert told["lost_servers"] == 1
    assert told["lost_workers"] == 0
    assert events(run, "recovered")[0]["step"] == 6
    assert run.num_steps == one.num_steps == 18
    # Since the servers were filled with the checkpoint of step 6, each has applied every gradient once.
    assert told["ledger"] == [12 * (2 if staleness == 0 else 1)] * 2
    if staleness == 0:
        assert farthest(one, run) <= 1e-9
        assert run.losses == pytest.approx(one.losses, rel=1e-9)


def test_server_killed_before_first_checkpoint_restarts_from_step_zero(tmp_path: Path) -> None:
    trap = str(tmp_path / "trap")
    # Many steps, because the servers may be some steps ahead of the callback that sets the trap.
    task = problem("mlp", rows=768).replace(optimizer=lambda model: Mortal(model.parameters(), trap))
    one = mh.fit(task, mh.Single(precision="fp64"), **fit_options(on="cpu", folder=tmp_path, name="one", **QUIET))
    spec = mh.ParameterServer(servers=2, workers=2, precision="fp64")
    run = mh.fit(
        task, spec, **fit_options(on="cpu*2", folder=tmp_path, name="ps", callbacks=[SetTrap(trap, 2)], **QUIET)
    )
    assert events(run, "servers")[-1]["lost_servers"] == 1
    assert farthest(one, run) <= 1e-9


def deadly_loss(trap: str) -> Any:
    """A loss whose worker dies in the middle of its next push: one server has the gradient, the other has not."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        from manyhands.parameter_server.client import ParameterClient

        if os.path.exists(trap) and not hasattr(ParameterClient, "calm"):
            ParameterClient.calm, fill = True, ParameterClient._fill  # type: ignore[attr-defined]
            calls: list[int] = []

            def fill_and_die(self: ParameterClient, link: Any) -> list[int]:
                calls.append(1)
                if len(calls) == 2:
                    die_if(trap)
                return fill(self, link)

            ParameterClient._fill = fill_and_die  # type: ignore[method-assign]
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


@pytest.mark.parametrize("mode", [{"staleness": 0}, {"staleness": None}, {"backup": 1}])
def test_worker_killed_while_pushing_loses_no_sample(mode: dict[str, Any], tmp_path: Path) -> None:
    trap = str(tmp_path / "trap")
    task = problem("mlp", rows=96).replace(loss=deadly_loss(trap))
    spec = mh.ParameterServer(servers=2, workers=3, precision="fp64", **mode)
    run = mh.fit(
        task,
        spec,
        **fit_options(on="cpu*3", epochs=3, folder=tmp_path, name="ps", callbacks=[SetTrap(trap, 4)], **QUIET),
    )
    told = events(run, "servers")[-1]
    assert told["lost_workers"] == 1
    assert told["lost_servers"] == 0
    assert run.num_steps == 18
    parts = {0: 3, None: 1}[spec.staleness] if not spec.backup else 2
    assert told["ledger"] == [18 * parts] * 2
    if mode == {"staleness": 0}:
        one = mh.fit(
            task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=3, folder=tmp_path, name="one", **QUIET)
        )
        assert farthest(one, run) <= 1e-9


def test_a_worker_that_freezes_is_replaced(tmp_path: Path) -> None:
    trap = str(tmp_path / "trap")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if os.path.exists(trap) and os.getpid() != parent:
            os.unlink(trap)
            os.kill(os.getpid(), signal.SIGSTOP)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    parent = os.getpid()
    spec = mh.ParameterServer(servers=2, workers=2)
    task = problem("mlp", rows=96).replace(loss=loss)
    callbacks = [SetTrap(trap, 2)]
    run = mh.fit(task, spec, **fit_options(on="cpu*2", folder=tmp_path, callbacks=callbacks, timeout=8, **QUIET))
    assert events(run, "servers")[-1]["lost_workers"] == 1
    assert run.num_steps == 6


def test_repeatedly_killed_worker_fails_the_run(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if "PYTEST_CURRENT_TEST" in os.environ and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    parent = os.getpid()
    with pytest.raises(RunError, match="worker . was killed by signal 9"):
        mh.fit(
            problem("mlp").replace(loss=loss),
            mh.ParameterServer(workers=2),
            **fit_options(on="cpu*2", folder=tmp_path, **QUIET),
        )


def test_loss_exception_in_worker_is_raised_by_fit(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if os.getpid() != parent:
            raise ZeroDivisionError("in the loss")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    parent = os.getpid()
    with pytest.raises(RunError, match="ZeroDivisionError: in the loss"):
        mh.fit(
            problem("mlp").replace(loss=loss),
            mh.ParameterServer(workers=2),
            **fit_options(on="cpu*2", folder=tmp_path, **QUIET),
        )


PROGRAM = """
import sys, time
import manyhands as mh
from tests.training.problems import problem

class Slow(mh.Callback):
    def on_step(self, hand):
        time.sleep(0.05)

mh.fit(problem("mlp", rows=96), mh.ParameterServer(servers=2, workers=2, precision="fp64"), on="cpu*2",
       epochs=30, folder=sys.argv[1], name="ps", callbacks=[Slow()])
"""


def test_killed_coordinator_leaves_no_processes_and_run_can_be_resumed(tmp_path: Path) -> None:
    chief = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    try:
        wait_for(lambda: list(tmp_path.glob("ps/checkpoints/step-*/COMMITTED")))
        members = psutil.Process(chief.pid).children(recursive=True)
        assert len(members) >= 5
    finally:
        chief.kill()
        chief.wait()
    wait_for(lambda: not any(member.is_running() and member.status() != "zombie" for member in members))
    task = problem("mlp", rows=96)
    spec = mh.ParameterServer(servers=3, workers=2, precision="fp64")
    before = mh.Run(tmp_path / "ps", task).num_steps
    epochs = before // 6 + 2
    run = mh.fit(task, spec, **fit_options(on="cpu*2", epochs=epochs, folder=tmp_path, name="ps", resume=True, **QUIET))
    one = mh.fit(
        task, mh.Single(precision="fp64"), **fit_options(on="cpu", epochs=epochs, folder=tmp_path, name="one", **QUIET)
    )
    assert run.num_steps == one.num_steps
    assert farthest(one, run) <= 1e-9


def wait_for(happens: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
