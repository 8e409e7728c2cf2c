"""Bottleneck of a feed, and the choice of its number of workers, without losing a batch."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import Dataset

from manyhands.data import Cursor, Feed, adaptation, as_source
from manyhands.data.adaptation import STRETCH_BATCHES, Adaptation
from manyhands.data.feed import FeedTiming

SIZE = 640


class Slow(Dataset):
    """Waits for something else than a core, as a disk or a network makes one wait."""

    def __init__(self, seconds=0.002):
        self.seconds = seconds

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.tensor(i)


def stretch(adaptation, workers, *, waited, computed=0.03):
    """The first answer to a stretch of equal batches, None where there is none."""
    found = None
    while found is None and not adaptation.settled:
        before = len(adaptation._seconds)
        found = adaptation.after(waited=waited, computed=computed, workers=workers)
        if before >= STRETCH_BATCHES - 1:
            return found
    return found


class TestAdaptation:
    def test_worker_count_is_chosen_so_that_reading_keeps_up_with_compute(self):
        assert stretch(Adaptation(most=16), 0, waited=0.09) == 3
        assert stretch(Adaptation(most=16), 2, waited=0.03) == 4
        assert stretch(Adaptation(most=3), 0, waited=1.0) == 3
        assert stretch(Adaptation(most=3), 0, waited=1.0, computed=0.0) == 3

    def test_worker_count_grows_while_it_reduces_the_wait(self):
        adaptation = Adaptation(most=6)
        assert stretch(adaptation, 0, waited=0.06) == 2
        assert stretch(adaptation, 2, waited=0.03) == 4
        assert stretch(adaptation, 4, waited=0.01) == 6
        assert stretch(adaptation, 6, waited=0.0008) is None

    def test_ineffective_increase_is_reverted_and_retried_with_backoff(self):
        adaptation = Adaptation(most=6)
        rests = []
        for _ in range(3):
            rests.append(0)
            while stretch(adaptation, 0, waited=0.06) is None:
                rests[-1] += 1
            assert stretch(adaptation, 2, waited=0.0595) == 0
        assert rests == [0, 4, 24]

    def test_user_chosen_worker_count_is_not_adapted(self):
        assert stretch(Adaptation(most=6, settled=True), 0, waited=0.5) is None

    def test_worker_count_is_unchanged_without_input_wait(self):
        adaptation = Adaptation(most=6)
        assert stretch(adaptation, 0, waited=0.0008) is None
        assert not adaptation.settled
        # Input may become the limit later, when the network does less.
        assert stretch(adaptation, 0, waited=0.03) == 1

    def test_pause_of_the_consumer_does_not_change_the_worker_count(self):
        adaptation = Adaptation(most=1)
        assert stretch(adaptation, 0, waited=0.05) == 1
        for number in range(STRETCH_BATCHES + 4):
            found = adaptation.after(waited=0.01, computed=9.0 if number == 10 else 0.03, workers=1)
        assert found is None
        assert not adaptation.settled

    def test_worker_count_does_not_exceed_the_maximum(self):
        assert stretch(Adaptation(most=0), 0, waited=0.5) is None


@pytest.fixture
def quick(monkeypatch):
    """Short stretches, and as many cores as these tests want."""
    monkeypatch.setattr(adaptation, "STRETCH_BATCHES", 5)
    monkeypatch.setattr(adaptation, "STRETCH_SECONDS", 0.02)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))


class TestFeed:
    @pytest.mark.usefixtures("quick")
    @pytest.mark.parametrize("start", [0, 37])
    def test_adding_workers_mid_epoch_keeps_batches_and_order(self, start):
        feed = Feed(as_source(Slow()), batch_size=5, replica=0, num_replicas=1, seed=4)
        steady = Feed(as_source(Slow(0)), batch_size=5, workers=0, seed=4)
        numbers, batches = [], []
        for batch in feed.epoch(Cursor(0, start)):
            numbers.append(feed.workers)
            batches.append((batch.data.tolist(), batch.ids.tolist(), batch.cursor))
        assert batches == [(b.data.tolist(), b.ids.tolist(), b.cursor) for b in steady.epoch(Cursor(0, start))]
        assert numbers[0] == 0
        assert max(numbers) >= 2

    @pytest.mark.usefixtures("quick")
    def test_feed_can_be_closed_while_it_adapts(self):
        feed = Feed(as_source(Slow()), batch_size=5)
        positions = []
        for batch in feed.epoch(Cursor()):
            positions.append(batch.cursor.position)
            if feed.workers:
                feed.close()
        assert 0 < positions[-1] < SIZE

    @pytest.mark.usefixtures("quick")
    def test_explicit_worker_count_of_a_feed_is_kept(self):
        feed = Feed(as_source(Slow(0.001)), batch_size=5, workers=0)
        assert {feed.workers for _ in feed.epoch(Cursor())} == {0}

    def test_copy_time_is_measured_separately_from_read_time(self):
        feed = Feed(as_source(torch.zeros(400, 20_000)), batch_size=200, dtype=torch.float64)
        list(feed.epoch(Cursor()))
        assert feed.pace.copy > 0
        assert feed.waited == feed.pace.copy + feed.pace.input

    def test_timing_summary_names_the_bottleneck(self):
        feed = Feed(as_source(Slow(0.001)), batch_size=64, workers=0)
        list(feed.epoch(Cursor()))
        assert feed.limit == "input"
        assert "input is the bottleneck" in feed.describe_limit()
        assert "this process reads" in feed.describe_limit()
        assert FeedTiming(compute=1.0).describe_limit(2) == ""
        assert FeedTiming(compute=1.0, copying=0.9).limit == "copy"
        assert "copying to the device is the bottleneck" in FeedTiming(compute=1.0, copying=0.9).describe_limit(2)
