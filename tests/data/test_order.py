"""The order of an epoch is a permutation, well shuffled, and the same however it is read."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.data import Order


def whole(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Order(size, seed, epoch, shuffle=True)[:]


@pytest.mark.parametrize("sizes", [range(1, 301), [997, 7919, 65_535, 65_536, 65_537, 104_729], [10**6]])
def test_order_is_a_permutation(sizes):
    for size in sizes:
        assert np.array_equal(np.sort(whole(size)), np.arange(size)), size


def test_order_without_shuffle_is_the_identity():
    order = Order(10, 3, 4, shuffle=False)
    assert order[2:7].tolist() == [2, 3, 4, 5, 6]
    assert order[np.array([9, 0])].tolist() == [9, 0]


def test_order_differs_between_seeds_and_epochs():
    orders = [whole(1000, seed, epoch) for seed in range(4) for epoch in range(4)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.02
    assert np.array_equal(whole(1000, 2, 3), whole(1000, 2, 3))


@pytest.mark.parametrize("size", [1000, 4096, 60_000])
def test_order_is_statistically_shuffled(size):
    order, positions = whole(size), np.arange(size)
    # |i - j| of two uniform draws has mean n/3; neighbours and positions are uncorrelated.
    assert abs(np.abs(order - positions).mean() / size - 1 / 3) < 0.03
    assert abs(np.corrcoef(order, positions)[0, 1]) < 4 / np.sqrt(size)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / np.sqrt(size)
    assert (np.abs(np.diff(order)) == 1).mean() < 10 / size + 0.002


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17])
def test_small_orders_are_uniformly_distributed_over_epochs(size):
    epochs = 2000
    seen = np.zeros((size, size))
    for epoch in range(epochs):
        seen[np.arange(size), whole(size, 5, epoch)] += 1
    expected = epochs / size
    assert np.abs(seen - expected).max() < 5 * np.sqrt(expected)


def test_random_access_equals_sequential():
    size = 150_000
    order = Order(size, 7, 1, shuffle=True)
    everything = order[:]
    positions = np.random.default_rng(0).integers(0, size, 1000)
    assert np.array_equal(order[positions], everything[positions])
    for start in (0, 65_000, 131_000, size - 10, size, size + 5):
        assert np.array_equal(order[start : start + 1000], everything[start : start + 1000])


def test_order_of_a_trillion_samples_needs_no_memory():
    order = Order(10**12, 0, 0, shuffle=True)
    assert len(np.unique(order[10**11 : 10**11 + 100])) == 100


def test_modifying_returned_ids_does_not_change_the_order():
    order = Order(10, 0, 0, shuffle=True)
    before = order[:5].copy()
    order[:5][:] = -1
    assert np.array_equal(order[:5], before)
