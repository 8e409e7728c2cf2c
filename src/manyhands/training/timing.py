"""Timing: a few steps of a task, taken as `fit` takes them but kept nowhere; gradients at two batch sizes."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..cluster import World
from ..core import Mean, StrategySpec, Task
from ..data import as_source, check_source, first_dim
from .hand import Hand
from .stepping import Stepper

WARMUP = 3
"""Steps that are not counted: on a GPU they are recorded."""
LEAST, MOST = 2, 20
"""Steps that are."""


def time_steps(
    world: World, task: Task, spec: StrategySpec, *, batch_size: int | None = None, budget: float = 1.0
) -> list[float]:
    """Seconds of each of some steps after the first few, input included; as many as the budget allows."""
    hand = Hand(world, spec)
    try:
        hand.build(task)
        hand.model.train()
        hand.seed(task.seed)
        source = as_source(task.data, collate=task.collate)
        size = check_source(source, task.batch_size) if batch_size is None else batch_size
        feed = hand.make_feed(source, size, shuffle=task.shuffle, seed=task.seed, workers=task.workers)
        stepper = Stepper(hand, task, WARMUP + MOST)
        seconds: list[float] = []
        wanted = WARMUP + LEAST
        try:
            while len(seconds) < wanted:
                before = time.perf_counter()
                for batch in hand.one_epoch(feed):
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


def gradient_squares(world: World, task: Task, sizes: tuple[int, int], rounds: int = 4) -> list[list[float]]:
    """Squared norms of the gradients of some batches of either size, at the first weights."""
    assert task.loss is not None
    hand = Hand(world, StrategySpec())
    try:
        hand.build(task)
        hand.seed(task.seed)
        source = as_source(task.data, collate=task.collate)
        return [[_square(hand, task, data) for data in _some(hand, source, size, rounds)] for size in sizes]
    finally:
        hand.close()


def _some(hand: Hand, source: Any, size: int, rounds: int) -> list[Any]:
    feed = hand.make_feed(source, size, shuffle=True)
    try:
        found = []
        for batch in hand.one_epoch(feed, which=size):
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
    """As many steps as the slowest rank has time for, the same on all."""
    return int(max(LEAST, min(MOST, *world.gather_objects(steps))))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
