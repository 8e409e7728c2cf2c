"""Which steps are saved: ends of epochs as far as their cost allows, and always the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import read_events
from manyhands.training import checkpoint_schedule
from manyhands.training.checkpoint_schedule import CheckpointPace

from ..grouped_options import fit_options
from .problems import classify, generator, mlp


def saved(folder: Path, **settings: Any) -> list[int]:
    """The steps at which a run of five epochs of four steps saves checkpoints."""
    task = mh.Task(
        model=mlp,
        loss=classify,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(torch.randn(32, 12, generator=generator(0)), torch.randint(0, 5, (32,), generator=generator(1))),
        batch_size=8,
    )
    run = mh.fit(task, **fit_options(on="cpu", folder=folder, progress=False, epochs=5, **settings))
    return [entry["step"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "checkpoint"]


def test_short_runs_save_every_epoch(tmp_path: Path) -> None:
    assert saved(tmp_path) == [4, 8, 12, 16, 20]


def test_first_and_last_epoch_are_saved_where_checkpoints_are_expensive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_schedule, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SHARE", 1e-9)
    assert saved(tmp_path) == [4, 20]


def test_save_every_is_followed_whatever_checkpoints_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_schedule, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SHARE", 1e-9)
    assert saved(tmp_path, save_every=3) == [3, 6, 9, 12, 15, 18, 20]


def test_best_epoch_is_saved_under_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_schedule, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SHARE", 1e-9)
    assert saved(tmp_path, callbacks=[mh.Patience("loss", 9)]) == [4, 8, 12, 16, 20]


def test_long_epochs_are_saved_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_schedule, "MAX_UNSAVED_SECONDS", 0.0)
    assert {2, 6, 10, 14, 18} <= set(saved(tmp_path))


def test_checkpoints_take_two_percent_of_a_long_run() -> None:
    now = spent = 0.0
    pace = CheckpointPace(lambda: now)
    for _ in range(10_000):
        now += 1.0
        if pace.is_due(spent):
            pace.saved()
            now += 1.5
            spent += 1.5
    assert 0.01 * now < spent < 0.021 * now


def test_no_more_than_five_minutes_are_unsaved_while_steps_slow_down() -> None:
    now, longest = 0.0, 0.0
    pace = CheckpointPace(lambda: now)
    for step in range(1, 3000):
        now += 0.1 if step < 2000 else 1.0
        longest = max(longest, pace.seconds_unsaved)
        if pace.is_look(step) and pace.is_overdue(step, *pace.forecast(step)):
            pace.saved()
    assert 250 < longest <= 300
