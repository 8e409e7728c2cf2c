"""Hostile tar files of samples: members are read in place, nothing is extracted, and every scan ends."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from manyhands.core import DataError
from manyhands.data.formats.tar import TarFormat


def test_tar_members_are_never_extracted_to_disk(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    with tarfile.open(folder / "samples.tar", "w") as archive:
        for name, kind in (
            ("../escaped.txt", tarfile.REGTYPE),
            ("/tmp/manyhands-escaped.txt", tarfile.REGTYPE),
            ("link.txt", tarfile.SYMTYPE),
            ("hard.txt", tarfile.LNKTYPE),
            ("fifo.txt", tarfile.FIFOTYPE),
            ("device.txt", tarfile.CHRTYPE),
            ("good.txt", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path / "secret.txt")
            member.size = 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"data"))
    before = sorted(tmp_path.rglob("*"))
    form = TarFormat()
    shard = form.scan(str(folder / "samples.tar"))
    data = (folder / "samples.tar").read_bytes()
    samples = [form.sample(data[a:b]) for a, b in zip(shard.marks, shard.marks[1:], strict=False)]
    assert [sample["__key__"] for sample in samples] == ["../escaped", "/tmp/manyhands-escaped", "good"]
    assert all(sample["txt"] == b"data" for sample in samples)
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/manyhands-escaped.txt").exists()


def header(size: bytes, kind: bytes = b"0") -> bytes:
    """Return the header of a member, with a valid checksum."""
    block = bytearray(512)
    block[:5], block[124 : 124 + len(size)], block[156:157], block[257:263] = b"a.txt", size, kind, b"ustar\0"
    block[148:156] = b"%06o\0 " % (sum(block) + 8 * 32)
    return bytes(block)


def pax(text: bytes) -> bytes:
    return header(b"%011o" % 512, b"x") + text.ljust(512, b"\0") + header(b"0")


@pytest.mark.timeout(20)  # A scan that goes backwards would never end.
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(b"-0000001000"), "a negative number"),
        (header(b"0") + header(b"-0000002000"), "a negative number"),
        (header(b"-0000001000", b"x"), "a negative number"),
        (pax(b"0 path=b.txt\n"), "a line of no length"),
        (pax(b"10 path=b\n-10 path=\n"), "a line of no length"),
        (header(b"\x80" + b"\xff" * 11, b"L"), "bytes too early"),
        (header(b"77777777777", b"L"), "bytes too early"),
        (header(b"77777777777", b"x"), "bytes too early"),
    ],
    ids=["back to itself", "back to the start", "negative pax", "pax 0", "pax -10", "2**88 L", "8 GiB L", "8 GiB x"],
)
def test_scan_of_a_tar_with_hostile_sizes_ends_with_an_error(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "samples.tar"
    path.write_bytes(content + b"\0" * 1024)
    with pytest.raises(DataError, match=reason):
        TarFormat().scan(str(path))
