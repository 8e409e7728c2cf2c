"""Random draws of datasets: a function of (seed, epoch, sample), without effect on the draws of other code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

_MASK = (1 << 64) - 1

States = list[Any]
"""The states of torch's, numpy's and Python's global generators."""

_GET: list[Callable[[], Any]] = [torch.default_generator.get_state, np.random.get_state, random.getstate]
_SET: list[Callable[[Any], Any]] = [torch.default_generator.set_state, np.random.set_state, random.setstate]
# torch.manual_seed would also reseed the accelerators, whose generators the network's dropout uses.
_SEED: list[Callable[[int], Any]] = [
    torch.default_generator.manual_seed,
    lambda seed: np.random.seed(seed & 0xFFFFFFFF),
    random.seed,
]
_EQUAL: list[Callable[[Any, Any], bool]] = [
    torch.equal,
    lambda a, b: a[2:] == b[2:] and bool((a[1] == b[1]).all()),
    lambda a, b: bool(a == b),
]


def mix(*parts: int) -> int:
    """Return a 64-bit hash of integers, which depends on their order (splitmix64, chained).

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    value = 0
    for part in parts:
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def capture() -> States:
    """Return the states of the global generators of torch (on the CPU), numpy and Python."""
    return [get() for get in _GET]


def restore(states: States) -> None:
    """Restore the global generators of torch (on the CPU), numpy and Python to the result of `capture`."""
    for put_back, state in zip(_SET, states, strict=True):
        put_back(state)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (on the CPU), numpy and Python."""
    for set_seed in _SEED:
        set_seed(seed)


class SampleRandomness:
    """Read samples so that the random draws of each sample depend on (seed, epoch, sample) alone.

    Seeding costs microseconds per sample, so only global generators from which the dataset draws are seeded. Which
    ones these are is detected at the first sample, which is read twice for that, or at a later batch, which is then
    read again.
    """

    def __init__(self) -> None:
        self._drawn: set[int] = set()
        """Indices in `_GET` of the generators from which the dataset draws."""
        self._is_tried = False
        self._of_worker: States | None = None

    def read(self, key: int, ids: Sequence[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        """Read the samples `ids` with the function `read`, and restore the global generators.

        `key` is a hash of the seed and the epoch.
        """
        if get_worker_info() is not None:
            # Nothing else in a worker draws from these generators: they need not be restored or captured again.
            self._of_worker = self._of_worker or capture()
            return self._read(key, ids, read, self._of_worker)
        before = capture()
        try:
            return self._read(key, ids, read, before)
        finally:
            if self._drawn:
                restore(before)

    def _read(
        self, key: int, ids: Sequence[int], read: Callable[[Sequence[int]], list[Any]], before: States
    ) -> list[Any]:
        if not self._is_tried:
            self._is_tried = True
            read(ids[:1])
            self._drawn |= self._moved(before)
        while True:
            samples = [self._seeded(key, i, read) for i in ids] if self._drawn else read(ids)
            new = self._moved(before)
            if not new:
                return samples
            self._drawn |= new

    def _moved(self, before: States) -> set[int]:
        """Return the indices of generators that differ from their states `before`, but were not known to draw."""
        others = [which for which in range(len(before)) if which not in self._drawn]
        return {which for which in others if not _EQUAL[which](before[which], _GET[which]())}

    def _seeded(self, key: int, i: int, read: Callable[[Sequence[int]], list[Any]]) -> Any:
        seed = mix(key, i)
        for which in self._drawn:
            _SEED[which](seed)
        return read([i])[0]


class OwnRandomness:
    """A context in which the global generators have states of its own, seeded once and continued at each entry."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._inside: States | None = None

    def __enter__(self) -> None:
        self._outside = capture()
        if self._inside is None:
            seed_all(self._key)
        else:
            restore(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = capture()
        restore(self._outside)
