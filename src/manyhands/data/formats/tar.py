"""Tar files in WebDataset's layout: members with the same name up to the first dot are one sample."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from .format import FileShard, RecordFormat, damaged, file_size, missing_columns, record_blocks

_SECTOR, _REST = 512, 1 << 20
_HEADER_KINDS = (b"L", b"x", b"g")
"""Members that describe the next one: a long name, a pax header, a global pax header."""
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")
Read = Callable[[int, int], bytes]
"""`read(place, size)` returns `size` bytes of a tar file from offset `place` on."""


class TarEntry(NamedTuple):
    """A member of a tar file."""

    key: str
    """The name up to the first dot, with the folder, which is the key of the sample."""
    ending: str
    """The rest of the name, which is the name of the field."""
    start: int
    """Offset of the first header of the member."""
    place: int
    """Offset of the content."""
    size: int
    """Bytes of the content."""


@dataclass(frozen=True)
class TarFormat(RecordFormat):
    """Tar files of samples, which are dicts with the key under "__key__" and the contents of members by extension."""

    name: ClassVar[str] = "tar"
    endings: ClassVar[tuple[str, ...]] = ("tar",)

    def scan(self, path: str) -> FileShard:
        num_bytes = file_size(path)
        starts: list[int] = []
        key, stop = None, 0
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            members = _members(lambda place, size: os.pread(fd, size, place), num_bytes, check=True)
            while True:
                try:
                    member = next(members, None)
                except ValueError as error:
                    raise damaged(path, max(0, len(starts) - 1), error, "sample") from None
                if member is None:
                    break
                if member.key != key:
                    starts.append(member.start)
                key, stop = member.key, _sectors(member.place + member.size)
        marks = np.array([*starts, stop], np.int64)
        blocks = record_blocks(marks)
        return FileShard(path, num_bytes, blocks, marks, np.diff(marks[blocks]))

    def sample(self, record: bytes) -> dict[str, object]:
        found = _plain_sample(record) or _sample(record)
        if self.columns is None:
            return found
        missing_columns(str(found["__key__"]), self.columns, list(found))
        return {name: _typed(found[name], kind) for name, kind in self.columns.items()}


def _typed(value: object, kind: str) -> object:
    if kind == "str" and isinstance(value, bytes):
        return value.decode()
    if kind in ("", "str", "bytes"):
        return value
    # Tar files store numbers as text: a label is a file "0001.cls" that contains "7".
    text = value.decode() if isinstance(value, bytes) else str(value)
    return np.array(text.split() if kind.endswith("[]") else text.strip()).astype(kind.removesuffix("[]"))[()]


def _plain_sample(record: bytes) -> dict[str, object]:
    """Parse a sample quickly if all members are regular files with short names; return {} for any other sample."""
    found: dict[str, object] = {}
    place = 0
    while place < len(record):
        if record[place + 156] != 48 or record[place + 124] & 0x80 or record[place + 345] or record[place + 99]:
            return {}
        name = record[place : record.find(0, place)].decode()
        base = name.rfind("/") + 1
        dot = name.find(".", base)
        if dot <= base or name[dot + 1 :] in found:
            return {}
        size = int(record[place + 124 : place + 135], 8)
        place += _SECTOR
        found["__key__"] = name[:dot]
        found[name[dot + 1 :]] = record[place : place + size]
        place = _sectors(place + size)
    return found


def _sample(record: bytes) -> dict[str, object]:
    found: dict[str, object] = {}
    for member in _members(lambda place, size: record[place : place + size], len(record)):
        if member.ending in found:
            raise ValueError(f"two members named {member.key}.{member.ending}")
        found["__key__"] = member.key
        found[member.ending] = record[member.place : member.place + member.size]
    return found


def _members(read: Read, num_bytes: int, *, check: bool = False) -> Iterator[TarEntry]:
    """Yield the members of a tar file that belong to samples; raise ValueError if the file is damaged.

    With `check`, as in the scan, the checksums of headers are verified. A file that changes afterwards is detected by
    its size.
    """
    place, start, long_name, long_size = 0, 0, "", -1
    while place + _SECTOR <= num_bytes:
        header = read(place, _SECTOR)
        if header[0] == 0 and not any(header):
            return _require_zeros(read, place, num_bytes) if check else None
        if check:
            _check(header)
        size = _number(header[124:136])
        content, kind = place + _SECTOR, header[156:157]
        if long_size >= 0 and kind not in _HEADER_KINDS:
            size = long_size
        # Checked before anything of that size is read.
        if content + size > num_bytes:
            raise ValueError(f"a file that ends {content + size - num_bytes} bytes too early")
        if kind == b"L":
            long_name = read(content, size).rstrip(b"\0").decode()
        elif kind == b"x":
            notes = _notes(read(content, size))
            long_name, long_size = notes.get("path", long_name), int(notes.get("size", long_size))
        elif kind != b"g":
            parts = _NAME.fullmatch(long_name or _name(header))
            if parts is not None and kind in (b"0", b"\0", b"7"):
                yield TarEntry(parts[1], parts[2], start, content, size)
            long_name, long_size = "", -1
            start = _sectors(content + size)
        place = _sectors(content + size)
    if place < num_bytes or (place > num_bytes and num_bytes):
        raise ValueError("a file that ends in the middle of a header")


def _require_zeros(read: Read, place: int, num_bytes: int) -> None:
    """Raise ValueError for data after the end mark of a tar file: the file has a hole, or another one was appended."""
    while place < num_bytes:
        rest = read(place, min(_REST, num_bytes - place))
        if rest.strip(b"\0"):
            raise ValueError(f"an empty header at byte {place} with more data after it")
        place += len(rest)


def _check(header: bytes) -> None:
    if sum(header) - sum(header[148:156]) + 8 * 32 != _number(header[148:156]):
        raise ValueError("a header with a wrong checksum")


def _number(text: bytes) -> int:
    if text[0] & 0x80:
        return int.from_bytes(text[1:], "big")
    digits = text.split(b"\0", 1)[0].strip()
    try:
        found = int(digits, 8) if digits else 0
    except ValueError:
        raise ValueError("a header that is not valid") from None
    # A negative size would send the scan backwards, and it would never end.
    if found < 0:
        raise ValueError("a header with a negative number")
    return found


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0].decode()
    prefix = header[345:500].split(b"\0", 1)[0].decode() if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _notes(data: bytes) -> dict[str, str]:
    """Parse a pax header, which consists of lines "length key=value"; return the values by key."""
    found, place = {}, 0
    while place < len(data):
        length = int(data[place : data.index(b" ", place)])
        if length < 1:
            raise ValueError("a pax header with a line of no length")
        key, _, value = data[place : place + length - 1].partition(b" ")[2].partition(b"=")
        found[key.decode()] = value.decode()
        place += length
    return found


def _sectors(place: int) -> int:
    return -(-place // _SECTOR) * _SECTOR
