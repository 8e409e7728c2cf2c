"""Faults of numbers and disks: NaN on one rank, a weight that changes by itself, a full disk, late writers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import CheckpointError, LossNotFinite, ReplicasDiffer, RunError
from manyhands.store import Checkpoint, CheckpointStore
from tests.recovery.test_local import fit
from tests.training.problems import problem


class Poison(mh.Callback):
    """Changes a weight of one rank by a hair, as a faulty memory would."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.rank == 1 and hand.num_steps == 12:
            with torch.no_grad():
                next(hand.model.parameters()).view(-1)[3] += 1e-6


def test_silent_corruption_is_named(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ReplicasDiffer, match=r"0\.weight \(on rank [01]\)"):
        fit(problem("mlp"), tmp_path, Poison())


def test_nan_on_one_rank_leaves_the_step_out_on_all(engine: Any, tmp_path: Path) -> None:
    task = problem("mlp")
    task.data[0][30] = float("nan")  # of the second rank's part of the second batch, without shuffling
    task = dataclasses.replace(task, shuffle=False, not_finite="skip")
    run = fit(task, tmp_path)
    assert run.skipped == [2, 5, 8, 11]
    assert all(tensor.isfinite().all() for tensor in run.state_dict().values())
    task.data[0][8:] = float("nan")
    with pytest.raises(LossNotFinite, match="20 steps in a row"):
        mh.fit(task, mh.Mirrored(2), on="cpu*2", epochs=20, folder=tmp_path, name="nan", progress=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
def test_a_full_disk_costs_no_good_checkpoint(engine: Any, tmp_path: Path, small_disk: Path) -> None:
    class Fill(mh.Callback):
        def on_step(self, hand: mh.Hand) -> None:
            if hand.is_first and hand.num_steps == 5:
                with (small_disk / "rubbish").open("wb") as file:
                    try:
                        while True:
                            os.write(file.fileno(), bytes(4096))
                    except OSError:
                        return

    with pytest.raises(RunError, match="could not be saved"):
        fit(problem("mlp"), small_disk, Fill())
    assert CheckpointStore(small_disk / "run" / "checkpoints").load().step == 3
    (small_disk / "rubbish").unlink()
    resumed = fit(problem("mlp"), small_disk, resume=True)
    calm = fit(problem("mlp"), tmp_path / "calm")
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(calm.losses), rtol=1e-5, atol=1e-7)


def test_whoever_was_replaced_cannot_write(tmp_path: Path) -> None:
    errors: list[Exception] = []
    late = CheckpointStore(tmp_path, on_error=errors.append)
    late.claim()
    late.save(Checkpoint(step=1, model={"w": torch.ones(1)}))
    late.wait()
    now = CheckpointStore(tmp_path)
    now.claim()
    late.save(Checkpoint(step=2, model={"w": torch.zeros(1)}))
    late.wait()
    assert isinstance(errors[0], CheckpointError)
    assert "a later one that has begun" in str(errors[0])
    assert now.steps() == [1]
    now.save(Checkpoint(step=2, model={"w": torch.ones(1)}))
    now.wait()
    assert now.load().model["w"].item() == 1
    assert now.steps() == [1, 2]
