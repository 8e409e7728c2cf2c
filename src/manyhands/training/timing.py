"""Timing: take a few steps of a task as `fit` does, without saving anything; gradients at two batch sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ..capture import own_stream
from ..core import Mean, StrategySpec, Task
from ..data import Batch, check_source, first_dim, source_of
from ..distributed import World
from .hand import Hand
from .sampling import Sample, StepTimer
from .step import take_step
from .stepping import Stepper

WARMUP = 3
"""Steps that are not counted; on a GPU the step is captured in them."""
LEAST, MOST = 2, 20
"""Minimum and maximum number of counted steps."""


def time_steps(
    world: World, task: Task, spec: StrategySpec, *, batch_size: int | None = None, budget: float = 1.0
) -> list[float]:
    """Return the seconds of some steps after the warm-up, input included; as many steps as the budget allows."""
    with own_stream(world.device):
        return _time_steps(world, task, spec, batch_size, budget)


def _time_steps(world: World, task: Task, spec: StrategySpec, batch_size: int | None, budget: float) -> list[float]:
    hand = Hand(world, spec)
    try:
        hand.build(task)
        hand.reader.seed(task.seed)
        source = source_of(task)
        size = check_source(source, task.batch_size) if batch_size is None else batch_size
        feed = hand.reader.make_feed(source, size, shuffle=task.shuffle, seed=task.seed, workers=task.workers)
        stepper = Stepper(hand, task, WARMUP + MOST)
        seconds: list[float] = []
        wanted = WARMUP + LEAST
        try:
            while len(seconds) < wanted:
                before = time.perf_counter()
                for batch in hand.reader.one_epoch(feed):
                    if batch.global_samples < size and seconds:
                        continue  # the last batch of an epoch may be smaller
                    stepper.take(batch)
                    _finish(hand.device)
                    now = time.perf_counter()
                    seconds.append(now - before)
                    if len(seconds) == WARMUP:
                        wanted = WARMUP + _agreed(world, budget / seconds[-1])
                        now = time.perf_counter()
                    before = now
                    if len(seconds) >= wanted:
                        break
        finally:
            stepper.close()
            feed.close()
        return seconds[WARMUP:]
    finally:
        hand.close()


class Steps:
    """Takes a task's steps on one rank, one after another over whole batches, without saving anything."""

    def __init__(self, world: World, task: Task, spec: StrategySpec) -> None:
        self.hand, self._task = Hand(world, spec), task
        self.hand.build(task)
        self.hand.reader.seed(task.seed)
        source = source_of(task)
        self.batch_size, self.num_samples = check_source(source, task.batch_size), source.size
        self.feed = self.hand.reader.make_feed(
            source, self.batch_size, shuffle=task.shuffle, seed=task.seed, workers=task.workers
        )
        self._batches = self._endless()
        self._stepper: Stepper | None = None

    def expect(self, total: int) -> None:
        """Take the next `total` steps as `fit` does, on a GPU from CUDA graphs."""
        self._stepper = Stepper(self.hand, self._task, total)

    def take(self) -> None:
        """Take one step: as `fit` does after `expect`, else plainly."""
        batch = next(self._batches)
        if self._stepper is not None:
            self._stepper.take(batch)
        else:
            take_step(self.hand, self._task, batch)

    def sample(self) -> Sample:
        """Take one step and return its profile."""
        window = StepTimer(self.hand, self.feed)
        self.take()
        return window.close()

    def settle(self) -> None:
        """Take all further steps plainly."""
        if self._stepper is not None:
            self._stepper.close()
            self._stepper = None

    def close(self) -> None:
        """Free all resources."""
        self.settle()
        self.feed.close()
        self.hand.close()

    def _endless(self) -> Iterator[Batch]:
        while True:
            for batch in self.hand.reader.one_epoch(self.feed):
                if batch.global_samples == self.batch_size or self.feed.num_steps() == 1:
                    yield batch


def gradient_squares(world: World, task: Task, sizes: tuple[int, int], rounds: int = 4) -> list[list[float]]:
    """Return squared gradient norms of some batches of either size, at the initial weights."""
    assert task.loss is not None
    hand = Hand(world, StrategySpec())
    try:
        hand.build(task)
        hand.reader.seed(task.seed)
        source = source_of(task)
        return [[_square(hand, task, data) for data in _some(hand, source, size, rounds)] for size in sizes]
    finally:
        hand.close()


def _some(hand: Hand, source: Any, size: int, rounds: int) -> list[Any]:
    feed = hand.reader.make_feed(source, size, shuffle=True)
    try:
        found = []
        for batch in hand.reader.one_epoch(feed, which=size):
            if first_dim(batch.data) == size:
                found.append(batch.data)
            if len(found) == rounds:
                break
        return found
    finally:
        feed.close()


def _square(hand: Hand, task: Task, data: Any) -> float:
    assert task.loss is not None
    value = task.loss(hand.model, data)
    loss = value.total / value.count if isinstance(value, Mean) else value
    parameters = [p for p in hand.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return float(sum(g.double().square().sum() for g in gradients if g is not None))


def _agreed(world: World, steps: float) -> int:
    """Return the number of steps that the slowest rank has time for; the same on all ranks."""
    return int(max(LEAST, min(MOST, *world.gather_objects(steps))))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
