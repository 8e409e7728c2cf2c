"""Run: its numbers by step, also where steps were left out, and what it refuses to write over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import SettingsError

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
    return mh.fit(made, on="cpu", folder=folder, progress=False, **settings)


def test_losses_keep_their_places_where_steps_were_left_out(tmp_path: Path) -> None:
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


def test_a_file_in_the_way_of_a_pretrained_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "gpt").write_text("mine")
    run = fit(task(), tmp_path / "runs")
    for path in (tmp_path / "gpt", tmp_path / "gpt" / "inner"):
        with pytest.raises(SettingsError, match="gpt, which is a file; name another folder"):
            run.save_pretrained(path)
    assert (tmp_path / "gpt").read_text() == "mine"
