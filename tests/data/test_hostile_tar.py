"""Tar files of samples from a stranger: members are read in place, and none becomes a file."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

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
