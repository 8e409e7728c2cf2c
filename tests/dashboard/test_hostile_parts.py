"""Hostile older parts of event logs: small files that expand to many bytes, and damaged headers."""

from __future__ import annotations

import json
import lzma
import tracemalloc
from pathlib import Path

import pytest

from manyhands.core import EVENTS, EventLog, event, read_events
from manyhands.core.event_parts import PART_LIMIT, compact_parts, read_part
from manyhands.dashboard.run_library import Library

EVENT = b'{"v": 1, "t": 1.0, "kind": "notice", "text": ""}\n'
WIDE = EVENT.replace(b'""', b'"' + b"x" * 4000 + b'"') * 250


def part(path: Path, *pieces: bytes, times: int = 1, number: int = 1) -> Path:
    """Write a compacted part of a log in `path` that has these pieces so many times."""
    path.mkdir(parents=True, exist_ok=True)
    (path / EVENTS).touch()
    compressor = lzma.LZMACompressor(preset=0)
    data = b"".join(compressor.compress(b"".join(pieces)) for _ in range(times)) + compressor.flush()
    file = path / f"events-{number:06d}.jsonl.xz"
    file.write_bytes(data)
    return file


def test_small_parts_of_many_runs_take_little_memory_in_the_dashboard(tmp_path: Path) -> None:
    for number in range(8):
        run = tmp_path / "runs" / f"run{number}"
        file = part(run, WIDE, times=60)
        assert file.stat().st_size < 30_000
        (run / "run.json").write_text('{"spec": {}, "devices": ["cpu"]}')
    library = Library([tmp_path / "runs"])
    tracemalloc.start()
    for _ in range(3):
        library.refresh()
    assert len(library.sources) == 8
    assert all(source.pending for source in library.sources.values())
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_part_with_one_long_line_is_neither_kept_nor_parsed(tmp_path: Path) -> None:
    line = b'{"v": 1, "t": 1.0, "kind": "notice", "text": "", "x": [' + b"[]," * 3_000_000 + b"0]}\n"
    part(tmp_path / "runs" / "run", line, EVENT)
    (tmp_path / "runs" / "run" / "run.json").write_text('{"spec": {}, "devices": ["cpu"]}')
    tracemalloc.start()
    with pytest.warns(RuntimeWarning, match="1 line of"):
        assert len(list(read_events(tmp_path / "runs" / "run" / EVENTS))) == 1
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    library = Library([tmp_path / "runs"])
    while library.refresh():
        pass
    (source,) = library.sources.values()
    assert source.unreadable == "1 line could not be read"


@pytest.mark.parametrize("kind", ["plan", "serving", "partition", "failed"])
def test_events_that_pages_keep_are_not_kept_if_they_are_large(tmp_path: Path, kind: str) -> None:
    plan = {"task": "", "cluster": "", "best": "", "options": []}
    plan["curve"] = {"devices": [], "speedup": [], "saturates": 1, "reason": "", "remedies": []}
    known = {"plan": plan, "partition": {"title": "", "boxes": [], "arrows": []}, "failed": {"reason": "x" * 1_500_000}}
    entry = json.dumps({"v": 1, "t": 1.0, "kind": kind, **known.get(kind, {})}).encode()[:-1]
    line = entry + b', "x": [' + b"[]," * 150_000 + b"0]}\n"
    part(tmp_path / "runs" / "log", EVENT, line, line, line)
    if kind in ("partition", "failed"):
        (tmp_path / "runs" / "log" / "run.json").write_text('{"spec": {}, "devices": ["cpu"]}')
    library = Library([tmp_path / "runs"])
    tracemalloc.start()
    while library.refresh():
        pass
    (source,) = library.sources.values()
    assert tracemalloc.get_traced_memory()[0] < 4 << 20
    tracemalloc.stop()
    assert source.unreadable == "3 lines could not be read"


def test_part_with_a_number_that_has_no_successor_is_not_replaced(tmp_path: Path) -> None:
    last = tmp_path / "events-999999999999.jsonl"
    last.write_bytes(EVENT)
    log = EventLog(tmp_path / EVENTS, part_bytes=100)
    for step in range(20):
        log.write(event("checkpoint", step=step))
    log.close()
    assert [entry.get("step") for entry in read_events(tmp_path / EVENTS)] == [None, *range(20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [last.name, EVENTS]


def test_part_with_millions_of_lines_is_compacted_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "events-000001.jsonl").write_bytes((b"\n" * 99 + b"x\n") * 10_000)
    (tmp_path / "events-000002.jsonl").write_bytes(EVENT)
    tracemalloc.start()
    compact_parts(tmp_path / EVENTS)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    compacted = read_part(tmp_path / "events-000001.jsonl.xz")
    assert compacted.partition(b"\n")[2] == b"x\n" * 10_000


def test_part_with_more_bytes_than_allowed_is_damaged(tmp_path: Path) -> None:
    part(tmp_path / "run", WIDE, times=PART_LIMIT // len(WIDE) + 1)
    with pytest.warns(RuntimeWarning, match="1 line of"):
        assert not list(read_events(tmp_path / "run" / EVENTS))


def test_run_with_endless_backlog_does_not_keep_others_from_being_read(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text('{"spec": {}, "devices": ["cpu"]}')
    (tmp_path / "runs" / "first" / EVENTS).write_bytes(WIDE * 2)
    for number in range(1, 6):
        part(tmp_path / "runs" / "second", WIDE, times=60, number=number)
    library = Library([tmp_path / "runs"])
    library.refresh()
    for _ in range(30):
        library.refresh()
    assert library.sources["runs/second"].pending
    assert not library.sources["runs/first"].pending


HEADERS = [
    {"memory": 1},
    {"memory 0": 1e400},
    {"memory 0": "x"},
    {"memory 0": -5},
    {"memory 0": 2**70},
    ["memory 0"],
    {"": 1, "a b": 2, "pace 99999999999999999999": 3},
    None,
]


@pytest.mark.parametrize("counts", HEADERS)
def test_resuming_a_run_with_hostile_parts_compacts_the_others(tmp_path: Path, counts: object) -> None:
    head = json.dumps({"v": 1, "t": 0.0, "kind": "compacted", "counts": counts}).encode() + b"\n"
    part(tmp_path, head, EVENT)
    event = {"v": 1, "t": 1.0, "kind": "recovered", "step": 0, "size": 1}
    pace = {"v": 1, "t": 1.0, "kind": "pace", "rank": 0, "host": "a", "step": 1, "seconds": 1.0}
    lines = [json.dumps(one).encode() + b"\n" for one in (pace, event, pace)]
    for number in (2, 3):
        (tmp_path / f"events-{number:06d}.jsonl").write_bytes(b"".join(lines))
    compact_parts(tmp_path / EVENTS)
    assert sorted(path.name for path in tmp_path.glob("events-*")) == [
        "events-000001.jsonl.xz",
        "events-000002.jsonl.xz",
        "events-000003.jsonl",
    ]
