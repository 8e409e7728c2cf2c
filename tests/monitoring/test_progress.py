"""Progress: what the live view shows of a run's events."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from manyhands.core import event
from manyhands.monitoring.progress import LiveView


def shown(*entries: dict[str, Any]) -> str:
    screen = io.StringIO()
    view = LiveView(Console(file=screen, force_terminal=True, width=160, color_system=None), "title")
    for entry in entries:
        view.show(0, entry)
    view.close()
    return screen.getvalue()


def steps(**values: Any) -> dict[str, Any]:
    return event("steps", steps=[1, 2], losses={"loss": [2.0, 1.0]}, epoch=0, samples_per_second=1234.5, **values)


def test_progress_shows_learning_rate_and_bottleneck_from_events() -> None:
    waits = event("waits", rank=0, seconds={"total": 2.0, "compute": 1.0, "input": 1.0}, limit="input")
    text = shown(event("start", total=10, step=0), steps(lr={"": 0.00125}), waits)
    assert "1.0000  █▁  1,234 samples/s  lr 0.00125" in text
    assert "50% compute, 50% input  limit: input" in text
    slow = event("waits", rank=0, seconds={"total": 4.0, "compute": 1.0, "sync": 3.0}, limit="compute")
    assert "limit: sync" in shown(event("start", total=10, step=0), slow)


def test_progress_labels_learning_rate_with_optimizer_name() -> None:
    assert "generator lr 0.1  critic lr 0.2" in shown(steps(lr={"generator": 0.1, "critic": 0.2}))


def test_progress_shows_events_without_learning_rate_or_bottleneck() -> None:
    text = shown(steps(), event("waits", rank=0, seconds={"total": 1.0, "compute": 1.0}))
    assert "1,234 samples/s" in text
    assert "lr" not in text
    assert "limit" not in text
