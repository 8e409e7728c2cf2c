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


# torch.manual_seed would also reseed the accelerators, whose generators belong to the network's dropout.
_SEED: list[Callable[[int], Any]] = [
    torch.default_generator.manual_seed,
    lambda seed: np.random.seed(seed & 0xFFFFFFFF),
    random.seed,
]


def seed_all(seed: int) -> None:
    """Seeds the three global generators of the CPU."""
    for set_seed in _SEED:
        set_seed(seed)


def _moved(a: States, b: States) -> set[int]:
    """Which of the three generators have drawn between two moments."""
    same = (
        torch.equal(a[0], b[0]),
        all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True)),
        a[2] == b[2],
    )
    return {which for which, is_same in enumerate(same) if not is_same}


class SampleRandomness:
    """Reads samples so that what each draws depends on (seed, epoch, sample) alone.

    Seeding costs microseconds a sample, so it is done only to generators that were seen to draw; the batch that
    showed it is then read again, seeded.
    """

    def __init__(self) -> None:
        self._drawn: set[int] = set()
        """Which of the three generators samples draw from."""

    def read(self, key: int, ids: Sequence[int], read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
        """The samples `ids`, by `read`; the global generators are left as they were."""
        before = capture()
        try:
            while True:
                samples = [self._seeded(key, i, read) for i in ids] if self._drawn else read(ids)
                new = _moved(before, capture()) - self._drawn
                if not new:
                    return samples
                self._drawn |= new
                restore(before)
        finally:
            if self._drawn:
                restore(before)

    def _seeded(self, key: int, i: int, read: Callable[[Sequence[int]], list[Any]]) -> Any:
        seed = mix(key, i)
        for which in self._drawn:
            _SEED[which](seed)
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
