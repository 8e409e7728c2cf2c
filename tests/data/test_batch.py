"""Nested batches: counting rows, moving to devices, splitting."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from manyhands.core import DataError
from manyhands.data import Batch, Cursor, first_dim, split
from manyhands.data.batch import SampleMarker, to_device

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_cursor_dict_round_trip():
    cursor = Cursor(3, 512)
    assert Cursor.from_dict(cursor.to_dict()) == cursor


def test_first_dim_of_nested_data():
    assert first_dim(({"a": torch.zeros(5, 2)}, torch.zeros(5))) == 5
    assert first_dim(["name", torch.tensor(1.0), torch.zeros(3)]) == 3
    with pytest.raises(DataError, match="must contain a tensor"):
        first_dim(["a", "b"])


def test_to_device_casts_floats_only_and_keeps_the_nesting():
    data = {"x": Pair(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), "names": ["a", "b"], "n": 3}
    moved = to_device(data, CPU, dtype=torch.float64)
    assert isinstance(moved["x"], Pair)
    assert moved["x"].x.dtype == torch.float64
    assert moved["x"].y.dtype == torch.int64
    assert moved["names"] == ["a", "b"]
    assert moved["n"] == 3


def test_to_device_converts_numeric_numpy_arrays_to_tensors():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        moved = to_device([np.arange(3), frozen, np.array(["a"])], CPU)
    assert isinstance(moved[0], torch.Tensor)
    assert moved[1].tolist() == [0, 1, 2]
    assert isinstance(moved[2], np.ndarray)


def test_to_device_returns_the_same_tensor_when_already_on_the_device():
    tensor = torch.zeros(3)
    assert to_device(tensor, CPU) is tensor


def test_to_device_calls_the_to_method_of_custom_objects():
    class Graphs:
        where = "host"

        def to(self, device):
            self.where = str(device)
            return self

    assert to_device((Graphs(),), CPU)[0].where == "cpu"


def test_split_returns_views_without_copying():
    data = {"x": torch.arange(6), "pair": Pair(torch.arange(6), torch.arange(6)), "names": list("abcdef")}
    parts = split(data, [2, 4])
    assert parts[0]["x"].data_ptr() == data["x"].data_ptr()
    assert parts[1]["pair"].y.tolist() == [2, 3, 4, 5]
    assert parts[1]["names"] == list("cdef")


def test_split_returns_a_padding_row_for_empty_parts():
    assert [part.tolist() for part in split(torch.arange(3), [0, 2, 1, 0])] == [[0], [0, 1], [2], [0]]
    assert [part.tolist() for part in split(torch.arange(1), [0, 0])] == [[0], [0]]


@pytest.mark.parametrize("rows", [2, 4])
def test_split_partitions_sequences_of_samples(rows):
    images = tuple(torch.zeros(3, 8 + i, 8) for i in range(rows))
    targets = tuple({"boxes": torch.zeros(i, 4)} for i in range(rows))
    parts = split((images, targets), [1, rows - 1])
    assert [len(part[0]) for part in parts] == [1, rows - 1]
    assert parts[1][0][0] is images[1]
    assert parts[1][1][0] is targets[1]


def test_split_error_names_the_shape_that_cannot_be_split():
    with pytest.raises(DataError, match=r"batch of 4 samples.*shape \(7, 2\).*accumulate=1"):
        split((torch.zeros(4), torch.zeros(7, 2)), [2, 2])
    with pytest.raises(DataError, match=r"shape \(\)"):
        split((torch.zeros(4), torch.tensor(1.0)), [2, 2])


def test_single_micro_batch_is_the_unsplit_batch():
    data = object()
    batch = Batch(data, (3,), (7,), np.arange(3), Cursor())
    assert list(batch.micros()) == [(data, 3, 7)]
    assert (batch.num_samples, batch.global_samples) == (3, 7)


@dataclass(frozen=True)
class Example:
    pixels: torch.Tensor
    boxes: list[torch.Tensor]
    names: list[str]
    weight: torch.Tensor | None = None


def test_dataclasses_are_moved_and_split_like_other_containers():
    data = Example(torch.zeros(3, 2), [torch.ones(1), torch.ones(2), torch.ones(4)], ["a", "b", "c"])
    assert first_dim(data) == 3
    moved = to_device(data, CPU, dtype=torch.float64)
    assert moved.pixels.dtype == moved.boxes[0].dtype == torch.float64
    assert data.pixels.dtype == torch.float32
    first, second = split(moved, [1, 2])
    assert (first.pixels.shape, first.names, len(first.boxes)) == ((1, 2), ["a"], 1)
    assert (second.pixels.shape, second.names, second.weight) == ((2, 2), ["b", "c"], None)


def test_list_with_one_item_per_sample_is_split_between_items_whatever_their_shapes():
    images = [torch.zeros(2, 5, 5), torch.ones(2, 5, 5)]
    targets = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.ones(2, 4)}]
    as_torchvision = SampleMarker(lambda samples: tuple(zip(*samples, strict=True)))
    batch = as_torchvision(list(zip(images, targets, strict=True)))
    assert first_dim(batch) == 2
    parts = split(to_device(batch, CPU, dtype=torch.float64), [1, 1])
    assert [[image.shape for image in part[0]] for part in parts] == [[(2, 5, 5)], [(2, 5, 5)]]
    assert [part[1][0]["boxes"].shape for part in parts] == [(2, 4), (2, 4)]
    assert parts[1][1][0]["boxes"].sum() == 8


def test_columns_with_as_many_rows_as_columns_are_split_by_rows():
    columns = SampleMarker(lambda samples: [torch.stack(column) for column in zip(*samples, strict=True)])
    batch = columns([(torch.zeros(3), torch.tensor(1)), (torch.ones(3), torch.tensor(2))])
    assert [[column.tolist() for column in part] for part in split(batch, [1, 1])] == [
        [[[0.0, 0.0, 0.0]], [1]],
        [[[1.0, 1.0, 1.0]], [2]],
    ]


def test_samples_that_are_trees_are_split_between_samples():
    trees = [("a", ("b", "c")), ("d", "e"), (("f", "g"), "h")]
    parts = split((trees, torch.arange(3)), [1, 2])
    assert [part[0] for part in parts] == [trees[:1], trees[1:]]
