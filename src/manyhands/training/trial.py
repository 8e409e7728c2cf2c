"""Try a task before training: the loss and the metrics of a few samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import (
    Mean,
    Task,
    TaskError,
    UsageError,
    random_state,
    remember_state,
    restore_random_state,
    set_training,
)
from ..data import copied, first_dim, split
from ..distributed import NullWorld, World
from .batch_reader import BatchShare
from .error_hints import explain_mistake
from .metrics import parted, try_meters
from .predictor import inputs_of, outputs_of
from .step import Tally

NUM_SAMPLES = 8
TOLERANCE = 1e-4
LOSS = (
    "end it with .mean() (reduction='mean'); return mh.mean(losses.sum(), count) where tokens or boxes count; "
    "where samples look at each other (contrastive losses, hard examples), write a step and gather what they need"
)
"""The remedy for a loss that is not a mean over samples."""


def try_loss(task: Task, model: nn.Module, batch: Any) -> str:
    """Raise if a loss cannot be trained, judged by its value for a few samples; return a notice, or an empty string."""
    return _tried(model, batch, lambda: _require_finite(task, model, batch))


def try_halves(task: Task, model: nn.Module, batch: Any, *, refuses: bool) -> str:
    """Compare the loss of a few samples with that of their halves, in evaluation mode.

    Raises if they differ; without `refuses`, or where they cannot be compared, returns a notice instead. Used for
    networks of which no copy is verified.
    """
    try:
        return _tried(model, batch, lambda: _compare(task, model, batch, _value(task, model, batch)))
    except TaskError as error:
        if refuses:
            raise
        return f"on one device this is fine, split over several it would be refused: {error}"


def _tried(model: nn.Module, batch: Any, look: Callable[[], str]) -> str:
    device = next((p for p in model.parameters() if not p.is_meta), torch.empty(0)).device
    states, put_back = random_state(device), remember_state(model)
    try:
        return look()
    except UsageError:
        raise
    except Exception as error:
        explain_mistake(error, batch)
        # Some networks compute a loss in training mode only. A user error occurs again in the first step.
        return f"the loss could not be tried in evaluation mode ({type(error).__name__}: {error})"
    finally:
        restore_random_state(states, device)
        put_back()


def _require_finite(task: Task, model: nn.Module, batch: Any) -> str:
    whole = _value(task, model, batch)
    if math.isnan(whole) and not _counts(task, model, batch):
        return "the first samples count nothing, so the loss could not be tried"
    if not math.isfinite(whole):
        raise TaskError(
            "the loss must be finite at the start",
            got=whole,
            remedy="check the inputs, the initial weights, and log, sqrt and divisions in the loss",
        )
    return ""


def try_metrics(task: Task, model: nn.Module, batch: Any, world: World) -> list[str]:
    """Call every metric once, so that an error in one is found before the first epoch; return notices."""
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


def _compare(task: Task, model: nn.Module, batch: Any, whole: float) -> str:
    rows = first_dim(batch)
    if rows < 2 or not math.isfinite(whole):
        return ""
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules()):
        return "layers without running statistics look at the whole batch, so the loss could not be tried in halves"
    if not _close(whole, _value(task, model, batch)):
        return "the loss draws random numbers even in evaluation, so whether it is a mean could not be tried"
    try:
        halves = split(batch, [rows // 2, rows - rows // 2])
    except ValueError:
        return "the batch cannot be split along its first dimension, so the check that the loss is a mean was skipped"
    parts = _combined(task, model, halves, rows)
    if _close(whole, parts):
        return ""
    raise TaskError(
        "a loss must be a mean over the batch's samples, or mh.mean(total, count)",
        got=f"{whole:.6g} for {rows} samples and {parts:.6g} for their halves together",
        remedy=LOSS,
    )


def _value(task: Task, model: nn.Module, batch: Any) -> float:
    return _combined(task, model, [batch], first_dim(batch))


def _combined(task: Task, model: nn.Module, parts: list[Any], rows: int) -> float:
    assert task.loss is not None
    tally = Tally(NullWorld())
    for part in parts:
        loss = task.loss(model, copied(part))
        if not _has_gradient(loss) and not _has_gradient(_in_training(task, model, part)):
            raise TaskError(
                "a loss must depend on the model's trainable parameters",
                got="a loss without a gradient",
                remedy="check for .detach(), .item(), torch.no_grad() or a frozen model",
            )
        tally.add(loss, BatchShare(first_dim(part), rows))
    return float(tally.loss)


def _counts(task: Task, model: nn.Module, batch: Any) -> bool:
    """Return whether the count of the loss in this batch is above 0."""
    assert task.loss is not None
    loss = task.loss(model, copied(batch))
    return not isinstance(loss, Mean) or bool(loss.count > 0)


def _in_training(task: Task, model: nn.Module, batch: Any) -> Any:
    """Return the loss in training mode, as adapters that evaluation merges into frozen weights have no gradient."""
    assert task.loss is not None
    was_training = model.training
    set_training(model)
    try:
        return task.loss(model, copied(batch))
    finally:
        model.train(was_training)


def _has_gradient(loss: Any) -> bool:
    objective = loss.total if isinstance(loss, Mean) else loss
    return not isinstance(objective, torch.Tensor) or objective.requires_grad


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-6)
