"""Measure how much faster equal networks train as one vectorized program than one after another.

A step of k stacked networks takes a + b·k seconds: a to launch operations, and b for each network.
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
"""Numbers of networks in the ensembles that are measured."""
NUM_ROUNDS, NUM_BLOCKS = 4, 3
"""Number of steps that are timed together, and number of such measurements, whose median counts."""
LEAST = 0.01
"""Assumed minimum of the seconds that each network adds, relative to a step of the smaller ensemble."""
LONG_RUN = 1000
"""Number of steps for which a measured ensemble is created; too few for it to try compilation."""


@dataclass(frozen=True)
class Gain:
    """The speed-up by stacking networks, as a function of their number.

    A step of one network alone takes `alone` seconds, and a step of k stacked networks `start + each * k` seconds.

    >>> gain = Gain(alone=1.0, start=0.9, each=0.1)
    >>> round(gain(9), 3), round(gain.ceiling, 3)
    (5.0, 10.0)
    """

    alone: float
    start: float
    each: float

    def __call__(self, num_members: int) -> float:
        """Return the speed-up of stacking `num_members` networks over training them one after another."""
        return num_members * self.alone / (self.start + num_members * self.each)

    @property
    def ceiling(self) -> float:
        """The limit of the speed-up as the number of networks grows."""
        return self.alone / self.each


def gain(task: Task, strategy: StrategySpec | None = None, *, device: Any = None) -> Gain:
    """Measure the speed-up by stacking networks like that of `task`, on one device.

    It times a few steps of two small ensembles, and of the task alone.
    """
    times = [_round_seconds(task, size, strategy, device) for size in SIZES]
    # Measurement noise must not make the cost of a network zero or negative.
    each = max((times[1] - times[0]) / (SIZES[1] - SIZES[0]), LEAST * times[0])
    return Gain(alone=_alone_seconds(task, strategy, device), start=max(0.0, times[0] - each * SIZES[0]), each=each)


def _round_seconds(task: Task, size: int, strategy: StrategySpec | None, device: Any) -> float:
    members = [task.replace(seed=task.seed + number, valid=None) for number in range(size)]
    with Population(members, strategy, device=device, steps=LONG_RUN) as population:
        # On a GPU, the first steps run eagerly or warm up the capture, so they are not timed.
        population.step(NUM_ROUNDS)
        return _best(population, lambda: population.step(NUM_ROUNDS))


def _alone_seconds(task: Task, strategy: StrategySpec | None, device: Any) -> float:
    """Return the seconds of a step of one network, in an ensemble of one or in a plain loop (on a CPU, if faster)."""
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
    """Return the median seconds of one step, where `work` takes NUM_ROUNDS steps of the population's networks."""
    times = []
    for _ in range(NUM_BLOCKS):
        began = time.perf_counter()
        work()
        if population.device.type == "cuda":
            torch.cuda.synchronize(population.device)
        times.append((time.perf_counter() - began) / NUM_ROUNDS)
    return median(times)
