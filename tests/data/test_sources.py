"""Accepted kinds of data, and the errors for data that cannot be used."""

from __future__ import annotations

import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from manyhands.core import DataError
from manyhands.data import Cursor, Feed, as_source, check_source

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)
IDS = np.array([7, 0, 3])


class Squares(Dataset):
    def __init__(self, size=10):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError(i)
        return torch.tensor(float(i * i)), i


class Countdown(IterableDataset):
    def __iter__(self):
        yield from range(10, 0, -1)


def ids_of(source, epoch=0, **settings):
    feed = Feed(source, batch_size=4, **settings)
    return [batch.ids.tolist() for batch in feed.epoch(Cursor(epoch, 0))]


class TestArrays:
    @pytest.mark.parametrize("make", [lambda t: t, lambda t: t.numpy()])
    def test_fetch_from_tensors_and_numpy_arrays(self, make):
        x, y = as_source((make(X), make(Y))).fetch(IDS)
        assert torch.equal(x, X[IDS])
        assert torch.equal(y, Y[IDS])

    def test_nested_structure_is_preserved(self):
        assert torch.equal(as_source(X).fetch(IDS), X[IDS])
        assert torch.equal(as_source([X, Y]).fetch(IDS)[1], Y[IDS])
        assert torch.equal(as_source({"x": X, "y": Y}).fetch(IDS)["y"], Y[IDS])
        assert torch.equal(as_source(({"x": X}, Y)).fetch(IDS)[0]["x"], X[IDS])
        pair = namedtuple("pair", "x y")
        assert torch.equal(as_source(pair(X, Y)).fetch(IDS).y, Y[IDS])
        assert torch.equal(as_source(TensorDataset(X, Y)).fetch(IDS)[1], Y[IDS])

    def test_subset_of_arrays_is_read_as_arrays(self):
        source = as_source(Subset(Subset(TensorDataset(X, Y), range(1, 10)), [8, 2]))
        assert source.max_workers == 0
        assert source.fetch(np.array([0, 1]))[1].tolist() == [9, 3]

    def test_dtypes_are_preserved(self):
        assert as_source(np.zeros((3, 2))).fetch(np.array([0])).dtype == torch.float64
        assert as_source(np.zeros(3, np.uint8)).fetch(np.array([0])).dtype == torch.uint8

    @pytest.mark.parametrize("reverse", [False, True])
    def test_read_only_and_reversed_arrays_are_neither_copied_nor_warned_about(self, reverse):
        array = np.arange(20).reshape(10, 2)
        array = array[::-1] if reverse else array
        array.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            batch = as_source(array).fetch(IDS)
        assert np.array_equal(batch.numpy(), array[IDS])

    def test_batches_do_not_share_memory_with_the_data(self):
        data = torch.zeros(4)
        as_source(data).fetch(np.arange(4)).add_(1)
        assert data.sum() == 0

    def test_batches_do_not_require_grad(self):
        assert not as_source(torch.zeros(4, requires_grad=True)).fetch(np.arange(2)).requires_grad

    def test_collate_receives_a_list_of_rows(self):
        source = as_source((X, {"y": Y}), collate=lambda rows: [(x.sum(), d["y"]) for x, d in rows])
        assert [int(y) for _, y in source.fetch(IDS)] == IDS.tolist()

    def test_arrays_of_different_lengths_are_rejected(self):
        with pytest.raises(DataError, match=r"same length, but got data\['x'\]: 10, data\['y'\]: 9"):
            as_source({"x": X, "y": Y[:9]})

    def test_non_numeric_arrays_are_rejected(self):
        with pytest.raises(DataError, match=r"dtype <U1"):
            as_source(np.array(["a", "b"]))


class TestMapped:
    def test_samples_are_collated(self):
        squares, ids = as_source(Squares()).fetch(IDS)
        assert squares.tolist() == [49, 0, 9]
        assert ids.tolist() == [7, 0, 3]

    def test_custom_collate_is_used(self):
        assert as_source(Squares(), collate=len).fetch(IDS) == 3

    def test_list_of_samples_is_a_dataset(self):
        assert as_source([(x, y) for x, y in zip(X, Y, strict=True)]).fetch(IDS)[1].tolist() == IDS.tolist()

    def test_getitems_is_used(self):
        class Many(Squares):
            def __getitems__(self, ids):
                return [(-1.0, self[i][1]) for i in ids]

        assert as_source(Many()).fetch(IDS)[0].tolist() == [-1, -1, -1]

    @pytest.mark.parametrize("many", [False, True])
    def test_failing_sample_is_named_in_the_error(self, many):
        class Broken(Squares):
            def __getitem__(self, i):
                return 1 // (i - 3)

        if many:
            Broken.__getitems__ = lambda self, ids: [self[i] for i in ids]
        with pytest.raises(DataError, match=r"sample of Broken must be readable.*ZeroDivision.*at sample 3") as info:
            as_source(Broken()).fetch(IDS)
        assert isinstance(info.value.__cause__, ZeroDivisionError)

    def test_samples_that_do_not_collate_are_reported(self):
        ragged = [(torch.zeros(i + 1),) for i in range(10)]
        with pytest.raises(DataError, match=r"samples of list must collate.*pass collate="):
            as_source(ragged).fetch(IDS)


class TestStreams:
    @pytest.mark.parametrize(
        "data",
        [Countdown(), {10 - i: 0 for i in range(10)}.keys(), lambda: (10 - i for i in range(10)), Countdown],
        ids=["dataset", "iterable", "function", "class"],
    )
    def test_stream_is_read_in_its_own_order_every_epoch(self, data):
        source = as_source(data)
        assert source.size is None
        feed = Feed(source, batch_size=4)
        for epoch in range(2):
            assert [batch.data.tolist() for batch in feed.epoch(Cursor(epoch, 0))] == [
                [10, 9, 8, 7],
                [6, 5, 4, 3],
                [2, 1],
            ]
        assert feed.num_steps() is None

    def test_stream_samples_are_fetched_by_position(self):
        assert as_source(Countdown()).fetch(IDS).tolist() == [3, 10, 7]

    def test_one_shot_iterators_are_rejected(self):
        with pytest.raises(DataError, match=r"more than once.*generator.*Pass a function that creates it"):
            as_source(i for i in range(3))

    def test_failing_sample_is_named_in_the_error(self):
        def numbers():
            yield from range(5)
            raise OSError("disk")

        with pytest.raises(DataError, match=r"sample of numbers.*OSError: disk at sample 5"):
            list(Feed(as_source(numbers), batch_size=4).epoch(Cursor()))

    def test_stream_random_draws_are_reproducible_and_keep_the_global_state(self):
        def noise():
            for _ in range(7):
                yield torch.rand(()) + np.random.rand()

        torch.manual_seed(1)
        before = torch.get_rng_state()
        one = torch.cat([b.data for b in Feed(as_source(noise), batch_size=3).epoch(Cursor(1, 0))])
        torch.rand(1)
        late = torch.cat([b.data for b in Feed(as_source(noise), batch_size=2).epoch(Cursor(1, 3))])
        other = next(Feed(as_source(noise), batch_size=7).epoch(Cursor(2, 0))).data
        assert torch.equal(one[3:], late)
        assert not torch.equal(one, other)
        torch.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), before)


class TestLoaders:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_data_loader_settings_are_taken_over(self, shuffle):
        loader = DataLoader(Squares(), batch_size=4, shuffle=shuffle, num_workers=2, collate_fn=len)
        source = as_source(loader)
        assert (source.batch_size, source.shuffle, source.workers) == (4, shuffle, 2)
        assert source.fetch(IDS) == 3

    def test_loader_shuffle_setting_overrides_the_feed_setting(self):
        assert ids_of(as_source(DataLoader(Squares(), batch_size=4)), shuffle=True) == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
        shuffled = ids_of(as_source(DataLoader(Squares(), batch_size=4, shuffle=True)), shuffle=False)
        assert shuffled == ids_of(as_source(Squares()), shuffle=True)

    def test_tensor_dataset_in_a_loader_is_read_as_arrays(self):
        assert as_source(DataLoader(TensorDataset(X, Y), batch_size=2)).max_workers == 0
        own = as_source(DataLoader(TensorDataset(X, Y), batch_size=2, collate_fn=len))
        assert own.fetch(IDS) == 3
        assert as_source(DataLoader([X, X, X], batch_size=2)).size == 3

    def test_custom_samplers_are_seeded_by_seed_and_epoch(self):
        for generator in (None, torch.Generator()):
            sampler = WeightedRandomSampler(torch.ones(10), 12, generator=generator)
            source = as_source(DataLoader(Squares(), batch_size=4, sampler=sampler))
            state = torch.get_rng_state()
            first, again, other = ids_of(source), ids_of(source), ids_of(source, epoch=1)
            assert first == again != other
            assert [len(ids) for ids in first] == [4, 4, 4]
            assert torch.equal(torch.get_rng_state(), state)

    def test_sampler_without_length_is_counted(self):
        class Evens(Sampler):
            def __iter__(self):
                return iter(range(0, 10, 2))

        source = as_source(DataLoader(Squares(), batch_size=4, sampler=Evens()))
        assert source.size == 5
        assert ids_of(source) == [[0, 2, 4, 6], [8]]

    def test_sampler_of_non_integers_is_rejected(self):
        source = as_source(DataLoader(Squares(), batch_size=2, sampler=["a", "b"]))
        with pytest.raises(DataError, match=r"integers.*list with"):
            ids_of(source)

    def test_standard_batch_sampler_is_read_as_batch_size_and_shuffle(self):
        for sampler, shuffle in ((RandomSampler(range(10)), True), (SequentialSampler(range(10)), False)):
            source = as_source(DataLoader(Squares(), batch_sampler=BatchSampler(sampler, 4, False)))
            assert (source.batch_size, source.shuffle) == (4, shuffle)

    def test_custom_batch_sampler_batches_are_kept(self):
        batches = [[1, 2, 3], [9], [4, 5]]
        source = as_source(DataLoader(Squares(), batch_sampler=batches))
        assert (source.size, source.batch_size) == (6, 3)
        feed = Feed(source, batch_size=3)
        assert feed.num_steps() == 3
        assert [batch.ids.tolist() for batch in feed.epoch(Cursor())] == batches
        assert [batch.ids.tolist() for batch in feed.epoch(Cursor(0, 2))] == [[3], [9], [4, 5]]

    def test_batch_sampler_with_changing_batches_is_rejected(self):
        class Unsteady:
            calls = 0

            def __iter__(self):
                self.calls += 1
                return iter([[self.calls]])

        with pytest.raises(DataError, match=r"same batches whenever it is iterated.*Unsteady"):
            as_source(DataLoader(Squares(), batch_sampler=Unsteady()))

    def test_loader_over_an_iterable_dataset_is_read_as_a_stream(self):
        source = as_source(DataLoader(Countdown(), batch_size=4))
        assert (source.size, source.batch_size) == (None, 4)
        assert next(Feed(source, batch_size=4).epoch(Cursor())).data.tolist() == [10, 9, 8, 7]

    @pytest.mark.parametrize("dataset", [Squares(), Countdown()])
    def test_loader_without_batch_size_is_rejected(self, dataset):
        with pytest.raises(DataError, match=r"must create the batches.*batch_size=None"):
            as_source(DataLoader(dataset, batch_size=None))

    def test_loader_with_distributed_sampler_is_rejected(self):
        sampler = DistributedSampler(Squares(), num_replicas=2, rank=0)
        with pytest.raises(DataError, match=r"global batches.*DistributedSampler.*Omit it"):
            as_source(DataLoader(Squares(), batch_size=2, sampler=sampler))


class TestFunctions:
    def test_function_may_return_any_kind_of_data(self):
        assert as_source(lambda: (X, Y)).size == 10
        assert as_source(Squares).size == 10
        assert as_source(lambda: DataLoader(Squares(), batch_size=3)).batch_size == 3

    def test_function_that_returns_no_data_is_rejected(self):
        with pytest.raises(DataError, match=r"must return data"):
            as_source(lambda: len)


@pytest.mark.parametrize("data", [3, None, "text", {"a": [1]}, torch.tensor(1.0), {}])
def test_unsupported_data_types_are_rejected(data):
    with pytest.raises(DataError):
        as_source(data)


class TestCheck:
    def test_check_source_returns_the_batch_size(self):
        assert check_source(as_source(X), 4) == 4
        assert check_source(as_source(DataLoader(Squares(), batch_size=5)), None) == 5
        assert check_source(as_source(DataLoader(Squares(), batch_size=5)), 5) == 5
        assert check_source(as_source(Countdown()), 500) == 500

    @pytest.mark.parametrize(
        ("data", "batch_size", "text"),
        [
            (X[:0], 4, "must have at least one sample, but got none in arrays"),
            (X, 11, "at least one batch, but got 10 samples for a batch of 11. Pass batch_size=10 or less"),
            (X, None, "batch_size is required for .*. Pass for example batch_size=32"),
            (DataLoader(Squares(), batch_size=5), 4, "must be equal, but got 4 and 5. Set only one"),
            ([], 4, "none in list"),
        ],
    )
    def test_check_source_rejects_invalid_data_or_batch_size(self, data, batch_size, text):
        with pytest.raises(DataError, match=text):
            check_source(as_source(data), batch_size)
