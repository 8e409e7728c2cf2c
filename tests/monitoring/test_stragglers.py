"""Stragglers are named within three windows; healthy ranks are never named."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.core import event, read_events
from manyhands.distributed import current_world
from manyhands.monitoring import Stragglers
from manyhands.monitoring.stragglers import NUM_WINDOWS, WINDOW_STEPS


def handle_event(stragglers: Stragglers, seconds: dict[int, float], step: int = 0) -> list[str]:
    told = [
        stragglers.handle_event(event("pace", rank=rank, host=f"host{rank}", step=step, seconds=value))
        for rank, value in seconds.items()
    ]
    return [entry["text"] for entries in told for entry in entries]


def test_straggler_is_reported_once_within_three_windows() -> None:
    stragglers = Stragglers(size=4)
    slow = {0: 0.1, 1: 0.11, 2: 0.15, 3: 0.1}
    told = [handle_event(stragglers, slow) for _ in range(NUM_WINDOWS + 3)]
    assert sum(map(len, told[:NUM_WINDOWS])) == sum(map(len, told)) == 1
    assert "rank 2 on host2 is slow: its work takes 150 ms a step, that of the others 100 ms" in told[2][0]
    assert handle_event(stragglers, {**slow, 2: 0.1}) == ["rank 2 on host2 is as fast as the others again"]


def test_short_slowdown_reports_no_straggler() -> None:
    stragglers = Stragglers(size=3)
    fine, hiccup = {0: 0.1, 1: 0.1, 2: 0.1}, {0: 0.1, 1: 0.1, 2: 0.9}
    assert not [text for round in (hiccup, hiccup, fine) * 20 for text in handle_event(stragglers, round)]


def test_noisy_healthy_replicas_report_no_straggler() -> None:
    """Windows of noisy steps, as on a busy machine: a step may take twice as long, a window's median does not."""
    noise = random.Random(0)
    stragglers = Stragglers(size=8)
    for step in range(200):
        paces = {rank: 0.1 * noise.lognormvariate(0, 0.1) for rank in range(8)}
        assert handle_event(stragglers, paces, step) == []


def test_straggler_history_is_reset_after_recovery() -> None:
    stragglers = Stragglers(size=3)
    for _ in range(2):
        handle_event(stragglers, {0: 0.1, 1: 0.1, 2: 0.5})
    stragglers.handle_event(event("recovered", size=2, step=3, generation=1, source="a test"))
    assert handle_event(stragglers, {0: 0.1, 1: 0.1}) == []


def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Every replica works for a while, and one of them longer."""
    world = current_world()
    assert world is not None
    time.sleep(0.008 + (0.04 if world.rank == 1 and model.slow else 0))
    return (model(batch[0]) - 1).square().mean()


class Net(nn.Linear):
    def __init__(self, slow: bool) -> None:
        super().__init__(2, 1)
        self.slow = slow


def flags(folder: Path, *, slow: bool) -> list[dict[str, Any]]:
    task = mh.Task(
        model=lambda: Net(slow),
        loss=slow_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=(torch.ones(8, 2),),
        batch_size=4,
    )
    run = mh.fit(
        task,
        mh.Mirrored(2),
        on="cpu*2",
        epochs=10_000,
        steps=120 if slow else 200,
        folder=folder,
        options=mh.options.Display(progress=False),
    )
    return [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] in ("straggler", "pace")]


def test_sleeping_replica_is_reported_as_straggler_in_fit(tmp_path: Path, engine: Any) -> None:
    entries = flags(tmp_path, slow=True)
    (flag,) = [entry for entry in entries if entry["kind"] == "straggler"]
    assert flag["rank"] == 1
    windows = [entry["step"] for entry in entries if entry["kind"] == "pace" and entry["rank"] == 1]
    assert flag["step"] in windows[: NUM_WINDOWS + 1]  # the others' windows need not end where this one's do
    assert windows[0] >= WINDOW_STEPS


def test_two_hundred_healthy_steps_report_no_straggler(tmp_path: Path, engine: Any) -> None:
    entries = flags(tmp_path, slow=False)
    assert len([entry for entry in entries if entry["kind"] == "pace"]) >= 2 * NUM_WINDOWS
    assert [entry for entry in entries if entry["kind"] == "straggler"] == []
