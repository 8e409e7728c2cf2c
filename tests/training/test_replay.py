"""Replay: a committed step is repeated on one device, and finds a wrong replica or a bad sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.distributed import current_world

from ..grouped_options import fit_options

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))


def good_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def corrupt_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """As on a device that computes wrongly: one of the replicas adds something."""
    world = current_world()
    return good_loss(model, batch) * (1.5 if world is not None and world.rank == 1 else 1.0)


def task(loss: Any = good_loss, rows: torch.Tensor = ROWS) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=(rows, rows.sum(1, keepdim=True)),
        batch_size=8,
        schedule=lambda step, total: 1 - step / total,
    )


@pytest.fixture
def fitted(tmp_path: Path, engine: Any) -> mh.Run:
    return mh.fit(
        task(),
        mh.Mirrored(2),
        on="cpu*2",
        epochs=3,
        folder=tmp_path,
        name="run",
        options=[mh.options.Checkpoints(save_every=5, keep=3), mh.options.Display(progress=False)],
    )


def test_replay_reproduces_the_loss_of_any_step(fitted: mh.Run) -> None:
    late = mh.replay(fitted, 23, on="cpu")
    assert late.equal, late
    assert 8 <= late.since < 23  # checkpoints after every epoch of 8 steps, and every 5
    assert late.replayed == pytest.approx(fitted.losses[22], rel=1e-5)
    early = mh.replay(fitted, 3, on="cpu")
    assert (early.equal, early.since) == (True, 0)
    assert early.replayed == pytest.approx(fitted.losses[2], rel=1e-5)
    every = mh.replay(fitted, 24, on="cpu")
    assert every.num_compared == 2 * (24 - every.since)
    with pytest.raises(SettingsError, match="between 1 and 24, but got 25"):
        mh.replay(fitted, 25, on="cpu")


def test_replay_names_the_rank_with_a_wrong_loss(tmp_path: Path, engine: Any) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "progress": False, "verify": False}
    run = mh.fit(task(corrupt_loss), mh.Mirrored(2), **fit_options(on="cpu*2", epochs=1, **settings))
    found = mh.replay(run, 8, on="cpu")
    assert not found.equal
    assert {part.rank for part in found.ranks} == {1}
    assert found.ranks[0].recorded == pytest.approx(1.5 * found.ranks[0].replayed, rel=1e-4)
    assert "rank 1 reported" in str(found)
    assert found.first == 1


def test_replay_blames_no_rank_under_lossy_gradient_compression(tmp_path: Path, engine: Any) -> None:
    run = mh.fit(
        task(),
        mh.Mirrored(2, sync="topk(0.05)"),
        on="cpu*2",
        epochs=1,
        folder=tmp_path,
        options=mh.options.Display(progress=False),
    )
    found = mh.replay(run, 8, on="cpu")
    assert not found.ranks
    assert str(found).startswith("note: sync=topk(0.05) changed the mathematics")


def test_replay_names_sample_with_nonfinite_loss(tmp_path: Path) -> None:
    rows = ROWS.clone()
    rows[17] = 1e25  # its square is infinite
    run = mh.fit(
        task(rows=ROWS), mh.Single(), on="cpu", epochs=1, folder=tmp_path, options=mh.options.Display(progress=False)
    )
    opened = mh.Run(run.path, task(rows=rows))
    bad = [step for step in range(1, 9) if 17 in mh.replay(opened, step, on="cpu").bad_samples]
    assert len(bad) == 1
    assert mh.replay(opened, bad[0], on="cpu").samples[0][0] == 17
