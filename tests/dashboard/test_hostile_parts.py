"""Hostile older parts of event logs: small files that expand to many bytes, and damaged headers."""

from __future__ import annotations

import json
import lzma
import tracemalloc
from pathlib import Path

import pytest

from manyhands.core import EVENTS, read_events
from manyhands.core.event_parts import PART_LIMIT, compact_parts
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
