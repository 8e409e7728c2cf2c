"""The trial: a few samples, whole and in halves, before work starts; a loss decides whether batches can be split."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..cluster import NullWorld
from ..core import Mean, Task, TaskError, random_state, restore_random_state
from ..data import first_dim, split
from .tally import Part, Tally

NUM_SAMPLES = 8
TOLERANCE = 1e-4


def try_loss(task: Task, model: nn.Module, batch: Any, *, is_split: bool) -> str:
    """Tries a small batch; raises on a loss that cannot be trained, returns a notice on one that is not a mean.

    `is_split` says whether the strategy cuts batches; then a loss that is not a mean would change the answer.
    """
    assert task.loss is not None
    device = next(iter(model.parameters()), torch.empty(0)).device
    states = random_state(device)
    was_training = model.training
    try:
        model.eval()
        whole = _value(task, model, batch)
        if not math.isfinite(whole):
            raise TaskError(
                "the loss must be finite at the start",
                got=whole,
                remedy="look at the inputs, the initial weights and log/sqrt/÷ in it",
            )
        return _compare(task, model, batch, whole, is_split)
    finally:
        model.train(was_training)
        restore_random_state(states, device)


def _compare(task: Task, model: nn.Module, batch: Any, whole: float, is_split: bool) -> str:
    rows = first_dim(batch)
    if rows < 2:
        return ""
    if not _close(whole, _value(task, model, batch)):
        return "the loss draws random numbers even in evaluation, so whether it is a mean could not be tried"
    try:
        halves = split(batch, [rows // 2, rows - rows // 2])
    except ValueError:
        return "the batch cannot be cut along its first dimension, so whether the loss is a mean could not be tried"
    parts = _combined(task, model, halves, rows)
    if _close(whole, parts):
        return ""
    rule = "a loss must be a mean over the batch's samples, or mh.mean(total, count)"
    got = f"{whole:.6g} for {rows} samples and {parts:.6g} for their halves together"
    remedy = (
        "return mh.mean(losses.sum(), count) where tokens or boxes count; where samples look at each other "
        "(contrastive losses), write a step and gather what they need"
    )
    if is_split:
        raise TaskError(rule, got=got, remedy=remedy)
    return f"{rule}, but got {got}: on one device this is fine, split over several it would change ({remedy})"


def _value(task: Task, model: nn.Module, batch: Any) -> float:
    return _combined(task, model, [batch], first_dim(batch))


def _combined(task: Task, model: nn.Module, parts: list[Any], rows: int) -> float:
    assert task.loss is not None
    tally = Tally(NullWorld())
    for part in parts:
        loss = task.loss(model, part)
        tally.add(loss, Part(first_dim(part), rows))
        if isinstance(loss, Mean) and not loss.count > 0 and len(parts) == 1:
            raise TaskError(
                "mh.mean needs a count above zero",
                got=float(loss.count),
                remedy="count what the total sums over",
            )
    return float(tally.loss)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-6)
