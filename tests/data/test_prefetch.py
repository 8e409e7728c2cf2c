"""Prefetching: a thread whose depth follows the waiting of the consumer."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from manyhands.data import Cursor, Feed, as_source
from manyhands.data.prefetch import DeviceCopy, Prefetcher


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "manyhands-prefetch"]


def slow(count, seconds):
    for i in range(count):
        time.sleep(seconds)
        yield i


def test_prefetcher_yields_all_items_in_order_and_stops():
    ahead = Prefetcher(iter(range(100)))
    assert list(ahead) == list(range(100))
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()
    assert not prefetch_threads()


def test_depth_doubles_while_the_consumer_waits():
    ahead = Prefetcher(slow(12, 0.005))
    assert list(ahead) == list(range(12))
    assert ahead.depth == 16
    assert ahead.waited > 0.03
    ahead.close()


def test_depth_is_unchanged_when_the_consumer_does_not_wait():
    ahead = Prefetcher(iter(range(10)))
    for _ in ahead:
        time.sleep(0.02)
    assert ahead.depth == 2
    ahead.close()


def test_depth_does_not_grow_beyond_available_memory():
    ahead = Prefetcher(slow(6, 0.005), has_memory=lambda item, depth: depth <= 4)
    assert len(list(ahead)) == 6
    assert ahead.depth == 4
    ahead.close()


def test_prefetcher_reads_at_most_depth_items_ahead():
    taken = []
    ahead = Prefetcher((taken.append(i) or i for i in range(50)), depth=3)
    time.sleep(0.05)
    assert taken == [0, 1, 2]
    next(ahead)
    time.sleep(0.05)
    assert taken == [0, 1, 2, 3]
    ahead.close()


def test_error_is_raised_after_the_preceding_items():
    def failing():
        yield 1
        raise OSError("disk")

    ahead = Prefetcher(failing())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk"):
        next(ahead)
    ahead.close()


def test_close_stops_the_thread_and_closes_the_iterator():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead = Prefetcher(endless())
    next(ahead)
    ahead.close()
    assert closed.is_set()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("data", [torch.arange(100), list(range(100))], ids=["arrays", "map"])
def test_feed_to_another_device_prefetches_all_batches(data):
    """The meta device has no streams: it takes the way of an accelerator without them."""
    feed = Feed(as_source(data), batch_size=8, device=torch.device("meta"), workers=1)
    batches = list(feed.epoch(Cursor()))
    assert sorted(i for batch in batches for i in batch.ids.tolist()) == list(range(100))
    assert all(batch.data.is_meta for batch in batches)
    assert not prefetch_threads()


def test_closing_a_feed_mid_epoch_stops_the_prefetch_thread():
    feed = Feed(as_source(torch.arange(100)), batch_size=8, device=torch.device("meta"))
    for _ in feed.epoch(Cursor()):
        break
    feed.close()
    assert not prefetch_threads()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("data", [torch.arange(100_000.0), list(range(2000))], ids=["arrays", "map"])
def test_batches_are_copied_to_cuda_intact(data):
    feed = Feed(as_source(data), batch_size=256, device=torch.device("cuda", 0), dtype=torch.float64)
    for epoch in range(2):
        for batch in feed.epoch(Cursor(epoch, 0)):
            assert batch.data.device.type == "cuda"
            assert batch.data.long().cpu().tolist() == batch.ids.tolist()


def test_wait_during_device_compute_counts_as_hidden():
    ahead = Prefetcher(slow(4, 0.02), is_idle=lambda: lambda: False)
    assert list(ahead) == [0, 1, 2, 3]
    assert ahead.hidden > 0.06
    assert ahead.waited == 0.0
    ahead.close()


def test_wait_is_counted_only_while_the_device_is_idle():
    def busy_for(seconds):
        until = time.perf_counter() + seconds
        return lambda: time.perf_counter() > until

    ahead = Prefetcher(slow(3, 0.05), is_idle=lambda: busy_for(0.02))
    list(ahead)
    assert ahead.hidden >= 0.06
    assert ahead.waited > 0.03
    ahead.close()


class FakeAccelerator:
    """Streams and events of a device that takes its time: a copy is done at the third look."""

    class Event:
        def __init__(self, enable_timing=False):
            self.looks = 0

        def record(self, stream=None):
            pass

        def query(self):
            self.looks += 1
            return self.looks > 2

        def elapsed_time(self, other):
            return 250.0

    class Stream:
        def __init__(self, device=None):
            pass

        def record_event(self):
            return FakeAccelerator.Event()

        def wait_event(self, event):
            pass

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device):
        return self.Stream()


def test_copies_are_timed_without_synchronizing():
    copy = DeviceCopy(torch.device("meta"), None)
    copy._module, copy._stream = FakeAccelerator(), FakeAccelerator.Stream()
    seconds = []
    for _ in range(5):
        copy.send(torch.zeros(3, device="meta"))
        seconds.append(copy.seconds)
    assert seconds == [0.0, 0.0, 0.25, 0.25, 0.5]
    idle = copy.when_idle()
    assert [idle() for _ in range(3)] == [False, False, True]


def test_copy_share_excludes_read_time():
    copy = DeviceCopy(torch.device("meta"), None)
    batches = Feed(as_source(torch.arange(40)), batch_size=4).epoch(Cursor())
    slowly = (time.sleep(0.005) or batch for batch in batches)
    assert len(list(copy.sent(slowly))) == 10
    assert 0 < copy.share < 0.5
