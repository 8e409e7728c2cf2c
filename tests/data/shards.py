"""Small data files of every format, with the same rows in each: number, size, tokens, name."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manyhands.data.formats.tfrecord import masked

SIZE = 37
SHARDS = [(0, 9), (9, 20), (20, 21), (21, 37)]


def tokens_of(number: int) -> list[int]:
    """As many numbers as the row's own, by its rest of 5; the last one is large and negative."""
    return [*range(number % 5), -(2**40) - number]


def parquet(path: Path, first: int, last: int) -> None:
    rows = range(first, last)
    table = pa.table(
        {
            "number": pa.array(rows, pa.int64()),
            "size": pa.array([n / 4 for n in rows], pa.float32()),
            "tokens": pa.array([tokens_of(n) for n in rows], pa.list_(pa.int64())),
            "name": [f"row {n}" for n in rows],
        }
    )
    pq.write_table(table, path, row_group_size=3)


def csv(path: Path, first: int, last: int) -> None:
    lines = [f'{n},{n / 4},"row\n{n}, said ""{n}"""' for n in range(first, last)]
    path.write_text("\r\n".join(["number,size,name", *lines]) + "\r\n\r\n", newline="")


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def part(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(number: int) -> bytes:
    features = {
        "number": part(3, part(1, varint(number))),
        "size": part(2, part(1, struct.pack("<f", number / 4))),
        "tokens": part(3, part(1, b"".join(map(varint, tokens_of(number))))),
        "name": part(1, part(1, f"row {number}".encode())),
    }
    entries = [part(1, part(1, name.encode()) + part(2, value)) for name, value in features.items()]
    return part(1, b"".join(entries))


def record(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", masked(length)) + body + struct.pack("<I", masked(body))


def tfrecord(path: Path, first: int, last: int) -> None:
    path.write_bytes(b"".join(record(example(n)) for n in range(first, last)))


def tar(path: Path, first: int, last: int, form: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as archive:
        archive.addfile(folder("part"))
        for n in range(first, last):
            name = key_of(n)
            for ending, content in {
                "number.txt": str(n),
                "size": f"{n / 4}\n",
                "tokens": " ".join(map(str, tokens_of(n))),
            }.items():
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))


def key_of(number: int) -> str:
    """The name of a sample; some are too long for a plain header."""
    return f"part{'s' * 90 if number % 7 == 0 else ''}/{number:04}"


def folder(name: str) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = tarfile.DIRTYPE
    return found


WRITERS = {"parquet": parquet, "csv": csv, "tfrecord": tfrecord, "tar": tar}


def write(folder: Path, format: str) -> str:
    """Writes the shards; gives the pattern of their names."""
    for number, (first, last) in enumerate(SHARDS):
        WRITERS[format](folder / f"{number}.{format}", first, last)
    return str(folder / f"*.{format}")
