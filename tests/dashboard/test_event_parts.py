"""Logs of long runs: older parts are compacted, and all readers find the same as before."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.core import EVENTS, EventLog, older_parts, read_events
from manyhands.core.event_parts import PART_BYTES, compact_parts, read_part
from manyhands.dashboard.log_tail import Tail
from manyhands.dashboard.run_library import Library

from .logs import NOON, RECORD
from .test_reading import read_all

STEPS_A_SECOND, RANKS = 23, 2
WEEK = 7 * 24 * 3600
PARTS = 64 << 10
"""Size of the parts of the logs of these tests."""


def written(seconds: int, since: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the events of a run with two ranks, as `fit` writes them: half a second of steps at a time."""
    draw = random.Random(since)
    # In the past, because the dashboard does not believe in times to come.
    step, t = since, NOON - 1e8 + since / STEPS_A_SECOND

    def event(kind: str, **values: Any) -> dict[str, Any]:
        return {"v": 1, "t": round(t, 6), "kind": kind, **values}

    yield event("start", total=None, epochs=1, parameters=10, step=since)
    for half in range(2 * seconds):
        t += 0.5 + draw.uniform(-0.01, 0.01)
        steps = list(range(step + 1, step + 1 + STEPS_A_SECOND // 2 + half % 2))
        step = steps[-1]
        losses = [1 / step + draw.gauss(0.5, 0.1) for _ in steps]
        epoch = step // 1000
        told = {"epoch": epoch, "samples_per_second": draw.uniform(300, 310), "lr": {"": 0.01}}
        yield event("steps", steps=steps, losses={"loss": losses}, **told)
        for rank in range(RANKS):
            where = {"rank": rank, "host": "host1", "device": f"cpu#{rank}"}
            spent = {name: draw.uniform(0.9, 1.1) * half for name in ("total", "compute", "input", "sync", "save")}
            yield event("waits", **where, seconds=spent, limit="compute", memory=draw.randrange(1 << 30))
            shares = {"steps": steps, "losses": [loss / 2 for loss in losses]}
            yield event("parts", **shares, rank=rank, size=RANKS, accumulate=1)
            if half % 2:
                yield event("pace", rank=rank, host="host1", step=step, seconds=draw.uniform(0.8, 0.9))
        if half % 120 == 119:
            yield event("epoch", epoch=epoch, step=step, metrics={"valid_loss": draw.random()}, losses={})
            yield event("checkpoint", step=step)
        if half == seconds:
            yield event("lost", rank=1, host="host1", step=step, reason="was killed by signal 9 (SIGKILL)")
            yield event("recovered", step=step - 5, generation=1, size=RANKS, source="the memory of rank 0")
            step -= 5


def put(folder: Path, seconds: int, part_bytes: int, runs: int = 1) -> Path:
    """Write a run's folder, and resume it as often as asked."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(RECORD))
    for number in range(runs):
        log = EventLog(folder / EVENTS, part_bytes=part_bytes)
        for entry in written(seconds, since=number * seconds * STEPS_A_SECOND):
            log.write(entry)
        log.close()
    compact_parts(folder / EVENTS)
    return folder / EVENTS


def test_a_week_of_events_stays_below_200_megabytes(tmp_path: Path) -> None:
    seconds = 1500
    path = put(tmp_path / "run", seconds, part_bytes=1 << 20)
    (*compacted, newest) = older_parts(path)
    assert all(part.suffix == ".xz" for part in compacted)
    assert newest.suffix == ".jsonl"
    assert len(compacted) > 3
    steps = [step for part in compacted for step in steps_in(read_part(part))]
    share = WEEK * STEPS_A_SECOND / len(steps)
    assert share * sum(part.stat().st_size for part in compacted) + 2 * PART_BYTES < 200e6


def steps_in(lines: bytes) -> list[int]:
    entries = map(json.loads, lines.splitlines())
    return [step for entry in entries if entry["kind"] == "steps" for step in entry["steps"]]


def test_dashboard_shows_the_same_for_a_compacted_log(tmp_path: Path) -> None:
    whole = put(tmp_path / "whole" / "run", 900, part_bytes=1 << 40, runs=2)
    parts = put(tmp_path / "parts" / "run", 900, part_bytes=PARTS, runs=2)
    assert not older_parts(whole)
    assert len(older_parts(parts)) > 10
    shown = []
    for path in (whole, parts):
        library = Library([path.parents[1]])
        read_all(library)
        (source,) = library.sources.values()
        assert not source.unreadable
        told = source.detail()
        # Their sums were added in another order.
        sums = [series.pop("mean") for group in told["series"].values() for series in group.values()]
        shown.append((told, sums))
    (told, sums), (again, sums_again) = shown
    assert told.pop("id") != again.pop("id")
    assert told == again
    assert [pytest.approx(each) for each in sums] == sums_again


def test_losses_of_all_steps_are_read_from_a_compacted_log(tmp_path: Path) -> None:
    whole = put(tmp_path / "whole", 300, part_bytes=1 << 40)
    parts = put(tmp_path / "parts", 300, part_bytes=PARTS)
    assert len(older_parts(parts)) > 5
    assert mh.Run(parts.parent).losses == mh.Run(whole.parent).losses
    rare = {"start", "lost", "recovered", "epoch", "checkpoint"}
    found = [[entry for entry in read_events(path) if entry["kind"] in rare] for path in (whole, parts)]
    assert found[0] == found[1]
    last = [
        {entry["rank"]: entry["seconds"] for entry in read_events(path) if entry["kind"] == "waits"}
        for path in (whole, parts)
    ]
    assert last[0] == last[1]


def test_tail_follows_a_log_into_new_parts_and_reads_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    log, tail, seen = EventLog(path, part_bytes=2000), Tail(path), []
    for number in range(1000):
        log.write({"v": 1, "t": 1.0, "kind": "log", "step": number, "values": {}})
        if number % 7 == 0:
            seen += tail.read()
    log.close()
    for _ in range(1000):
        seen += tail.read()
    assert [entry["step"] for entry in seen if entry["kind"] == "log"] == list(range(1000))
    assert not tail.was_replaced
    late, seen = Tail(path), []
    while (entries := late.read()) or late.pending:
        seen += entries
    assert [entry["step"] for entry in seen if entry["kind"] == "log"] == list(range(1000))


def test_interrupted_compaction_is_completed_and_loses_nothing(tmp_path: Path) -> None:
    path = put(tmp_path / "run", 120, part_bytes=PARTS)
    losses = mh.Run(path.parent).losses
    first, second, *_ = older_parts(path)
    # The program was killed after it had written a compacted part, and in the middle of the next one.
    first.with_suffix("").write_bytes(read_part(first))
    second.with_suffix("").write_bytes(read_part(second))
    second.unlink()
    second.with_suffix("").with_suffix(".tmp").write_bytes(b"half")
    assert mh.Run(path.parent).losses == losses
    compact_parts(path)
    assert mh.Run(path.parent).losses == losses
    assert sorted(one.name for one in path.parent.glob("events-00000[12]*")) == [first.name, second.name]


def test_damaged_part_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    path = put(tmp_path / "runs" / "run", 120, part_bytes=PARTS)
    first, *_ = older_parts(path)
    first.write_bytes(b"no part of a log")
    with pytest.warns(RuntimeWarning, match=r"1 line of .* could not be read"):
        assert mh.Run(path.parent).losses[-1] > 0
    library = Library([tmp_path / "runs"])
    read_all(library)
    (source,) = library.sources.values()
    assert source.unreadable == "1 line could not be read"
    assert source.summary()["step"] > 2000


def test_full_disk_leaves_a_log_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("manyhands.core.event_parts.os.replace", full)
    path = put(tmp_path / "run", 60, part_bytes=PARTS)
    assert {part.suffix for part in older_parts(path)} == {".jsonl"}
    assert not list(path.parent.glob("*.tmp"))
    monkeypatch.undo()
    losses = mh.Run(path.parent).losses
    compact_parts(path)
    assert mh.Run(path.parent).losses == losses
    shutil.rmtree(path.parent)
