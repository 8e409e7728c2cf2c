"""Older parts of an event log, so that the log of a long run stays small.

A log `events.jsonl` of more than `PART_BYTES` is renamed to `events-000001.jsonl`, and a new log is started. All parts
except the newest one are compacted to `events-000001.jsonl.xz`:

- losses, metrics and rare events are kept unchanged;
- the memory and the pace of a rank are merged into the groups of points that a chart of the whole run shows;
- of the other values that ranks report about themselves, only the last ones are kept;
- shares of losses, which `manyhands replay` compares for recent steps, are dropped.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import lzma
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import FileError
from .fields import is_event
from .files import LINE_LIMIT, open_regular, parse_json

PART_BYTES = 8 << 20
"""Size of a log from which it is renamed."""
PART_LIMIT = 64 << 20
"""Maximum bytes of a part that are read, so that a small compressed file cannot fill the memory."""
DICTIONARY = 1 << 20
"""Bytes of the compression window, which a reader must hold in memory too."""
MEMORY_LIMIT = 4 << 20
"""Maximum bytes that the decompressor may use."""
FILTER = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": DICTIONARY}
_PIECE = 64 << 10
_CURVE = re.compile(r"(?:memory|pace) [0-9]{1,9}")
MOST_POINTS = 1000
"""Maximum number of points that a chart shows per curve; more points are merged into groups."""
COMPRESSED = ".xz"
LAST_NUMBER = 10**12 - 1
"""Highest number of a part."""


def older_parts(path: Path) -> list[Path]:
    """Return the older parts of a log, oldest first; if both forms of a part exist, the compacted one."""
    pattern = re.compile(rf"{re.escape(path.stem)}-([0-9]{{6,12}}){re.escape(path.suffix)}({re.escape(COMPRESSED)})?")
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        for entry in entries:
            if match := pattern.fullmatch(entry.name):
                number = int(match[1])
                if match[2] or number not in found:
                    found[number] = path.with_name(entry.name)
    return [found[number] for number in sorted(found)]


def parts_before(path: Path, file: int) -> list[Path]:
    """Return the parts that are older than an open log, which may have been renamed since it was opened."""
    who = os.fstat(file)
    found = []
    for part in older_parts(path):
        with contextlib.suppress(OSError):
            if os.path.samestat(part.lstat(), who):
                break
        found.append(part)
    return found


class PartReader:
    """Reads an older part of a log in pieces without keeping them, because a small compressed file can be large inside.

    Args:
        path: The part. If it is compacted before the first piece is read, the compacted file is read.
        offset: Position of the first byte to read, in a part that is not compacted.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset, self._left = path, offset, PART_LIMIT
        self._file_id: tuple[int, int] | None = None
        self._decompressor: lzma.LZMADecompressor | None = None

    def read(self, size: int) -> bytes:
        """Return at most `size` of the next bytes; nothing at the end.

        Raises:
            FileNotFoundError: The part was compacted after its first piece was read.
            FileError: It is damaged, or larger than `PART_LIMIT`.
            OSError: It cannot be read.
        """
        if self._file_id is None:
            self._begin()
        with os.fdopen(open_regular(self._path), "rb") as file:
            found = os.fstat(file.fileno())
            if self._file_id not in (None, (found.st_dev, found.st_ino)):
                raise FileNotFoundError(f"{self._path} was replaced")
            self._file_id = found.st_dev, found.st_ino
            file.seek(self._offset)
            # One byte more than is allowed, so that a part that is too large is noticed.
            most = min(size, self._left + 1)
            data = self._decompressed(file, most) if self._decompressor is not None else self._plain(file, most)
        self._left -= len(data)
        if self._left < 0:
            raise FileError(f"{self._path} must have at most {PART_LIMIT:,} bytes", got="a larger part of a log")
        return data

    def _begin(self) -> None:
        if self._path.suffix != COMPRESSED and not os.path.lexists(self._path):
            # It was compacted after its name was found.
            self._path = self._path.with_name(self._path.name + COMPRESSED)
        if self._path.suffix == COMPRESSED:
            self._offset, self._decompressor = 0, lzma.LZMADecompressor(lzma.FORMAT_XZ, MEMORY_LIMIT)

    def _plain(self, file: BinaryIO, size: int) -> bytes:
        data = file.read(size)
        self._offset += len(data)
        return data

    def _decompressed(self, file: BinaryIO, size: int) -> bytes:
        assert self._decompressor is not None
        data = b""
        try:
            while not data and not self._decompressor.eof:
                raw = file.read(_PIECE) if self._decompressor.needs_input else b""
                self._offset += len(raw)
                if self._offset > PART_LIMIT:
                    raise FileError(f"{self._path} must have at most {PART_LIMIT:,} bytes", got="a larger file")
                if not raw and self._decompressor.needs_input:
                    raise FileError(f"{self._path} must be a whole part of an event log", got="a truncated file")
                data = self._decompressor.decompress(raw, size)
        except lzma.LZMAError as error:
            raise FileError(f"{self._path} must be a compressed part of an event log", got=str(error)) from None
        return data


def read_part(path: Path) -> bytes:
    """Return the lines of an older part.

    Raises:
        FileError: It is damaged, or larger than `PART_LIMIT`.
        OSError: It cannot be read.
    """
    reader = PartReader(path)
    return b"".join(iter(lambda: reader.read(1 << 20), b""))


def next_part(path: Path) -> Path:
    """Return the name to which a full log is renamed; raise FileError if there is no higher number for it."""
    parts = older_parts(path)
    number = int(_first_name(parts[-1]).rpartition("-")[2]) + 1 if parts else 1
    if number > LAST_NUMBER:
        # Readers would not find the part, and the one after it would replace it.
        raise FileError(
            f"parts of {path} must have numbers up to {LAST_NUMBER}", got=str(parts[-1]), remedy="rename it"
        )
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def _first_name(path: Path) -> str:
    return path.name.partition(".")[0]


def compact_parts(path: Path) -> None:
    """Compact all parts of a log except the newest, which may be being read; parts that cannot be compacted remain."""
    parts = older_parts(path)
    counts: dict[str, int] = {}
    for part in parts[:-1]:
        with contextlib.suppress(OSError, FileError):
            if part.suffix == COMPRESSED:
                counts = _counts(part)
                part.with_suffix("").unlink(missing_ok=True)
                continue
            compaction, kept = Compaction(counts), io.BytesIO()
            # One line at a time: a part may have millions of empty ones.
            kept.writelines(compaction.lines(io.BytesIO(read_part(part))))
            counts = compaction.counts
            _write(part, _line({"v": 1, "t": 0.0, "kind": "compacted", "counts": counts}) + kept.getvalue())


def _write(part: Path, data: bytes) -> None:
    """Write the compacted part completely before the other one is removed."""
    temporary, target = part.with_suffix(".tmp"), part.with_name(part.name + COMPRESSED)
    try:
        with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(lzma.compress(data, filters=[FILTER]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    part.unlink()


def _counts(part: Path) -> dict[str, int]:
    """Return the number of points of each curve up to the end of a compacted part, from its first line, or {}."""
    reader, data = PartReader(part), b""
    while b"\n" not in data and len(data) < LINE_LIMIT and (more := reader.read(_PIECE)):
        data += more
    entry = parse_json(data.partition(b"\n")[0])
    found = entry["counts"] if is_event(entry) and entry["kind"] == "compacted" else {}
    return {name: count for name, count in found.items() if _CURVE.fullmatch(name)}


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


class Compaction:
    """Reduces the lines of one part. `counts` has the number of points of each curve before it, and later after it."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = dict(counts)
        self._waits: dict[int, dict[str, Any]] = {}
        """The last breakdown of each rank's time."""
        self._curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
        """Points of this part, by curve and rank."""

    def lines(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines to keep; damaged ones stay as they are, except empty ones."""
        for line in filter(bytes.strip, lines):
            try:
                entry = parse_json(line) if len(line) <= LINE_LIMIT and line.startswith(b"{") else None
            except FileError:
                entry = None
            if not is_event(entry):
                yield line
                continue
            kind = entry["kind"]
            if kind in ("start", "recovered"):
                # Readers drop ranks and steps at these events, so what was reported before must precede them.
                yield from self._held()
                if kind == "recovered":
                    self.counts = {one: n for one, n in self.counts.items() if int(one.split()[1]) < entry["size"]}
                yield line
            elif kind == "waits":
                self._add("memory", entry, entry["t"], entry.get("memory"))
                self._waits[entry["rank"]] = {**entry, "memory": None}
            elif kind == "pace":
                self._add("pace", entry, entry["step"], entry["seconds"])
            elif kind == "steps":
                entry.pop("samples_per_second", None)
                yield _line(entry)
            elif kind != "parts":
                yield line
        yield from self._held()

    def _add(self, curve: str, entry: dict[str, Any], x: float, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._curves.setdefault((curve, entry["rank"]), []).append((x, value))

    def _held(self) -> Iterator[bytes]:
        """Yield the merged values of the ranks, and forget them."""
        for entry in self._waits.values():
            yield _line(entry)
        for (curve, rank), points in self._curves.items():
            before = self.counts.get(f"{curve} {rank}", 0)
            self.counts[f"{curve} {rank}"] = before + len(points)
            columns = grouped(points, before)
            yield _line({"v": 1, "t": 0.0, "kind": "points", "curve": curve, "rank": rank, **columns})
        self._waits, self._curves = {}, {}


def grouped(points: list[tuple[float, float]], before: int) -> dict[str, Any]:
    """Merge points into the groups of a chart of the whole curve; `before` is the number of points that precede them.

    >>> grouped([(1, 5.0), (2, 7.0)], before=1000)["count"], grouped([(1, 5.0), (2, 7.0)], before=1001)["count"]
    ([2], [1, 1])
    """
    size = 1
    while before + len(points) > size * MOST_POINTS:
        size *= 2
    cuts = [0, *range(-before % size or size, len(points), size), len(points)]
    groups = [points[a:b] for a, b in itertools.pairwise(cuts)]
    values = [[value for _, value in group] for group in groups]
    return {
        "first": [group[0][0] for group in groups],
        "x": [group[-1][0] for group in groups],
        "total": [sum(each) for each in values],
        "count": [len(each) for each in values],
        "low": [min(each) for each in values],
        "high": [max(each) for each in values],
        "last": points[-1][1],
    }
