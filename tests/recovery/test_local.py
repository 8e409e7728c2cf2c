"""Recovery on one machine: ranks are killed, freeze or crash, and the result equals that of an undisturbed run."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.chaos import work

import manyhands as mh
from manyhands.core import NoProgress, WorkerFailed, read_events
from tests.training.problems import problem

from ..grouped_options import fit_options

EPOCHS = 4
"""Of three steps each."""


class Fault(mh.Callback):
    """Does something to one rank after some step, once: a file remembers that it was done."""

    def __init__(self, folder: Path, rank: int, step: int, act: Any) -> None:
        self.path, self.rank, self.step, self.act = folder / f"fault-{rank}-{step}", rank, step, act

    def on_step(self, hand: mh.Hand) -> None:
        self.hand = hand
        if hand.world.rank == self.rank and hand.num_steps == self.step and not self.path.exists():
            self.path.touch()
            self.act()


class Ledger(mh.Callback):
    """Writes which samples were in which step, in a file of this process's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        with (self.folder / f"ledger-{os.getpid()}").open("a") as file:
            file.write(f"{hand.num_steps} {hand.rank} {hand.batch.ids.tolist()}\n")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fit(task: mh.Task, folder: Path, *callbacks: mh.Callback, size: int = 2, **options: Any) -> mh.Run:
    strategy = options.pop("strategy", mh.Mirrored(size))
    options = {"timeout": 60, **options}
    return mh.fit(
        task,
        strategy,
        **fit_options(
            on=f"cpu*{size}", epochs=EPOCHS, folder=folder, name="run", progress=False, callbacks=callbacks, **options
        ),
    )


def recoveries(run: mh.Run) -> list[dict[str, Any]]:
    return [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "recovered"]


def assert_same(run: mh.Run, calm: mh.Run) -> None:
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(calm.losses), rtol=1e-5, atol=1e-7)
    assert run.num_steps == calm.num_steps
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(
            run.state_dict()[name], tensor, rtol=0, atol=1e-9 if tensor.dtype == torch.float64 else 1e-5
        )


@pytest.mark.parametrize(
    ("name", "size", "kills"),
    [("mlp", 2, [(0, 5)]), ("cnn", 3, [(1, 4), (2, 8)]), ("gan", 2, [(1, 6)])],
)
def test_run_with_killed_ranks_equals_undisturbed_run(
    engine: Any, tmp_path: Path, name: str, size: int, kills: list[tuple[int, int]]
) -> None:
    task = problem(name, "adamw")
    strategy = mh.Mirrored(size, precision="fp64")
    calm = fit(task, tmp_path / "calm", size=size, strategy=strategy)
    faults = [Fault(tmp_path, rank, step, kill) for rank, step in kills]
    run = fit(task, tmp_path / "hit", Ledger(tmp_path), *faults, size=size, strategy=strategy)
    assert_same(run, calm)
    found = recoveries(run)
    assert [entry["generation"] for entry in found] == list(range(1, len(kills) + 1))
    for (_, step), entry in zip(kills, found, strict=True):
        assert "memory" in entry["source"]
        assert entry["step"] >= step - 1, "at most one step is lost"
    assert_every_sample_once(tmp_path, run, len(task.data[0]))


def assert_every_sample_once(folder: Path, run: mh.Run, num_samples: int) -> None:
    """By the last word of each rank on each step: what was computed again replaces what was lost."""
    steps: dict[tuple[int, int], list[int]] = {}
    for path in sorted(folder.glob("ledger-*"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            step, rank, ids = line.split(" ", 2)
            steps[int(step), int(rank)] = eval(ids)
    counts = Counter(sample for ids in steps.values() for sample in ids)
    assert counts == dict.fromkeys(range(num_samples), EPOCHS)
    assert {step for step, _ in steps} == set(range(1, run.num_steps + 1))


def blocked_in_ours(hand: mh.Hand) -> None:
    """Block in a collective of the world, where closing its connections has no effect."""
    with hand.world._naming("all_reduce"):  # type: ignore[attr-defined]
        time.sleep(120)


def blocked_in_torch(hand: mh.Hand) -> None:
    """Block in a function of torch.distributed that a torch module called, such as those of fully_shard."""
    exec(compile("import time; time.sleep(120)", torch.distributed.__file__, "exec"))


@pytest.mark.parametrize("block", [blocked_in_ours, blocked_in_torch])
def test_rank_blocked_in_collective_is_replaced(block: Any, engine: Any, tmp_path: Path) -> None:
    """Gloo may keep waiting although every connection is closed; two other replicas hold the lost state."""
    task, strategy = problem("mlp", "adamw"), mh.Mirrored(3, precision="fp64")
    calm = fit(task, tmp_path / "calm", size=3, strategy=strategy)
    stuck = Fault(tmp_path, 1, 5, lambda: block(stuck.hand))
    run = fit(task, tmp_path / "hit", stuck, Fault(tmp_path, 2, 5, kill), size=3, strategy=strategy)
    assert_same(run, calm)
    assert all("memory" in entry["source"] for entry in recoveries(run))
    assert f"ended with exit code {os.EX_TEMPFAIL}" in reasons(run)


def test_rank_that_misses_a_whole_rendezvous_is_replaced(engine: Any, tmp_path: Path) -> None:
    """Rank 1 hangs in user code, where nothing wakes it; the others keep their state and continue without it."""
    task, strategy = problem("mlp", "adamw"), mh.Mirrored(3, precision="fp64")
    calm = fit(task, tmp_path / "calm", size=3, strategy=strategy)
    faults = Fault(tmp_path, 1, 5, lambda: time.sleep(120)), Fault(tmp_path, 2, 5, kill)
    run = fit(task, tmp_path / "hit", *faults, size=3, strategy=strategy, timeout=12)
    assert_same(run, calm)
    assert all("memory of rank 0" in entry["source"] for entry in recoveries(run))
    assert "did not join the others within 12 s" in reasons(run)


def reasons(run: mh.Run) -> str:
    return " ".join(entry["reason"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "lost")


def test_frozen_rank_is_terminated_and_replaced(engine: Any, tmp_path: Path) -> None:
    task = problem("mlp")
    calm = fit(task, tmp_path / "calm")
    run = fit(task, tmp_path / "hit", Fault(tmp_path, 1, 4, freeze))
    assert_same(run, calm)
    lost = next(entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "lost")
    assert (lost["rank"], "frozen" in lost["reason"]) == (1, True)


def crash() -> None:
    raise RuntimeError("a bad sample")


def refuse(model: Any, batch: Any) -> Any:
    """A loss that one sample breaks, wherever it is."""
    inputs, labels = batch
    if (inputs[:, 0] == 77).any():
        crash()
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def test_step_that_always_crashes_raises_no_progress_after_three_tries(engine: Any, tmp_path: Path) -> None:
    task = problem("mlp")
    task.data[0][30, 0] = 77
    task = dataclasses.replace(task, loss=refuse, shuffle=False)
    with pytest.raises(NoProgress, match="rank 1 on .* a bad sample") as caught:
        fit(task, tmp_path)
    assert caught.value.exit_code == 70
    assert 'raise RuntimeError("a bad sample")' in caught.value.traceback
    lost = [entry for entry in read_events(tmp_path / "run" / "events.jsonl") if entry["kind"] == "lost"]
    assert len(lost) == 3, "three rounds, then no more"


def test_transient_crash_recovers_once_and_does_not_change_results(engine: Any, tmp_path: Path) -> None:
    calm = fit(problem("mlp"), tmp_path / "calm")
    run = fit(problem("mlp"), tmp_path / "hit", Fault(tmp_path, 0, 7, crash))
    assert_same(run, calm)
    assert len(recoveries(run)) == 1


def kill_data_workers() -> None:
    for process in psutil.Process().children():
        process.kill()


def test_rank_whose_data_worker_is_killed_is_replaced(engine: Any, tmp_path: Path) -> None:
    spec = mh.Mirrored(2, precision="fp64")
    run = fit(work.task(), tmp_path, Fault(tmp_path, 1, 50, kill_data_workers), strategy=spec)
    (lost,) = [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "lost"]
    assert lost["reason"].startswith("raised DataWorkerLost: the worker processes that read Samples must not exit")
    assert len(recoveries(run)) == 1
    assert run.num_steps == EPOCHS * work.ROWS // work.BATCH
    assert work.wrong_samples(run.state_dict(), run.num_steps) == 0


class Everywhere(mh.Callback):
    """A mistake of the program's own, on every rank at once and at every step from the second on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, hand: mh.Hand) -> None:
        if hand.num_steps >= 2:
            (self.folder / f"came-{hand.world.rank}").touch()
            until = time.monotonic() + 120
            while len(list(self.folder.glob("came-*"))) < hand.world.size and time.monotonic() < until:
                time.sleep(0.001)
            raise KeyError("typo")


def test_exception_raised_on_every_rank_is_not_retried(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="typo") as caught:
        fit(problem("mlp"), tmp_path, Everywhere(tmp_path))
    assert not isinstance(caught.value, NoProgress)
    # On a busy machine one may hear of the other's end before it raises the same: then it is so in the next round.
    lost = [entry for entry in read_events(tmp_path / "run" / "events.jsonl") if entry["kind"] == "lost"]
    assert len({entry["rank"] for entry in lost}) <= 1


def test_sharded_run_recovers_from_last_checkpoint(engine: Any, tmp_path: Path) -> None:
    task = problem("gpt", "adamw")
    strategy = mh.Sharded(2, precision="fp64")
    calm = fit(task, tmp_path / "calm", strategy=strategy)
    run = fit(task, tmp_path / "hit", Fault(tmp_path, 1, 8, kill), strategy=strategy, save_every=2)
    assert_same(run, calm)
    assert [(entry["step"], entry["source"]) for entry in recoveries(run)] == [(6, "the last checkpoint")]
