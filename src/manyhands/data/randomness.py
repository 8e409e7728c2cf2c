"""Randomness of datasets: a function of (seed, epoch, sample), and invisible to everybody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1

States = tuple[torch.Tensor, Any, Any]
"""The states of torch's, numpy's and Python's global generators."""


def mix(*parts: int) -> int:
    """A well-mixed 64-bit number from whole numbers (splitmix64, chained).

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
    """The states of the three global generators."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def restore(states: States) -> None:
    """Puts the three global generators back."""
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def seed_all(seed: int) -> None:
    """Seeds the three global generators of the CPU."""
    # torch.manual_seed would also reseed the accelerators, whose generators belong to the network's dropout.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _equal(a: States, b: States) -> bool:
    return (
        torch.equal(a[0], b[0]) and a[2] == b[2] and all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    )


class SampleRandomness:
    """Reads samples so that what each draws depends on (seed, epoch, sample) alone.

    Seeding costs microseconds a sample, so it is done only once a batch was seen to draw; that batch is then
    read again, seeded.
    """

    def __init__(self) -> None:
        self.draws = False

    def read(self, key: int, ids: Sequence[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        """The samples `ids`, by `read`; the global generators are left as they were."""
        before = capture()
        if not self.draws:
            samples = read(ids)
            if _equal(before, capture()):
                return samples
            self.draws = True
        try:
            return [self._seeded(key, i, read) for i in ids]
        finally:
            restore(before)

    @staticmethod
    def _seeded(key: int, i: int, read: Callable[[Sequence[int]], list[Any]]) -> Any:
        seed_all(mix(key, i))
        return read([i])[0]


class OwnRandomness:
    """A context whose draws come from generators of its own, continued each time it is entered."""

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
