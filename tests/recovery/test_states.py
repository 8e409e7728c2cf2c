"""Numerical and disk faults: NaN on one rank, a corrupted weight, a full disk, fenced writers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import CheckpointError, LossNotFinite, ReplicasDiffer, RunError, read_events
from manyhands.storage import Checkpoint, CheckpointStore
from tests.recovery.test_local import assert_same, fit
from tests.training.problems import problem


class Poison(mh.Callback):
    """Changes a weight of one rank by a hair, as a faulty memory would."""

    def on_step(self, hand: mh.Hand) -> None:
        if hand.rank == 1 and hand.num_steps == 12:
            with torch.no_grad():
                next(hand.model.parameters()).view(-1)[3] += 1e-6


def test_silent_data_corruption_names_tensor_and_rank(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ReplicasDiffer, match=r"after step 12 .*0\.weight \(on rank 1\)"):
        fit(problem("mlp"), tmp_path, Poison(), size=3)


def test_nan_gradient_on_one_rank_skips_step_on_all_ranks(engine: Any, tmp_path: Path) -> None:
    task = problem("mlp")
    task.data[0][30] = float("nan")  # of the second rank's part of the second batch, without shuffling
    task = dataclasses.replace(task, shuffle=False, not_finite="skip")
    run = fit(task, tmp_path)
    assert run.skipped == [2, 5, 8, 11]
    told = [entry["text"] for entry in said(run.path, "notice") if "was skipped" in entry["text"]]
    assert told[0] == "step 2 was skipped: its gradient is not finite, on rank 1; look at sample 30"
    assert all(tensor.isfinite().all() for tensor in run.state_dict().values())


class Spoil(mh.Callback):
    """Makes a weight NaN after some step, once: on one rank, or on all of them."""

    def __init__(self, folder: Path, step: int, rank: int | None = None) -> None:
        self.folder, self.step, self.rank = folder, step, rank

    def on_step(self, hand: mh.Hand) -> None:
        path = self.folder / f"spoilt-{hand.rank}"
        if hand.num_steps == self.step and self.rank in (None, hand.rank) and not path.exists():
            path.touch()
            with torch.no_grad():
                next(hand.model.parameters()).view(-1)[3] = float("nan")


def said(run_path: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_events(run_path / "events.jsonl") if entry["kind"] == kind]


def test_run_rolls_back_to_checkpoint_after_repeated_nonfinite_gradients(engine: Any, tmp_path: Path) -> None:
    """The fault that corrupted the weights does not recur, so the result equals that of an undisturbed run."""
    task = dataclasses.replace(problem("mlp"), not_finite="skip", max_skipped=3)
    calm = fit(task, tmp_path / "calm")
    run = fit(task, tmp_path / "hit", Spoil(tmp_path, 7), save_every=2)
    assert_same(run, calm)
    assert run.skipped == []
    (back,) = said(run.path, "recovered")
    assert (back["step"], back["source"]) == (6, "the last checkpoint"), (
        "that of step 8 is of a step without a gradient"
    )
    assert any("3 steps in a row from step 8 on" in entry["text"] for entry in said(run.path, "notice"))


def test_corrupted_replica_is_restored_from_healthy_replica_memory(engine: Any, tmp_path: Path) -> None:
    task = dataclasses.replace(problem("mlp"), not_finite="skip", max_skipped=2)
    run = fit(task, tmp_path, Spoil(tmp_path, 5, rank=0))
    (back,) = said(run.path, "recovered")
    assert (back["step"], back["source"]) == (7, "the memory of rank 1")
    assert run.skipped == [6, 7]
    assert len(run.losses) == run.num_steps == 12


def test_nonfinite_gradients_after_rollback_fail_the_run(engine: Any, tmp_path: Path) -> None:
    """Poisonous data and a learning rate that diverges: to go back once is enough to know."""
    task = dataclasses.replace(problem("mlp"), shuffle=False, not_finite="skip", max_skipped=3)
    task.data[0][8:] = float("nan")
    with pytest.raises(
        LossNotFinite, match=r"3 steps in a row from step 1 on .* again, .* from step 1; the data itsel"
    ):
        fit(task, tmp_path)
    (back,) = said(tmp_path / "run", "recovered")
    assert (back["step"], back["source"]) == (0, "its beginning")
    inputs = torch.randn(36, 4, generator=torch.Generator().manual_seed(0))
    wild = mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e6),
        data=(inputs, inputs.sum(1, keepdim=True)), batch_size=12, not_finite="skip", max_skipped=2,
    )  # fmt: skip
    with pytest.raises(LossNotFinite, match="again, after the run was rolled back .*lower the learning rate"):
        fit(wild, tmp_path / "wild")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.filterwarnings(
    "ignore:events are lost:RuntimeWarning", "ignore:1 line of .* could not be read:RuntimeWarning"
)
def test_full_disk_keeps_last_good_checkpoint_resumable(engine: Any, tmp_path: Path, small_disk: Path) -> None:
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


class BadDisk(mh.Callback):
    """Lets every fsync of the rank that writes fail with EIO for a while, by a tracer that holds it."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step(self, hand: mh.Hand) -> None:
        if hand.is_first and hand.num_steps == self.first:
            for store in hand.checkpoints._stores.values():
                # What was saved before is on the disk while that is sound.
                store.wait()
            words = ["-f", "-p", str(os.getpid()), "-e", "trace=fsync", "-e", "inject=fsync:error=EIO"]
            self.tracer = subprocess.Popen(["strace", *words], stderr=subprocess.PIPE, text=True)
            assert self.tracer.stderr is not None
            assert "attached" in self.tracer.stderr.readline()
            threading.Thread(target=self.tracer.stderr.read, daemon=True).start()
        if hand.is_first and hand.num_steps == self.last:
            self.tracer.terminate()
            self.tracer.wait()


@pytest.mark.root
def test_transient_disk_error_is_logged_and_training_continues(engine: Any, tmp_path: Path) -> None:
    calm = fit(problem("mlp"), tmp_path / "calm")
    run = fit(problem("mlp"), tmp_path / "hit", BadDisk(5, 8), keep=9)
    assert_same(run, calm)
    told = [entry["text"] for entry in said(run.path, "notice")]
    assert any("could not be written, but training continues" in text and "Input/output error" in text for text in told)
    assert CheckpointStore(run.path / "checkpoints").steps() == [3, 9, 12]


def test_fenced_checkpoint_writer_does_not_prune_newer_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sleeps between its last commit and its tidying, while another claims the folder and writes."""
    asleep, awake = threading.Event(), threading.Event()

    class Slow(CheckpointStore):
        def _commit(self, target: Path, manifest: Any) -> None:
            if target.name.endswith("24"):
                # The other one wakes when this is in place, and not yet committed.
                awake.set()
                late.wait()
            super()._commit(target, manifest)

    def saved(store: CheckpointStore, *steps: int) -> None:
        for step in steps:
            store.save(Checkpoint(step=step, model={"w": torch.ones(1)}))

    late = CheckpointStore(tmp_path)
    prune = late._folders.prune

    def sleepy(written: Any, keep: int, claim: Any) -> None:
        if written.step == 20:
            asleep.set()
            awake.wait(120)
        prune(written, keep, claim)

    monkeypatch.setattr(late._folders, "prune", sleepy)
    late.claim()
    saved(late, 18, 19, 20)
    assert asleep.wait(120)
    now = Slow(tmp_path, keep=4)
    now.claim()
    saved(now, 21, 22, 23, 24)
    now.wait()
    assert now.steps() == [21, 22, 23, 24]


def test_concurrent_checkpoint_claims_leave_exactly_one_writer(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, on_error=lambda _: None) for _ in range(8)]
    threads = [threading.Thread(target=store.claim) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, store in enumerate(stores):
        store.save(Checkpoint(step=step, model={"w": torch.ones(1)}))
        store.wait()
    assert len(stores[0].steps()) == 1


def test_fenced_checkpoint_writer_cannot_save(tmp_path: Path) -> None:
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
    assert "an earlier one" in str(errors[0])
    assert now.steps() == [1]
    now.save(Checkpoint(step=2, model={"w": torch.ones(1)}))
    now.wait()
    assert now.load().model["w"].item() == 1
    assert now.steps() == [1, 2]
