"""Hangs: one report with every rank's stack, the blocked collective, and the missing ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import WorkerFailed, read_events
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine
from manyhands.training import Hand

TIMEOUT = 12.0
"""Block in the middle of an operation."""


def asleep(folder: Path) -> None:
    """Where the rank is that does not arrive."""
    until = time.monotonic() + 120
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)


def test_hang_is_reported_once_and_names_the_missing_rank(engine: LocalEngine, tmp_path: Path) -> None:
    def work(world: World) -> float:
        total = torch.ones(())
        for step in range(3):
            if world.rank == 1 and step == 2:
                asleep(tmp_path)
            world.all_reduce(total)
        return float(total)

    heard: list[dict[str, Any]] = []

    def hear(rank: int, entry: dict[str, Any]) -> None:
        heard.append(entry)
        (tmp_path / "go").touch()

    job = engine.start(work, resolve("cpu*3")[0], timeout=TIMEOUT)
    assert job.wait(hear, lambda *line: None) == [27.0] * 3
    (report,) = [entry["text"] for entry in heard if "in asleep" in entry["text"]]
    assert {entry["kind"] for entry in heard} == {"hang"}  # the request itself is not reported
    first, second, *rest = report.splitlines()
    assert first.startswith("rank ")
    assert first.endswith(" s in all_reduce for rank 1")
    assert second.startswith("  rank 1 on ")
    assert "has not arrived; it is outside of collectives, after 2 of them" in second
    # The stack may be taken while the loop checks whether to continue.
    assert any("test_hangs.py" in line and "in asleep: " in line for line in rest[:12])
    waiting = [line for line in rest if "waits in all_reduce, its collective number 3" in line]
    assert len(waiting) == 2
    assert sum("in work: world.all_reduce(total)" in line for line in rest) == 2


def test_mismatched_collectives_end_the_job(engine: LocalEngine) -> None:
    def work(world: World) -> None:
        world.barrier()
        world.wait_for("a file") if world.rank else world.all_reduce(torch.ones(()))

    job = engine.start(work, resolve("cpu*2")[0], timeout=TIMEOUT, after_loss="restart")
    with pytest.raises(WorkerFailed, match=r"do not match: rank 0 in all_reduce, rank 1 in waiting for a file"):
        job.wait(lambda *entry: None, lambda *line: None)


def test_hanging_step_is_written_to_the_event_log(engine: LocalEngine, tmp_path: Path) -> None:
    class Late(mh.Callback):
        def on_step(self, hand: Hand) -> None:
            if hand.num_steps == 2 and hand.rank == 0:
                time.sleep(5.0)

    task = mh.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.ones(16, 2),),
        batch_size=4,
    )
    run = mh.fit(
        task,
        mh.Mirrored(2),
        on="cpu*2",
        folder=tmp_path,
        callbacks=[Late()],
        options=[mh.options.Recovery(timeout=TIMEOUT), mh.options.Display(progress=False)],
    )
    texts = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "hang"]
    (report,) = [text for text in texts if "in on_step" in text]
    assert "rank 0 on " in report.splitlines()[1]
    assert "has not arrived" in report.splitlines()[1]
    assert "in on_step: time.sleep(5.0)" in report
    assert len(run.losses) == 4
