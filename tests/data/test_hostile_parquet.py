"""Small Parquet files that expand to much memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.core import DataError
from manyhands.data.formats import parquet
from manyhands.data.formats.parquet import ParquetFormat

TEXT = "a" * 100_000
MIB = 1 << 20
COLUMNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numbers": (pa.array(np.zeros(3_000_000)), {}),
    "repeated text": (pa.array([TEXT] * 300), {}),
    "lists": (pa.array([[TEXT] * 30] * 10), {}),
    "structs": (pa.array([{"y": TEXT}] * 300), {}),
    "fixed size": (pa.array([TEXT.encode()] * 300, pa.binary(len(TEXT))), {}),
    "compressed": (pa.array([TEXT] * 300), {"use_dictionary": False}),
    "prefixes": (pa.array([TEXT] * 300), {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}),
}


def read(path: Path) -> Any:
    shard = ParquetFormat().scan(str(path))
    return ParquetFormat().table(shard, 0)


@pytest.mark.parametrize("name", COLUMNS)
def test_small_parquet_file_that_takes_much_memory_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, options = COLUMNS[name]
    pq.write_table(
        pa.table({"x": values}), tmp_path / "a.parquet", row_group_size=1 << 30, compression="zstd", **options
    )
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    monkeypatch.setattr(parquet, "_BATCH_BYTES", MIB)
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 16 * MIB)
    with pytest.raises(DataError, match="a row group of .* must have at most 16777216 bytes in memory"):
        read(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 64 * MIB)
    assert read(tmp_path / "a.parquet") is not None


@pytest.mark.parametrize("most", [1, 4 << 30])
def test_texts_are_the_same_with_and_without_dictionaries(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of one byte all columns of texts are read in the guarded way; the limit itself is not applied."""
    texts = [f"text {number % 7}" for number in range(1000)]
    table = pa.table({"x": texts, "y": [[text, "b"] for text in texts], "z": texts, "n": np.arange(1000)})
    encodings = {"z": "DELTA_BYTE_ARRAY"}
    dictionaries = ["x", "y.list.element"]
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=dictionaries, column_encoding=encodings)
    shard = ParquetFormat().scan(str(tmp_path / "a.parquet"))
    monkeypatch.setattr(parquet, "_repeating", _all_texts if most == 1 else parquet._repeating)
    found = ParquetFormat().table(shard, 0)
    assert [found.columns[name].values[5] for name in ("x", "z")] == ["text 5", "text 5"]
    assert found.columns["y"].values[6] == ["text 6", "b"]
    assert len(found.columns["n"].values) == 1000


def _all_texts(group: Any) -> list[Any]:
    columns = (group.column(number) for number in range(group.num_columns))
    return [column for column in columns if column.physical_type == "BYTE_ARRAY"]


def test_two_kilobytes_that_ask_for_20_gb_take_no_memory(tmp_path: Path) -> None:
    """The limit as it is, in a process whose peak memory is measured."""
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.dictionary(pa.int32(), pa.string()))]), compression="zstd") as out:
        indices = pa.array(np.zeros(20_000, np.int32))
        out.write_table(pa.table({"x": pa.DictionaryArray.from_arrays(indices, pa.array(["a" * 1_000_000]))}))
    assert path.stat().st_size < 4096
    code = f"""
import resource
from manyhands.core import DataError
from manyhands.data.formats.parquet import ParquetFormat
import pyarrow.parquet, pyarrow.compute
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    ParquetFormat().table(ParquetFormat().scan({str(path)!r}), 0)
except DataError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    grown, _, reason = done.stdout.partition(" ")
    assert int(grown) < 100 << 10
    assert "20000000000 bytes of texts" in reason
