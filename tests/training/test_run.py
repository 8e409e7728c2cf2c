"""Run: its values by step, also with skipped steps, and refusals to overwrite."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import FileError, SettingsError

from ..grouped_options import fit_options
from .problems import classify, generator, mlp


def task(**settings: Any) -> mh.Task:
    return mh.Task(
        model=mlp,
        loss=classify,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(torch.randn(32, 12, generator=generator(0)), torch.randint(0, 5, (32,), generator=generator(1))),
        batch_size=8,
        shuffle=False,
    ).replace(**settings)


def fit(made: mh.Task, folder: Path, **settings: Any) -> mh.Run:
    return mh.fit(made, **fit_options(on="cpu", folder=folder, progress=False, **settings))


def test_skipped_steps_are_nan_in_losses_and_keep_step_positions(tmp_path: Path) -> None:
    made = task(not_finite="skip")
    made.data[0][10] = float("nan")
    run = fit(made, tmp_path, epochs=2, name="a")
    assert run.skipped == [2, 6]
    assert [math.isnan(loss) for loss in run.losses] == [False, True, False, False] * 2
    assert run.losses[6] == run.history["loss"][7]
    assert 6 not in run.history["loss"]
    again = fit(made, tmp_path, epochs=3, name="a", resume=True)
    assert again.skipped == [2, 6, 10]
    assert len(again.losses) == 12


def test_save_pretrained_rejects_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "gpt").write_text("mine")
    run = fit(task(), tmp_path / "runs")
    for path in (tmp_path / "gpt", tmp_path / "gpt" / "inner"):
        with pytest.raises(SettingsError, match="gpt, which is a file. Choose another path"):
            run.save_pretrained(path)
    assert (tmp_path / "gpt").read_text() == "mine"


def test_ctrl_c_during_evaluate_raises_keyboard_interrupt(tmp_path: Path) -> None:
    """Only fit and launch end after a step when they are asked to; plan, profile and check go the way of evaluate."""
    here, armed = os.getpid(), tmp_path / "armed"

    def loss(model: nn.Module, batch: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            armed.unlink()
            os.kill(here, signal.SIGINT)
        return classify(model, batch)

    run = fit(task(loss=loss), tmp_path, steps=1)
    for strategy, on in (("single", "cpu"), ("mirrored", "cpu*2")):
        armed.touch()
        with pytest.raises(KeyboardInterrupt):
            mh.evaluate(run, task().data, strategy, on=on)
        assert not armed.exists()


def test_unwritable_run_folder_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for more in ({}, {"name": "first", "resume": "auto"}):
        with pytest.raises(SettingsError, match=r"but got .*file \(Not a directory\). Choose another one with folder="):
            fit(task(), tmp_path / "file", **more)


def test_sharded_on_one_device_prints_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mh.fit(task(), "sharded", on="cpu", steps=1, folder=tmp_path)
    assert 'there is one device (cpu), so one shard; on="cpu*2" makes two' in capsys.readouterr().err


@pytest.mark.parametrize("name", [".lock", "run.tmp", "metrics.csv"])
def test_resuming_a_foreign_run_never_writes_through_its_links(tmp_path: Path, name: str) -> None:
    """A run folder of another user may hold links with the names of files that a resumed run writes."""
    run = fit(task(), tmp_path / "runs", steps=1, name="theirs", log_to="csv")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(victim)
    with contextlib.suppress(FileError):  # A sink that fails is dropped; everything else stops the run.
        fit(task(), tmp_path / "runs", steps=2, name="theirs", resume=True, log_to="csv")
    assert victim.read_text() == "mine"
