"""Data files: rows of every format, in one order for any layout; damaged files are reported by name."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.core import DataError
from manyhands.data import Cursor, Feed, as_source
from manyhands.data.formats import delimited
from manyhands.data.formats.tfrecord import TFRecordFormat, masked

from ..grouped_options import fit_options
from . import shards
from .shards import SIZE, tokens_of

COLUMNS = {
    "parquet": None,
    "csv": None,
    "tfrecord": {"number": "int64", "size": "float32", "tokens": "int64[]"},
    "tar": {"number.txt": "int64", "size": "float32", "tokens": "int64[]"},
}


def number_of(batch):
    return batch["number" if "number" in batch else "number.txt"]


@pytest.fixture(params=COLUMNS)
def data(request, tmp_path):
    """Write equal rows to one file per format."""
    return mh.data.files(shards.write(tmp_path, request.param), columns=COLUMNS[request.param], window=9)


def numbers(data, *, replicas=1, cursor=Cursor(), **settings):  # noqa: B008 (frozen)
    """The rows of an epoch in the order of all replicas together, by what the rows themselves say."""
    source = as_source(data)
    feeds = [Feed(source, replica=r, num_replicas=replicas, **settings) for r in range(replicas)]
    found = []
    for step in zip(*(feed.epoch(cursor) for feed in feeds), strict=True):
        found += [n for batch in step for n in number_of(batch.data)[: batch.num_samples].tolist()]
    return found


def test_batches_contain_the_rows_of_the_files(data):
    batches = list(Feed(as_source(data), batch_size=10, shuffle=False).epoch(Cursor()))
    assert [len(number_of(batch.data)) for batch in batches] == [10, 10, 10, 7]
    for batch in batches:
        rows = number_of(batch.data).tolist()
        assert rows == batch.ids.tolist()
        assert batch.data["size"].dtype == torch.float32
        assert batch.data["size"].tolist() == [n / 4 for n in rows]
        if "tokens" in batch.data:
            lengths = batch.data.lengths("tokens").tolist()
            assert lengths == [n % 5 + 1 for n in rows]
            for row, n, length in zip(batch.data["tokens"].tolist(), rows, lengths, strict=True):
                assert row == tokens_of(n) + [0] * (5 - length)


def test_string_columns_are_returned_as_strings(tmp_path):
    for format, text in (("csv", 'row\n{0}, said "{0}"'), ("parquet", "row {0}")):
        data = mh.data.files(shards.write(tmp_path, format), columns=["name"])
        batch = as_source(data).fetch(np.array([20, 3]))
        assert batch == {"name": [text.format(20), text.format(3)]}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_changing_the_layout_neither_repeats_nor_skips_samples(data, drawn):
    cursor, seen = Cursor(epoch=drawn.draw(st.integers(0, 3))), []
    whole = numbers(data, batch_size=SIZE, cursor=cursor, seed=5)
    assert Counter(whole) == Counter(range(SIZE))
    while cursor.position < SIZE:
        layout = {"replicas": drawn.draw(st.integers(1, 4)), "batch_size": drawn.draw(st.integers(1, 12))}
        taken = numbers(data, cursor=cursor, seed=5, **layout)[: layout["batch_size"] * drawn.draw(st.integers(1, 3))]
        seen += taken
        cursor = Cursor(cursor.epoch, cursor.position + len(taken))
    assert seen == whole


def test_order_is_shuffled_across_files_and_differs_between_epochs(data):
    data = mh.data.files(data.paths, columns=data.format.columns)
    first, again, other = (numbers(data, batch_size=5, cursor=Cursor(epoch)) for epoch in (0, 0, 1))
    assert first == again != other
    assert first != sorted(first)
    files = [next(i for i, (_, last) in enumerate(shards.SHARDS) if n < last) for n in first]
    assert sum(a != b for a, b in pairwise(files)) > 8


def test_shuffle_window_limits_the_number_of_open_row_groups(tmp_path):
    table = pa.table({"number": np.arange(6000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    data = mh.data.files(tmp_path / "a.parquet", window=500)
    found = np.array(numbers(data, batch_size=100))
    assert [len(set(found[start : start + 500] // 100)) for start in range(0, 6000, 500)] == [5] * 12
    assert len(set(found[:100] // 100)) == 5


def test_workers_yield_the_same_rows_and_random_draws(data):
    def decode(sample):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return {"number": int(number_of(sample)), "noise": noise.item()}

    noisy = mh.data.files(data.paths, columns=data.format.columns, decode=decode)
    source = as_source(noisy)
    runs = [list(Feed(source, batch_size=8, workers=workers).epoch(Cursor(1, 8))) for workers in (0, 2)]
    for ours, theirs in zip(*runs, strict=True):
        assert ours.data["number"].tolist() == theirs.data["number"].tolist() == ours.ids.tolist()
        assert ours.data["noise"].tolist() == theirs.data["noise"].tolist()


def test_index_is_pickled_with_the_description(data, tmp_path):
    as_source(data)
    sent = pickle.loads(pickle.dumps(data))
    assert sent == data
    for path in data.paths:
        Path(path).unlink()
    assert as_source(sent).size == SIZE
    with pytest.raises(DataError, match=r"0\.\w+ must (be readable|not change).*(No such file|a deleted file)"):
        as_source(sent).fetch(np.array([0]))


def test_csv_types_are_inferred_from_the_first_file_with_rows(tmp_path):
    for name, rows in {"a": "", "b": "1,2.5\n", "c": "2,3.5\n"}.items():
        (tmp_path / f"{name}.csv").write_text(f"\nnumber,size\n{rows}")
    batch = next(Feed(as_source(mh.data.files(tmp_path / "*.csv")), batch_size=4, shuffle=False).epoch(Cursor())).data
    assert (batch["number"].tolist(), batch["size"].tolist()) == ([1, 2], [2.5, 3.5])


BARE = st.text('x"\u00e9 ', min_size=1).filter(lambda text: text[0] != '"')
QUOTED = st.text('x",\n\r')


@given(rows=st.lists(st.tuples(BARE | QUOTED, BARE | QUOTED), min_size=1), mark=st.booleans(), chunk=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_csv_quotes_inside_unquoted_values_are_literal(tmp_path_factory, rows, mark, chunk):
    """Where a value does not begin with a quote, those in it mean nothing, wherever a part of the file ends."""

    def written(value):
        is_bare = value and value[0] != '"' and not set(value) & set(",\n\r")
        return value if is_bare else '"' + value.replace('"', '""') + '"'

    path = tmp_path_factory.mktemp("quotes") / "a.csv"
    lines = ["first,second", *(",".join(map(written, row)) for row in rows)]
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + "\r\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "CHUNK", chunk)
        patch.setattr(delimited, "BLOCK_BYTES", 16)
        source = as_source(mh.data.files(path, columns={"first": "str", "second": "str"}))
        batch = source.fetch(np.arange(source.size))
    assert list(zip(batch["first"], batch["second"], strict=True)) == rows


def test_long_csv_row_gets_its_own_block(tmp_path):
    """One long row among short ones has a block of its own; pyarrow parses no more than 2 GiB at once."""
    (tmp_path / "a.csv").write_text("text\n" + "short\n" * 5000 + "long" * 2**19 + "\n" + "short\n" * 3)
    (shard,) = mh.data.files(tmp_path / "a.csv").index().shards
    assert shard.blocks.tolist() == [0, 4096, 5000, 5001, 5004]


def reads_of_an_epoch(pattern, window=None):
    """The most blocks that were kept at a time, how often a block was read, and the order."""
    source = as_source(mh.data.files(pattern, window=window))
    most, reads, read = 0, 0, source._read

    def counted(block):
        nonlocal reads
        reads += 1
        return read(block)

    source._read = counted
    order = source.order(0, 0, True)
    for first in range(0, source.size, 7):
        source.fetch(order[first : first + 7])
        most = max(most, len(source._tables))
    return most, reads, order[: source.size].tolist()


def test_large_row_groups_are_read_one_at_a_time(tmp_path, monkeypatch):
    """Ten row groups of 100 rows: mixed by fours where they are small; a large one by itself, and one is kept."""
    table = pa.table({"x": np.arange(1000), "text": [f"row {n}" for n in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    files = importlib.import_module("manyhands.data.files")
    monkeypatch.setattr(files, "MIXED_ROWS", 100)
    most, reads, order = reads_of_an_epoch(tmp_path / "a.parquet")
    assert (most, reads) == (8, 10)
    monkeypatch.setattr(files, "MIXED_BYTES", 5000)
    most, reads, alone = reads_of_an_epoch(tmp_path / "a.parquet")
    assert most == 1
    assert reads <= 3 * 10  # where a batch lies in two of them
    assert sorted(alone) == sorted(order) == list(range(1000))
    assert all(len({n // 100 for n in alone[first : first + 100]}) == 1 for first in range(0, 1000, 100))
    most, reads, _ = reads_of_an_epoch(tmp_path / "a.parquet", window=300)
    assert most == 3
    assert reads <= 10 + 3 * 2 * 4


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_member_names_in_tar_files_are_read(tmp_path, form):
    shards.tar(tmp_path / "a.tar", 0, 15, form)
    source = as_source(mh.data.files(tmp_path / "a.tar"))
    keys = source.fetch(np.arange(15))["__key__"]
    assert keys == [shards.key_of(n) for n in range(15)]


def test_tfrecord_example_written_by_tensorflow_is_read():
    """The bytes that TensorFlow's own tutorial on TFRecord shows."""
    body = (
        b"\nR\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
        b"\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00"
    )
    sample = TFRecordFormat().sample(shards.record(body))
    assert {name: list(values) for name, values in sample.items()} == {
        "feature2": [b"goat"],
        "feature1": [4],
        "feature3": [np.float32(0.9876)],
        "feature0": [0],
    }
    # crc32c of nine digits is the published check value.
    crc = 0xE3069283
    assert masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TestDamage:
    """A failing reader is named: the file, and the row."""

    def cut(self, path, num_bytes):
        path.write_bytes(path.read_bytes()[:-num_bytes])

    @pytest.mark.parametrize("format", ["parquet", "tfrecord", "tar"])
    def test_truncated_file_is_detected_while_indexing(self, tmp_path, format):
        pattern = shards.write(tmp_path, format)
        path = tmp_path / f"1.{format}"
        # The last sample of a tar file is followed by up to ten kilobytes of zeros.
        self.cut(path, 30 if format != "tar" else len(path.read_bytes()) - 16 * 512 - 100)
        with pytest.raises(DataError, match=rf"1\.{format} must be") as info:
            as_source(mh.data.files(pattern))
        assert {"parquet": "whole Parquet file", "tfrecord": "at record 10", "tar": "at sample"}[format] in str(
            info.value
        )

    def test_tfrecord_record_with_wrong_checksum_is_rejected(self, tmp_path):
        pattern = shards.write(tmp_path, "tfrecord")
        path = tmp_path / "1.tfrecord"
        content = bytearray(path.read_bytes())
        content[content.index(b"row 12")] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"record of .*1\.tfrecord must be.*wrong checksum at record 3[.]"):
            list(Feed(as_source(mh.data.files(pattern)), batch_size=4).epoch(Cursor()))

    @pytest.mark.timeout(20)
    def test_overlong_varint_in_a_tfrecord_is_rejected_without_reading_all_of_it(self):
        body = b"\xff" * 2_000_000 + b"\x01"
        length = len(body).to_bytes(8, "little")
        record = length + masked(length).to_bytes(4, "little") + body + masked(body).to_bytes(4, "little")
        with pytest.raises(ValueError, match="a number of more than 10 bytes"):
            TFRecordFormat().sample(record)

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("format", ["parquet", "csv", "tfrecord", "tar"])
    def test_fifo_among_the_files_is_rejected_without_blocking(self, tmp_path, format):
        pattern = shards.write(tmp_path, format)
        os.mkfifo(tmp_path / f"0.{format}.{format}")
        with pytest.raises(DataError, match="data files must be regular files"):
            mh.data.files(pattern)

    def test_tfrecord_length_with_wrong_checksum_is_rejected(self, tmp_path):
        shards.tfrecord(tmp_path / "a.tfrecord", 0, 5)
        content = bytearray((tmp_path / "a.tfrecord").read_bytes())
        content[len(shards.record(shards.example(0))) + 2] ^= 1
        (tmp_path / "a.tfrecord").write_bytes(content)
        with pytest.raises(DataError, match=r"length with a wrong checksum at record 1[.]"):
            as_source(mh.data.files(tmp_path / "a.tfrecord"))

    @pytest.mark.parametrize(
        ("line", "text"),
        [("x,1.5,a", "column 'number'.*invalid value 'x' at row 7[.]"), ("1,2", "Expected 3 columns.* at row 7[.]")],
    )
    def test_csv_line_that_does_not_parse_is_rejected(self, tmp_path, line, text):
        good = [f"{n},{n / 2},a" for n in range(7)]
        (tmp_path / "a.csv").write_text("\n".join(["number,size,name", *good, line, *good]))
        data = mh.data.files(tmp_path / "a.csv", columns={"number": "int64", "size": "float32"})
        with pytest.raises(DataError, match=rf"every row of .*a\.csv must be readable.*{text}"):
            as_source(data).fetch(np.array([0]))

    def test_csv_error_in_a_later_block_reports_the_row_number_in_the_file(self, tmp_path):
        lines = [f"{n}" for n in range(9000)]
        lines[8500] = "much"
        (tmp_path / "a.csv").write_text("\n".join(["number", *lines]))
        source = as_source(mh.data.files(tmp_path / "a.csv"))
        assert source.fetch(np.array([0, 5000]))["number"].tolist() == [0, 5000]
        with pytest.raises(DataError, match=r"invalid value 'much' at row 8500[.]"):
            source.fetch(np.array([8499]))

    def test_unclosed_csv_quote_is_rejected(self, tmp_path):
        (tmp_path / "a.csv").write_text('a,b\n1,"x\n2,y\n')
        with pytest.raises(DataError, match=r"a\.csv must be a whole CSV file.*never closed"):
            as_source(mh.data.files(tmp_path / "a.csv"))

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"a,b\r1,2\r3,4\r", r"lines end with \\n or \\r\\n, but got \\r alone at byte 3[.]"),
            (b"a,b\n1,2\n3,4\r5,6\n", r"\\r alone at byte 11[.]"),
            (b"a,a\n1,2\n", r"columns have different names, but got 'a' twice[.]"),
            (b"", r"a line of names, but got no line at all[.]"),
        ],
    )
    def test_ambiguous_csv_file_is_rejected(self, tmp_path, content, text):
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.csv must be a CSV file.*{text}"):
            as_source(mh.data.files(tmp_path / "a.csv"))

    def test_parquet_page_with_wrong_checksum_is_rejected(self, tmp_path):
        path = tmp_path / "a.parquet"
        table = pa.table({"x": np.full(100, 0x0102030405060708)})
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, write_page_checksum=True, **plain)
        content = bytearray(path.read_bytes())
        content[content.index(bytes(range(8, 0, -1))) + 3] ^= 1
        path.write_bytes(content)
        with pytest.raises(
            DataError, match=r"every row of .*a\.parquet must be readable.*in the row group at row 0[.]"
        ):
            as_source(mh.data.files(path)).fetch(np.array([50]))

    @pytest.mark.parametrize("break_it", [lambda tar: tar + tar, lambda tar: tar[:1536] + bytes(512) + tar[2048:]])
    def test_data_after_the_end_of_a_tar_file_is_rejected(self, tmp_path, break_it):
        shards.tar(tmp_path / "a.tar", 0, 5)
        (tmp_path / "a.tar").write_bytes(break_it((tmp_path / "a.tar").read_bytes()))
        with pytest.raises(DataError, match=r"every sample of .*a\.tar must be readable.*an empty header at byte"):
            as_source(mh.data.files(tmp_path / "a.tar"))

    @pytest.mark.parametrize(
        ("format", "columns", "text"),
        [
            ("parquet", {"size": "int64"}, r"0\.25 in 'size', which is not a valid int64 in the row group at row 0[.]"),
            ("tfrecord", {"size": "int64"}, r"0\.25 in 'size', which is not a valid int64 at record 1[.]"),
            (
                "tfrecord",
                {"tokens": "int32[]"},
                r"-1099511627777 in 'tokens', which is not a valid int32 at record 1[.]",
            ),
            (
                "tfrecord",
                {"name": "int64"},
                r"bytes in 'name' instead of int64 \(write bytes in columns=\) at record 1[.]",
            ),
        ],
    )
    def test_column_type_that_would_change_values_is_rejected(self, tmp_path, format, columns, text):
        pattern = shards.write(tmp_path, format)
        with pytest.raises(DataError, match=text):
            as_source(mh.data.files(pattern, columns=columns)).fetch(np.array([1]))

    def test_csv_row_above_the_size_limit_is_rejected(self, tmp_path, monkeypatch):
        monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 8)
        (tmp_path / "a.csv").write_text("a\n1\n1234567890\n")
        with pytest.raises(DataError, match=r"got more than 8 bytes at row 1[.]"):
            as_source(mh.data.files(tmp_path / "a.csv"))

    @pytest.mark.parametrize("columns", [None, ["y"]])
    def test_null_value_error_names_column_and_row(self, tmp_path, columns):
        table = pa.table({"x": [[1], [2], [3]], "y": [1.0, 2.0, None]})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
        source = as_source(mh.data.files(tmp_path / "a.parquet", columns=columns))
        assert source.fetch(np.array([1]))["y"].tolist() == [2.0]
        with pytest.raises(DataError, match=r"a\.parquet.*no value in column 'y' at row 2[.]"):
            source.fetch(np.array([2]))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_decode_error_names_file_and_row(self, data, workers):
        def decode(sample):
            return 1 // (int(number_of(sample)) - 23)

        source = as_source(mh.data.files(data.paths, columns=data.format.columns, decode=decode))
        with pytest.raises(DataError, match=r"3\.\w+ must be readable.*ZeroDivisionError.* in decode at row 2[.]"):
            list(Feed(source, batch_size=4, workers=workers).epoch(Cursor()))

    def test_file_modified_after_indexing_is_rejected(self, data):
        source = as_source(data)
        with open(data.paths[0], "ab") as file:
            file.write(b"more")
        with pytest.raises(DataError, match=r"0\.\w+ must not change while it is read.*bytes instead of"):
            source.fetch(np.array([0]))

    def test_missing_or_multi_valued_tfrecord_feature_is_rejected(self, tmp_path):
        shards.tfrecord(tmp_path / "a.tfrecord", 0, 5)
        for columns, text in (
            ({"weight": "float32"}, r"a record without the feature 'weight' \(it has 'number', .*at record 1[.]"),
            (
                {"tokens": "int64"},
                r"2 values of 'tokens' instead of one \(write int64\[\] in columns=\) at record 1[.]",
            ),
        ):
            with pytest.raises(DataError, match=text):
                as_source(mh.data.files(tmp_path / "a.tfrecord", columns=columns)).fetch(np.array([1]))


class TestDescription:
    @pytest.mark.parametrize(
        ("names", "settings", "text"),
        [
            (["none-*.csv"], {}, r"data files must exist, but got .*none-\*\.csv"),
            (["."], {}, r"paths must name files, but got the folder"),
            (["a.csv", "b.tar"], {}, r"one format, but got csv, tar"),
            (["a.txt"], {}, r"names of data files must end in \.parquet.*a\.txt[.] Rename it, or pass"),
            (["a.csv.gz"], {}, r"must not be compressed as a whole.*a\.csv\.gz[.] Decompress it"),
            (["a.csv"], {"format": "xml"}, r"format must be one of parquet, csv, tfrecord, tar, but got 'xml'"),
            (["a.csv"], {"columns": {"x": "floaty"}}, r"the type of a column must be .* but got 'floaty' for 'x'"),
            (["a.csv"], {"window": 0}, r"window must be at least 1 row, but got 0"),
        ],
    )
    def test_invalid_paths_and_settings_are_rejected_on_construction(self, tmp_path, names, settings, text):
        for name in ("a.csv", "b.tar", "a.txt", "a.csv.gz"):
            (tmp_path / name).write_text("x\n1\n")
        with pytest.raises(DataError, match=text):
            mh.data.files([tmp_path / name for name in names], **settings)

    @pytest.mark.parametrize("format", ["parquet", "csv"])
    def test_unknown_column_error_lists_the_available_columns(self, tmp_path, format):
        pattern = shards.write(tmp_path, format)
        with pytest.raises(DataError, match=r"columns of .*0\.\w+ must be among 'number', 'size'.*, but got 'weight'"):
            as_source(mh.data.files(pattern, columns=["size", "weight"]))

    def test_format_is_inferred_from_the_file_name_or_given_by_name(self, tmp_path):
        shards.tfrecord(tmp_path / "train.tfrecord-00000-of-00002", 0, 3)
        shards.tfrecord(tmp_path / "train.tfrecord-00001-of-00002", 3, 5)
        assert as_source(mh.data.files(tmp_path / "train*")).size == 5
        shards.parquet(tmp_path / "data.bin", 0, 3)
        assert as_source(mh.data.files(tmp_path / "data.bin", format="parquet")).size == 3

    def test_requested_column_types_are_used(self, tmp_path):
        (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n3\t4\n")
        data = mh.data.files(tmp_path / "a.tsv", columns={"x": "float64", "y": "str"})
        batch = as_source(data).fetch(np.array([1]))
        assert (batch["x"].dtype, batch["y"]) == (torch.float64, ["4"])

    def test_decode_receives_parquet_rows_as_dicts(self, tmp_path):
        seen = []
        data = mh.data.files(shards.write(tmp_path, "parquet"), decode=lambda row: seen.append(row) or row["number"])
        assert as_source(data).fetch(np.array([7, 30])).tolist() == [7, 30]
        assert [set(row) for row in seen] == [{"number", "size", "tokens", "name"}] * 2
        assert seen[1]["tokens"].tolist() == tokens_of(30)


def loss(model, batch):
    inputs = torch.stack([number_of(batch).float() / SIZE, batch["size"]], 1)
    return (model(inputs).squeeze(1) - batch["size"]).square().mean()


def task(data):
    return mh.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=data,
        batch_size=8,
    )


def test_resume_on_fewer_replicas_has_the_losses_of_an_uninterrupted_run(data, tmp_path):
    settings = {"folder": tmp_path / "runs", "progress": False}
    whole = mh.fit(task(data), mh.Single(), **fit_options(on="cpu", epochs=2, name="one", **settings))
    assert whole.num_steps == 10
    two = mh.fit(task(data), mh.Mirrored(2), **fit_options(on="cpu*2", steps=3, name="two", **settings))
    resumed = mh.fit(task(data), mh.Single(), **fit_options(on="cpu", epochs=2, resume=two, **settings))
    torch.testing.assert_close(torch.tensor(resumed.losses), torch.tensor(whole.losses), rtol=1e-5, atol=1e-7)
