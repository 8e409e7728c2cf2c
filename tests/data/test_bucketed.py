"""Bucketing by length, and ragged samples: little padding, no lost sample, and lengths in the batch."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.core import DataError
from manyhands.data import Cursor, Feed, as_source, check_source, split, tensors
from manyhands.data.batch import to_device
from manyhands.data.collate import Fields, collate

SIZE = 61
LENGTHS = np.random.default_rng(0).integers(1, 40, SIZE)
TEXTS = [{"tokens": [i] * n, "i": i} for i, n in enumerate(LENGTHS.tolist())]


def rows(data, *, replicas=1, cursor=Cursor(), **settings):  # noqa: B008 (frozen)
    source = as_source(data)
    feeds = [Feed(source, replica=r, num_replicas=replicas, **settings) for r in range(replicas)]
    steps = zip(*(feed.epoch(cursor) for feed in feeds), strict=True)
    return [[i for batch in step for i in batch.ids.tolist()] for step in steps]


def padding(batches):
    """The share of places that hold no token."""
    filled = sum(LENGTHS[batch].sum() for batch in batches)
    return 1 - filled / sum(LENGTHS[batch].max() * len(batch) for batch in batches)


class TestBucketed:
    @settings(max_examples=8, deadline=None)
    @given(drawn=st.data())
    def test_changing_the_replica_count_neither_repeats_nor_skips_samples(self, drawn):
        batch_size, epoch = drawn.draw(st.integers(1, 9)), drawn.draw(st.integers(0, 3))
        data = mh.data.bucketed(TEXTS, batch_size, length="tokens", window=drawn.draw(st.integers(1, 5)))
        whole = rows(data, batch_size=batch_size, cursor=Cursor(epoch), seed=1)
        assert Counter(chain(*whole)) == Counter(range(SIZE))
        seen, position = [], 0
        while position < SIZE:
            taken = rows(
                data,
                replicas=drawn.draw(st.integers(1, 4)),
                batch_size=batch_size,
                cursor=Cursor(epoch, position),
                seed=1,
            )[: drawn.draw(st.integers(1, 3))]
            seen += taken
            position += sum(map(len, taken))
        assert seen == whole

    def test_bucketing_reduces_padding_and_shuffles_batch_lengths(self):
        plain = rows(TEXTS, batch_size=4)
        sorted_by_length = rows(mh.data.bucketed(TEXTS, 4, length="tokens"), batch_size=4)
        assert padding(sorted_by_length) < 0.06 < 0.3 < padding(plain)
        longest = [LENGTHS[batch].max() for batch in sorted_by_length]
        assert longest != sorted(longest)
        assert rows(mh.data.bucketed(TEXTS, 4, length="tokens"), batch_size=4, cursor=Cursor(1)) != sorted_by_length

    def test_length_as_function_column_or_array_is_equivalent(self, tmp_path):
        table = pa.table({"tokens": [text["tokens"] for text in TEXTS], "i": list(range(SIZE))})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
        expected = rows(mh.data.bucketed(TEXTS, 4, length=LENGTHS), batch_size=4)
        assert rows(mh.data.bucketed(TEXTS, 4, length=lambda text: len(text["tokens"])), batch_size=4) == expected
        assert rows(mh.data.bucketed(TEXTS, 4, length="tokens"), batch_size=4) == expected
        files = mh.data.files(tmp_path / "a.parquet")
        for length in ("tokens", lambda row: len(row["tokens"])):
            source = as_source(mh.data.bucketed(files, 4, length=length))
            assert source._lengths.tolist() == LENGTHS.tolist()
        assert padding(rows(mh.data.bucketed(files, 4, length="tokens"), batch_size=4)) < 0.06

    def test_validation_is_sorted_within_windows_and_not_shuffled(self):
        found = rows(mh.data.bucketed(TEXTS, 4, length="tokens"), batch_size=4, shuffle=False)
        assert list(chain(*found)) == np.argsort(LENGTHS, kind="stable").tolist()

    def test_batch_size_of_bucketed_is_used_and_a_conflicting_one_is_rejected(self):
        source = as_source(mh.data.bucketed(TEXTS, 4, length="tokens"))
        assert check_source(source, None) == 4
        with pytest.raises(DataError, match="of its mh.data.bucketed must be equal, but got 8 and 4"):
            check_source(source, 8)

    def test_lengths_are_computed_once_and_pickled_with_the_data(self):
        read = []

        class Counted(list):
            def __getitem__(self, i):
                read.append(i)
                return super().__getitem__(i)

        data = mh.data.bucketed(Counted(TEXTS), 4, length="tokens")
        as_source(data)
        as_source(data)
        assert len(read) == SIZE
        assert [found.tolist() for found in pickle.loads(pickle.dumps(data.__dict__["_found"]))] == [LENGTHS.tolist()]

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (
                lambda: mh.data.bucketed(TEXTS, 4),
                r"different lengths, but got length 2 for every sample .measured by len.. Pass length=",
            ),
            (
                lambda: mh.data.bucketed(TEXTS, 4, length=[1, 2]),
                r"one value for every sample.*2 lengths for 61",
            ),
            (lambda: mh.data.bucketed(lambda: iter(TEXTS), 4), r"with random access, but got .*a stream"),
            (
                lambda: mh.data.bucketed(torch.zeros(5), 4),
                r"single samples, but got arrays. Pass the lengths",
            ),
            (lambda: mh.data.bucketed(TEXTS, 0), r"batch_size must be a whole number of at least 1, but got 0"),
            (lambda: mh.data.bucketed(TEXTS, "8"), r"batch_size must be a whole number of at least 1, but got '8'"),
            (
                lambda: mh.data.bucketed(TEXTS, 4, length="i"),
                r"whose values have a length, but got 'i' \(TypeError",
            ),
        ],
    )
    def test_invalid_arguments_raise_data_error(self, make, text):
        with pytest.raises(DataError, match=text):
            as_source(make())

    def test_unknown_length_column_error_lists_the_available_columns(self, tmp_path):
        class Texts:
            __len__, __getitem__ = TEXTS.__len__, TEXTS.__getitem__

        pq.write_table(pa.Table.from_pylist(TEXTS), tmp_path / "a.parquet")
        text = "length must be one of the columns tokens, i, but got 'tokns'. Did you mean 'tokens'?"
        with pytest.raises(DataError, match=text):
            mh.data.bucketed(TEXTS, 4, length="tokns")
        for data in (Texts(), mh.data.files(tmp_path / "a.parquet")):
            with pytest.raises(DataError, match=text):
                as_source(mh.data.bucketed(data, 4, length="tokns"))

    def test_repr_omits_the_data(self):
        assert repr(mh.data.bucketed(TEXTS, 4)) == "bucketed(a list, 4, length=len, window=100)"
        assert repr(mh.data.bucketed(TEXTS, 4, length=LENGTHS)) == "bucketed(a list, 4, length=61 numbers, window=100)"

    def test_fit_on_two_replicas_has_the_same_losses_as_on_one(self, tmp_path):
        def loss(model, batch):
            mask = batch.mask("tokens")
            total = (model(batch["tokens"] / SIZE * 1.0) * mask).sum(1) / batch.lengths("tokens")
            return (total - batch["i"] / SIZE).square().mean()

        class Weigh(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.tensor(0.1))

            def forward(self, x):
                return self.weight * x

        task = mh.Task(
            model=Weigh,
            loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            data=mh.data.bucketed(TEXTS, 4, length="tokens"),
        )
        runs = [
            mh.fit(
                task,
                strategy,
                on=on,
                epochs=2,
                folder=tmp_path,
                name=on[-1],
                options=mh.options.Display(progress=False),
            )
            for strategy, on in ((mh.Single(), "cpu"), (mh.Mirrored(2), "cpu*2"))
        ]
        torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(runs[1].losses))


class TestRagged:
    SAMPLES = ({"x": np.ones((2, 3), np.float32), "y": 1}, {"x": np.ones((4, 3), np.float32), "y": 0})

    def test_collate_pads_arrays_tensors_and_lists(self):
        for kind in (np.array, torch.tensor, list):
            batch = collate([{"x": kind([5, 6, 7])}, {"x": kind([8])}])
            assert batch["x"].tolist() == [[5, 6, 7], [8, 0, 0]]
            assert batch["x"].dtype == torch.int64
            assert batch.lengths("x").tolist() == [3, 1]
        batch = collate(self.SAMPLES)
        assert batch["x"].shape == (2, 4, 3)
        assert batch["x"].sum() == 18
        assert batch["y"].tolist() == [1, 0]
        assert batch.mask("x").tolist() == [[True, True, False, False], [True] * 4]

    def test_lengths_are_available_without_padding(self):
        batch = collate([{"x": [1, 2]}, {"x": [3, 4]}])
        assert batch["x"].tolist() == [[1, 2], [3, 4]]
        assert batch.lengths("x").tolist() == [2, 2]
        assert batch.mask("x").all()

    def test_empty_sample_does_not_determine_the_dtype(self):
        batch = collate([{"x": []}, {"x": [3, 4]}])
        assert batch["x"].tolist() == [[0, 0], [3, 4]]
        assert batch["x"].dtype == torch.int64

    def test_lengths_are_preserved_by_split_to_device_and_pickle(self):
        batch = collate([{"x": [1.0] * n} for n in (3, 1, 2)])
        first, second = split(batch, [1, 2])
        assert (first.lengths("x").tolist(), second.lengths("x").tolist()) == ([3], [1, 2])
        assert second.mask("x").tolist() == [[True, False, False], [True, True, False]]
        moved = to_device(batch, torch.device("meta"))
        assert moved.lengths("x").is_meta
        assert len(list(tensors(batch))) == 2
        again = pickle.loads(pickle.dumps(batch))
        assert isinstance(again, Fields)
        assert again.lengths("x").tolist() == [3, 1, 2]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_lengths_are_preserved_by_workers_and_micro_batches(self, workers):
        feed = Feed(as_source(TEXTS), batch_size=6, accumulate=2, workers=workers)
        for batch in feed.epoch(Cursor()):
            for data, size, _ in batch.micros():
                assert data.lengths("tokens").tolist() == LENGTHS[data["i"].numpy()].tolist()
                assert size == len(data["i"])

    def test_worker_processes_collate_the_same_arrays_as_the_main_process(self):
        images = [{"image": np.full((4, 4), i, np.uint8)} for i in range(12)]
        runs = [list(Feed(as_source(images), batch_size=5, workers=workers).epoch(Cursor())) for workers in (0, 2)]
        for ours, theirs in zip(*runs, strict=True):
            assert torch.equal(ours.data["image"], theirs.data["image"])
            assert ours.data["image"][:, 0, 0].tolist() == ours.ids.tolist()

    @pytest.mark.parametrize(
        ("samples", "text"),
        [
            ([{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}], r"field 'x' has the shapes \[\(2, 3\), \(2, 4\)\]"),
            ([{"x": 1}, {"y": 1}], r"all samples must have the fields x, but one has y"),
            ([(torch.zeros(2),), (torch.zeros(3),)], r"pass collate=.*or return samples as dicts"),
        ],
    )
    def test_samples_that_cannot_be_collated_raise_data_error(self, samples, text):
        with pytest.raises(DataError, match=rf"must collate into one batch.*{text}"):
            as_source(samples).fetch(np.array([0, 1]))
