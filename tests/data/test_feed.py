"""The feed: each replica's samples, none lost or repeated, with layout-free randomness."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from manyhands.core import DataError
from manyhands.data import Cursor, Feed, as_source

SIZE = 37


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return torch.tensor(i)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(i) for i in range(SIZE))


class Noisy(Numbers):
    """Draws from all three global generators."""

    def __getitem__(self, i):
        return i + torch.rand(()).double() + np.random.rand() + random.random()


KINDS = {
    "arrays": lambda: torch.arange(SIZE),
    "map": Numbers,
    "iterable": Stream,
    "loader": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True),
    "sampler": lambda: DataLoader(Numbers(), batch_size=8, sampler=torch.randperm(SIZE).tolist()),
    "batches": lambda: DataLoader(Numbers(), batch_sampler=[[i, i + 1] for i in range(0, SIZE - 1, 2)] + [[36]]),
}


def feeds(source, num_replicas, **settings):
    return [Feed(source, replica=r, num_replicas=num_replicas, **settings) for r in range(num_replicas)]


def steps(source, num_replicas, cursor=Cursor(), **settings):  # noqa: B008 (frozen)
    """The batches of all replicas, step by step."""
    runs = [feed.epoch(cursor) for feed in feeds(source, num_replicas, **settings)]
    return list(zip(*runs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_changing_the_layout_neither_repeats_nor_skips_samples(kind, data):
    source, cursor = as_source(KINDS[kind]()), Cursor(epoch=data.draw(st.integers(0, 3)))
    seen: Counter[int] = Counter()
    while True:
        num_replicas = data.draw(st.integers(1, 5))
        layout = {"batch_size": data.draw(st.integers(1, 12)), "accumulate": data.draw(st.integers(1, 4))}
        done = steps(source, num_replicas, cursor, **layout)[: data.draw(st.integers(1, 4))]
        if not done:
            break
        for step in done:
            for batch in step:
                seen.update(batch.ids.tolist())
                if batch.num_samples:
                    assert batch.data.tolist() == batch.ids.tolist()
            assert len({batch.cursor for batch in step}) == 1
            assert sum(batch.num_samples for batch in step) == step[0].global_samples
        cursor = Cursor.from_dict(done[-1][0].cursor.to_dict())
    assert seen == Counter(range(SIZE))
    assert cursor.position == SIZE


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_micro_batches_are_independent_of_the_replica_count(num_replicas, accumulate):
    def micros(replicas):
        """For each step, the samples of each micro-batch over all replicas."""
        found = []
        for step in steps(source, replicas, batch_size=10, accumulate=accumulate):
            parts = [list(batch.micros()) for batch in step]
            found.append([[x for data, n, _ in micro for x in data[:n].tolist()] for micro in zip(*parts, strict=True)])
        return found

    source = as_source(torch.arange(SIZE))
    found = micros(num_replicas)
    assert found == micros(1)
    order = source.order(0, 0, True)
    for number, step in enumerate(found):
        ids = order[number * 10 : number * 10 + 10]
        assert step == [part.tolist() for part in np.array_split(ids, min(accumulate, len(ids)))]


def test_last_partial_batch_is_kept():
    feed = Feed(as_source(torch.arange(SIZE)), batch_size=10)
    assert [batch.num_samples for batch in feed.epoch(Cursor())] == [10, 10, 10, 7]
    assert feed.num_steps() == 4


def test_replica_without_samples_gets_padding_rows():
    step = steps(as_source((torch.arange(5) + 100, torch.zeros(5, 3))), 4, batch_size=5, accumulate=2, shuffle=False)[0]
    assert [batch.sizes for batch in step] == [(1, 1), (1, 1), (1, 0), (0, 0)]
    assert {batch.global_sizes for batch in step} == {(3, 2)}
    third, fourth = list(step[2].micros()), list(step[3].micros())
    assert [(data[0].tolist(), n, total) for data, n, total in third] == [([102], 1, 3), ([102], 0, 2)]
    assert [(data[0].tolist(), n, total) for data, n, total in fourth] == [([100], 0, 3), ([100], 0, 2)]
    assert step[3].ids.tolist() == []
    assert step[3].num_samples == 0


def test_fewer_samples_than_micro_batches_reduce_the_micro_batch_count():
    batch = next(Feed(as_source(torch.arange(2)), batch_size=8, accumulate=4).epoch(Cursor()))
    assert batch.global_sizes == (1, 1)


def test_resuming_at_the_end_of_an_epoch_yields_no_batches():
    for make in KINDS.values():
        assert list(Feed(as_source(make()), batch_size=4).epoch(Cursor(0, SIZE))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_peek_returns_the_first_samples(kind):
    feed = Feed(as_source(KINDS[kind]()), batch_size=8, seed=2)
    first = next(feed.epoch(Cursor())).data
    assert feed.peek(2).tolist() == first[:2].tolist()


def test_floats_are_cast_on_request():
    feed = Feed(as_source((torch.zeros(4), torch.arange(4))), batch_size=2, dtype=torch.float64)
    x, y = next(feed.epoch(Cursor())).data
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)


@pytest.mark.parametrize("name", ["batch_size", "num_replicas", "accumulate"])
def test_counts_below_one_are_rejected(name):
    with pytest.raises(DataError, match=f"{name} must be at least 1, but got 0"):
        Feed(as_source(torch.arange(4)), **{"batch_size": 2, name: 0})


class TestRandomness:
    def values(self, num_replicas=1, workers=0, cursor=Cursor(1, 0), source=None, **settings):  # noqa: B008
        found = {}
        settings = {"batch_size": 10, "seed": 3, "workers": workers} | settings
        for step in steps(source or as_source(Noisy()), num_replicas, cursor, **settings):
            for batch in step:
                found.update(zip(batch.ids.tolist(), batch.data.tolist(), strict=False))
        return found

    def test_random_augmentation_is_independent_of_replicas_workers_and_batch_size(self):
        expected = self.values()
        assert len(expected) == SIZE
        assert self.values(num_replicas=3) == expected
        assert self.values(workers=2) == expected
        assert self.values(batch_size=7, accumulate=2) == expected
        assert self.values(cursor=Cursor(1, 10)).items() < expected.items()

    def test_random_augmentation_depends_on_seed_and_epoch(self):
        expected = self.values()
        for other in (self.values(cursor=Cursor(2, 0)), self.values(seed=4)):
            assert all(other[i] != expected[i] for i in expected)

    def test_random_draws_by_only_some_samples_are_reproducible(self):
        class Late(Numbers):
            def __getitem__(self, i):
                return torch.rand(()) if i % 9 == 0 else torch.tensor(float(i))

        expected = self.values(source=as_source(Late()), batch_size=3)
        assert self.values(source=as_source(Late()), num_replicas=3) == expected

    @pytest.mark.parametrize("workers", [0, 2])
    def test_global_random_generators_keep_their_state(self, workers):
        states = (
            torch.get_rng_state(),
            np.random.get_state()[1].copy(),
            np.random.get_state()[2],
            random.getstate(),
        )
        self.values(workers=workers)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1])
        assert np.random.get_state()[2] == states[2]
        assert random.getstate() == states[3]

    def test_random_sampler_with_random_dataset_is_independent_of_replicas(self):
        sampler = WeightedRandomSampler(torch.ones(SIZE), 20, replacement=False)
        loader = DataLoader(Noisy(), batch_size=5, sampler=sampler)
        assert self.values(source=as_source(loader)) == self.values(source=as_source(loader), num_replicas=2)


class Broken(Numbers):
    def __getitem__(self, i):
        if i == 23:
            raise OSError("torn page")
        return torch.tensor(i)


class Deadly(Numbers):
    def __getitem__(self, i):
        if i == 23:
            import os

            os._exit(9)
        return torch.tensor(i)


class TestWorkers:
    @pytest.mark.parametrize("kind", ["map", "iterable", "sampler"])
    def test_workers_yield_the_same_batches_in_the_same_order(self, kind):
        def read(workers):
            feed = Feed(source, batch_size=4, replica=1, num_replicas=2, workers=workers)
            return [(b.ids.tolist(), b.data.tolist(), b.sizes, b.cursor) for b in feed.epoch(Cursor(0, 5))]

        source = as_source(KINDS[kind]())
        assert read(2) == read(0)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_failing_sample_is_named_in_the_error(self, workers):
        feed = Feed(as_source(Broken()), batch_size=4, workers=workers)
        with pytest.raises(DataError, match=r"every sample of Broken.*OSError: torn page at sample 23") as info:
            list(feed.epoch(Cursor()))
        assert isinstance(info.value.__cause__, OSError)

    def test_exited_worker_process_raises_data_error(self):
        feed = Feed(as_source(Deadly()), batch_size=4, workers=1, shuffle=False)
        with pytest.raises(DataError, match=r"that read Deadly must not exit.*workers=0"):
            list(feed.epoch(Cursor()))

    def test_more_workers_than_cores_give_one_notice_and_no_warnings_of_torch(self, monkeypatch):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
        feed = Feed(as_source(Numbers()), batch_size=4, workers=2)
        for epoch in range(2):
            list(feed.epoch(Cursor(epoch, 0)))
        assert "2 worker processes read the data on 1 core, which is rarely faster than 1" in feed.crowding()
        assert Feed(as_source(Numbers()), batch_size=4, workers=1).crowding() == ""

    def test_worker_does_not_destroy_garbage_of_the_trainer(self, tmp_path):
        """The destructor of an earlier process group waits for threads that a forked process does not have."""

        class Group:
            def __init__(self):
                self.cycle = self

            def __del__(self):
                (tmp_path / str(os.getpid())).touch()

        class Collecting(Numbers):
            def __getitem__(self, i):
                gc.collect()
                return super().__getitem__(i)

        gc.disable()
        try:
            Group()
            feed = Feed(as_source(Collecting()), batch_size=4, workers=1, shuffle=False)
            assert len(list(feed.epoch(Cursor()))) == 10
            feed.close()
        finally:
            gc.enable()
        gc.collect()
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]

    def test_number_of_workers_follows_the_source_and_the_argument(self):
        assert Feed(as_source(Numbers()), batch_size=4).workers == 0
        assert Feed(as_source(Numbers()), batch_size=4, workers=3).workers == 3
        assert Feed(as_source(Stream()), batch_size=4, workers=3).workers == 1
        assert Feed(as_source(torch.arange(4)), batch_size=4, workers=3).workers == 0
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
        assert Feed(as_source(loader), batch_size=4).workers == 2
        assert Feed(as_source(loader), batch_size=4, workers=0).workers == 0
        assert 1 <= Feed(as_source(Numbers()), batch_size=4, device=torch.device("meta")).workers <= 4


class TestWaiting:
    def test_slow_dataset_is_reported_as_input_limit(self):
        class Slow(Numbers):
            def __getitem__(self, i):
                time.sleep(0.002)
                return torch.tensor(i)

        feed = Feed(as_source(Slow()), batch_size=4)
        list(feed.epoch(Cursor()))
        assert feed.waited > 0.07
        assert feed.limit == "input"

    def test_slow_consumer_is_reported_as_compute_limit(self):
        feed = Feed(as_source(torch.arange(8)), batch_size=4)
        for _ in feed.epoch(Cursor()):
            time.sleep(0.3)
        assert feed.limit == "compute"


@pytest.mark.parametrize("workers", [0, 1])
def test_close_ends_the_running_epoch(workers):
    feed = Feed(as_source(Numbers()), batch_size=4, workers=workers)
    batches = feed.epoch(Cursor())
    next(batches)
    feed.close()
    assert list(batches) == []
