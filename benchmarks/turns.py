"""Turns: a host loop and its guests train in one process, a block of steps each, so that all meet the same noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from time import perf_counter

Guest = Generator[None, None, None]
"""A loop that yields after every step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the contenders train."""

    block: int
    """Steps of one turn."""
    rounds: int
    """Turns of each contender that count."""
    warm_up: int
    """Steps before the first turn that counts."""

    @property
    def num_steps(self) -> int:
        """Steps that each contender takes."""
        return self.warm_up + self.block * self.rounds


class Turns:
    """Called after every step of the host; when its block is over, the guests take theirs, in a random order.

    The host's clock does not advance during it. Every rank draws the same order, so collectives stay matched.
    """

    def __init__(
        self,
        host: str,
        guests: Mapping[str, Guest],
        plan: Plan,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self._host, self._guests, self._plan, self._barrier = host, dict(guests), plan, barrier
        self._order = random.Random(0)
        self._left = plan.warm_up
        self._warm = False
        self._began = 0.0
        self.times: dict[str, list[float]] = {name: [] for name in (host, *guests)}
        """Seconds per step of every turn, by contender."""

    def tick(self) -> None:
        """The host took a step."""
        self._left -= 1
        if self._left:
            return
        if self._warm:
            self._note(self._host, perf_counter() - self._began)
        for name in self._order.sample(list(self._guests), len(self._guests)):
            self._advance(name)
        self._warm, self._left = True, self._plan.block
        self._barrier()
        self._began = perf_counter()

    def close(self) -> None:
        """Lets the guests go; those that hold a process group must go before it does."""
        for guest in self._guests.values():
            guest.close()
        self._guests.clear()

    def _advance(self, name: str) -> None:
        guest = self._guests[name]
        self._barrier()
        began = perf_counter()
        for _ in range(self._plan.block if self._warm else self._plan.warm_up):
            next(guest)
        if self._warm:
            self._note(name, perf_counter() - began)

    def _note(self, name: str, seconds: float) -> None:
        self.times[name].append(seconds / self._plan.block)
