"""Measure how much faster similar networks train as one vectorized program than one after another.

A round of k networks takes a + b·k: the cost of launching operations, and the cost that each network adds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..core import Mean, StrategySpec, Task
from ..data import Cursor, Feed, as_source, check_source
from .build import build
from .population import Population

SIZES = (2, 8)
"""Sizes of the ensembles that are measured."""
NUM_ROUNDS, NUM_BLOCKS = 4, 3
LEAST = 0.01
LONG_RUN = 1000
"""Number of steps given to an ensemble: too few to start a trial of compiled steps."""


@dataclass(frozen=True)
class Gain:
    """Seconds of a step of one network alone, and of a round of k networks: `start + each * k`.

    >>> gain = Gain(alone=1.0, start=0.9, each=0.1)
    >>> round(gain(9), 3), round(gain.ceiling, 3)
    (5.0, 10.0)
    """

    alone: float
    start: float
    each: float

    def __call__(self, num_members: int) -> float:
        """Return the speedup of `num_members` networks over training them one after another; below 1 is a slowdown."""
        return num_members * self.alone / (self.start + num_members * self.each)

    @property
    def ceiling(self) -> float:
        """The limit of the speedup for any number of networks."""
        return self.alone / self.each


def gain(task: Task, strategy: StrategySpec | None = None, *, device: Any = None) -> Gain:
    """Measure a few rounds of small ensembles of a task, and steps of the task alone, on one device."""
    times = [_round_seconds(task, size, strategy, device) for size in SIZES]
    # Measurement noise must not make the cost of a network zero or negative.
    each = max((times[1] - times[0]) / (SIZES[1] - SIZES[0]), LEAST * times[0])
    return Gain(alone=_alone_seconds(task, strategy, device), start=max(0.0, times[0] - each * SIZES[0]), each=each)


def _round_seconds(task: Task, size: int, strategy: StrategySpec | None, device: Any) -> float:
    members = [task.replace(seed=task.seed + number, valid=None) for number in range(size)]
    with Population(members, strategy, device=device, steps=LONG_RUN) as population:
        # On a GPU the first rounds run eagerly, and the next one warms up the capture.
        population.step(NUM_ROUNDS)
        return _best(population, lambda: population.step(NUM_ROUNDS))


def _alone_seconds(task: Task, strategy: StrategySpec | None, device: Any) -> float:
    """Return the seconds of a step in a plain loop, or in an ensemble of one if its captured step is faster."""
    with Population([task.replace(valid=None)], strategy, device=device, steps=LONG_RUN) as population:
        population.step(NUM_ROUNDS)
        stacked = _best(population, lambda: population.step(NUM_ROUNDS))
    if population.device.type != "cpu":
        return stacked
    model: Any = build(task).model
    optimizer: Any = task.make_optimizer(model)
    source = as_source(task.data, collate=task.collate)
    feed = Feed(source, batch_size=check_source(source, task.batch_size), device=population.device)
    batch = next(feed.epoch(Cursor()))
    assert task.loss is not None
    loss = task.loss

    def steps() -> None:
        for _ in range(NUM_ROUNDS):
            value = loss(model, batch.data)
            (value.total / value.count if isinstance(value, Mean) else value).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    feed.close()
    return min(stacked, _best(population, steps))


def _best(population: Population, work: Any) -> float:
    """Return the seconds of one round."""
    times = []
    for _ in range(NUM_BLOCKS):
        began = time.perf_counter()
        work()
        if population.device.type == "cuda":
            torch.cuda.synchronize(population.device)
        times.append((time.perf_counter() - began) / NUM_ROUNDS)
    return median(times)
