"""The trial: a few samples, whole and in halves, before work starts; a loss decides whether batches can be split."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..cluster import NullWorld, World
from ..core import Mean, Task, TaskError, UsageError, random_state, restore_random_state
from ..data import first_dim, split
from .metrics import parted, try_meters
from .predictor import inputs_of, outputs_of
from .tally import Part, Tally

NUM_SAMPLES = 8
TOLERANCE = 1e-4


def try_loss(task: Task, model: nn.Module, batch: Any, *, is_split: bool) -> str:
    """Tries a small batch; raises on a loss that cannot be trained, returns a notice on one that is not a mean.

    `is_split` says whether the strategy cuts batches; then a loss that is not a mean would change the answer.
    """
    assert task.loss is not None
    device = next((p for p in model.parameters() if not p.is_meta), torch.empty(0)).device
    states = random_state(device)
    try:
        whole = _value(task, model, batch)
        if math.isnan(whole) and not _counts(task, model, batch):
            return "the first samples count nothing, so whether the loss is a mean could not be tried"
        if not math.isfinite(whole):
            raise TaskError(
                "the loss must be finite at the start",
                got=whole,
                remedy="look at the inputs, the initial weights and log/sqrt/÷ in it",
            )
        return _compare(task, model, batch, whole, is_split)
    except UsageError:
        raise
    except Exception as error:
        # Some networks give a loss in training only. A slip of the person's own comes again in the first step.
        return f"the loss could not be tried in evaluation mode ({type(error).__name__}: {error})"
    finally:
        restore_random_state(states, device)


def try_metrics(task: Task, model: nn.Module, batch: Any, world: World) -> list[str]:
    """Calls every metric once, so that a slip in one is seen now and not after the first epoch; returns notices."""
    if not task.metrics:
        return []
    functions, meters = parted(task, world)
    with torch.no_grad():
        outputs = outputs_of(task, model, inputs_of(task, batch))
        for name, metric in functions.items():
            value = metric(outputs, batch)
            if not isinstance(value, (Mean, int, float)) and not (isinstance(value, torch.Tensor) and value.dim() == 0):
                raise TaskError(
                    f"the metric {name!r} must be a number: a mean over samples, or mh.mean(total, count)",
                    got=tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__,
                    remedy="end it with .mean()",
                )
        return try_meters(meters, outputs, batch)


def _compare(task: Task, model: nn.Module, batch: Any, whole: float, is_split: bool) -> str:
    rows = first_dim(batch)
    if rows < 2:
        return ""
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules()):
        return "layers without running statistics look at the whole batch, so the loss could not be tried in halves"
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
        "end it with .mean() (reduction='mean'); return mh.mean(losses.sum(), count) where tokens or boxes count; "
        "where samples look at each other (contrastive losses), write a step and gather what they need"
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
        _require_gradient(loss)
        tally.add(loss, Part(first_dim(part), rows))
    return float(tally.loss)


def _counts(task: Task, model: nn.Module, batch: Any) -> bool:
    """Whether the loss counts something in this batch."""
    assert task.loss is not None
    loss = task.loss(model, batch)
    return not isinstance(loss, Mean) or bool(loss.count > 0)


def _require_gradient(loss: Any) -> None:
    objective = loss.total if isinstance(loss, Mean) else loss
    if isinstance(objective, torch.Tensor) and not objective.requires_grad:
        raise TaskError(
            "a loss must depend on the model's trainable parameters",
            got="one without a gradient",
            remedy="look for .detach(), .item(), torch.no_grad() or a frozen model in it",
        )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-6)
