"""Batches from worker processes: complete, in order, of every kind, also when they exceed the shared memory."""

from __future__ import annotations

import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from manyhands.data import Cursor, Feed, as_source, worker_memory
from manyhands.data.collate import Fields
from manyhands.data.worker_memory import SLOTS, PackedBatch, WorkerSlots

Pair = namedtuple("Pair", "x y")


def batch_of(number):
    return {
        "float": torch.full((100, 7), float(number)),
        "bf16": torch.full((400,), float(number), dtype=torch.bfloat16),
        "bool": torch.ones(600, dtype=torch.bool),
        "complex": torch.full((90,), 1j * number),
        "turned": torch.arange(600.0).view(20, 30).t() + number,
        "empty": torch.empty(0, 3),
        "small": torch.tensor([number]),
        "array": np.full((50, 20), number),
        "pair": Pair(torch.zeros(200) + number, "text"),
        "fields": Fields({"x": torch.full((9, 30), number)}, {"x": torch.arange(9)}),
        "grad": torch.full((200,), float(number), requires_grad=True),
    }


def assert_equal(found, number):
    for key, wanted in batch_of(number).items():
        value = found[key]
        assert type(value) is type(wanted)
        if isinstance(wanted, torch.Tensor):
            assert value.dtype == wanted.dtype
            assert torch.equal(value, wanted)
    assert np.array_equal(found["array"], batch_of(number)["array"])
    assert found["pair"].y == "text"
    assert torch.equal(found["pair"].x, torch.zeros(200) + number)
    assert found["fields"].lengths("x").tolist() == list(range(9))


def test_batch_through_shared_memory_is_equal_and_not_aliased():
    slots = WorkerSlots(num_workers=2)
    packed = slots.put(batch_of(3), worker=1)
    assert isinstance(packed, PackedBatch)
    assert len(packed.body) < 6000
    found = slots.take(packed)
    for number in range(4, 4 + SLOTS):
        assert_equal(slots.take(slots.put(batch_of(number), worker=1)), number)
    assert_equal(found, 3)
    found["float"].add_(1)
    found["array"] += 1
    found["small"].add_(1)
    assert_equal(slots.take(slots.put(batch_of(3), worker=1)), 3)


def test_slots_are_not_overwritten_before_they_are_reused():
    slots = WorkerSlots(num_workers=1)
    packed_items = [slots.put(batch_of(number), worker=0) for number in range(SLOTS)]
    for number, packed in enumerate(packed_items):
        assert_equal(slots.take(packed), number)


class Rows(Dataset):
    """Rows of many sizes, some of which do not fit into a slot."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        return torch.full((50 if i // 4 % 3 else 4000,), i), np.full(64, i, np.float32)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("slow", ["reader", "consumer"])
def test_batches_larger_than_a_slot_arrive_intact_and_in_order(monkeypatch, workers, slow):
    monkeypatch.setattr(worker_memory, "SLOT_BYTES", 4096)
    feed = Feed(as_source(Rows()), batch_size=4, workers=workers, shuffle=False)
    kept = []
    for number, batch in enumerate(feed.epoch(Cursor())):
        time.sleep(0.005 if slow == "consumer" else 0)
        assert batch.ids.tolist() == list(range(4 * number, 4 * number + 4))
        kept.append(batch)
    assert len(kept) == 24
    for batch in kept:
        first, second = batch.data
        assert torch.equal(first, batch_ids(batch).expand(first.shape[1], 4).t())
        assert torch.equal(second, batch_ids(batch).float().expand(64, 4).t())


def batch_ids(batch):
    return torch.from_numpy(batch.ids)
