"""Untrusted files: no kind of file blocks a reader, and a full disk loses no later event."""

from __future__ import annotations

import io
import json
import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.attacks.files import CONTENTS, KINDS, LINES, plant

from manyhands.core import (
    CheckpointError,
    EventLog,
    FileError,
    event,
    open_regular,
    opened,
    parse_json,
    read_events,
    read_file,
    read_json,
    read_lines,
    replace_text,
)
from manyhands.core import files as core_files
from manyhands.training import Run, launch_of


@pytest.mark.parametrize("kind", KINDS)
def test_non_regular_files_are_rejected_without_blocking(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    plant(path, kind)
    uses: list[Callable[[], object]] = [
        lambda: open_regular(path),
        lambda: open_regular(path, os.O_WRONLY | os.O_APPEND),
        lambda: read_file(path, 100),
        lambda: EventLog(path),
        lambda: list(read_events(path)),
        lambda: opened(path).__enter__(),
    ]
    for use in uses:
        with pytest.raises(FileError, match="must be a regular file, but got a"):
            use()


def test_file_replaced_by_a_fifo_between_check_and_open_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("{}")
    real = os.open

    def exchanged(name: str | Path, flags: int, mode: int = 0o777) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(name, flags, mode)

    monkeypatch.setattr(core_files.os, "open", exchanged)
    with pytest.raises(FileError, match="but got a FIFO"):
        read_json(path, 100)


def test_replace_text_never_writes_through_a_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run.json"
    victim.write_text("mine")
    path.symlink_to(victim)
    replace_text(path, "{}")
    assert (path.is_symlink(), path.read_text()) == (False, "{}")
    path.with_suffix(".tmp").symlink_to(victim)
    with pytest.raises(FileError, match="got a symbolic link"):
        replace_text(path, "[]")
    assert (path.read_text(), victim.read_text()) == ("{}", "mine")


def test_files_are_never_written_through_a_hard_link(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("precious")
    os.link(own, tmp_path / "events.jsonl")
    os.link(own, tmp_path / "run.tmp")
    with pytest.raises(FileError, match="must have no other name to be written, but got a hard link"):
        EventLog(tmp_path / "events.jsonl")
    with pytest.raises(FileError, match="must have no other name"):
        replace_text(tmp_path / "run.json", "{}")
    assert own.read_text() == "precious"
    assert read_file(tmp_path / "events.jsonl", 100) == b"precious"


def test_symlinks_are_followed_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link", 100, follow_links=True) == {"a": 1}
    with pytest.raises(FileError, match="a symbolic link"):
        read_json(tmp_path / "link", 100)


def test_file_above_the_size_limit_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b" " * 101)
    assert read_file(tmp_path / "file", 101) == b" " * 101
    with pytest.raises(FileError, match="at most 100 bytes"):
        read_file(tmp_path / "file", 100)


@pytest.mark.parametrize(
    "text",
    [b"[" * 200_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"[" * 66 + b"]" * 66, b"\xff", b"\0{", b"9" * 5000, b""],
)
def test_invalid_or_hostile_json_is_rejected(text: bytes) -> None:
    with pytest.raises(FileError):
        parse_json(text)


def test_wide_json_up_to_the_nesting_limit_is_parsed() -> None:
    assert len(parse_json(json.dumps([[] for _ in range(1000)]).encode())) == 1000
    deepest = json.loads("[" * 64 + "]" * 64)
    assert parse_json(json.dumps(deepest).encode()) == deepest


def test_overlong_line_is_never_read_whole() -> None:
    sizes: list[int | None] = []

    class Counted(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            sizes.append(size)
            return super().readline(size)

    assert list(read_lines(Counted(b"x" * 100 + b"\ny\n"), 10)) == [None, b"y\n"]
    assert all(size is not None and 0 < size <= 11 for size in sizes)


def test_corrupted_event_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps(event("end", step=1)).encode()
    path.write_bytes(b"\n".join([good, *LINES.values(), b"x" * (5 << 20), good, b'{"half": ']))
    # A rank of a billion is a number like any other to those who make no room for it.
    harmless = {"rank_beyond_memory"}
    with pytest.warns(RuntimeWarning, match=f"{len(LINES) - len(harmless) + 1} lines of .* could not be read"):
        found = list(read_events(path))
    assert [entry["kind"] for entry in found] == ["end", "pace", "end"]


def test_partial_write_does_not_corrupt_the_next_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    real, room = os.write, [1000]

    def short(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = real(file, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", short)
    log.write(event("first"))
    room[0] = 10
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        log.write(event("second"))
        log.write(event("third"))
    assert [str(one.message).startswith("events are lost") for one in said] == [True]
    room[0] = 5
    log.write(event("fourth"))
    room[0] = 10_000
    log.write(event("fifth"))
    log.write(event("sixth"))
    log.close()
    with pytest.warns(RuntimeWarning, match="2 lines"):
        found = list(read_events(log.path))
    assert [entry["kind"] for entry in found] == ["first", "notice", "fifth", "sixth"]
    assert found[1]["text"] == "3 events are missing here: No space left on device"


def test_every_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real, is_full = EventLog(tmp_path / "events.jsonl"), os.write, [True]

    def write(file: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    for _ in range(2):
        is_full[0] = True
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            log.write(event("first"))
            log.write(event("second"))
        assert [str(one.message).startswith("events are lost from") for one in said] == [True]
        is_full[0] = False
        log.write(event("third"))
    log.close()


def test_write_in_several_pieces_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    log.write(event("first"))
    log.write(event("second"))
    log.close()
    assert [entry["kind"] for entry in read_events(log.path)] == ["first", "second"]


def write_all(log: EventLog) -> None:
    for number in range(60):
        log.write(event("filler", number=number, text="x" * 1000))


@pytest.mark.root
def test_events_written_after_a_full_disk_are_kept(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)], check=True)
    try:
        log = EventLog(mounted / "events.jsonl")
        (mounted / "ballast").write_bytes(bytes(40 << 10))
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            write_all(log)
        (mounted / "ballast").unlink()
        log.write(event("after"))
        log.close()
        with pytest.warns(RuntimeWarning, match="could not be read"):
            found = list(read_events(log.path))
        numbers = [entry["number"] for entry in found if entry["kind"] == "filler"]
        assert numbers == list(range(len(numbers)))
        assert [entry["kind"] for entry in found[-2:]] == ["notice", "after"]
        assert found[-2]["text"].startswith(f"{60 - len(numbers)} events are missing here")
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_run_with_corrupted_files_is_opened_or_rejected_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"spec": {}, "params": {}, "devices": []}')
    epoch = {"epoch": 0, "step": 1, "metrics": {"accuracy": 0.5, "none": None}}
    lines = [*LINES.values(), json.dumps(event("epoch", **epoch)).encode(), b""]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines))
    with pytest.warns(RuntimeWarning, match="could not be read"):
        run = Run(tmp_path)
    assert run.metrics == {"accuracy": 0.5}
    assert "accuracy=0.5" in repr(run)
    for content in CONTENTS.values():
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="run.json must"):
            Run(tmp_path)
    for kind in KINDS:
        plant(tmp_path / kind / "run.json", kind)
        with pytest.raises(CheckpointError, match="must be a regular file"):
            Run(tmp_path / kind)
        assert launch_of(tmp_path / kind) is None
