"""Patches of Keras' losses: divide by the counts of all replicas, and scale for float16 as on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops
from keras.src.losses import loss as keras_loss
from torch import Tensor

from ..core import StrategyError
from .step import MicroBatchStep, current_step


def over_replicas(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Keras' `reduce_weighted_values` so that within a step a loss is divided by the counts of all replicas."""

    def reduce_weighted_values(
        values: Tensor,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Tensor:
        loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        step = current_step()
        if step is None or reduction in (None, "none"):
            return loss
        if not values.numel():
            # The mean of zero rows would be NaN, but must contribute nothing.
            loss = ops.sum(values)
        if reduction == "sum":
            return step.part(loss)
        if mask is None and (reduction != "mean_with_sample_weight" or sample_weight is None):
            return step.part(loss * step.rows.weight) if step.is_plain_sum else loss
        return step.part(loss * _fraction(step, _counted(values, sample_weight, mask, reduction)).to(loss.dtype))

    return reduce_weighted_values


def _counted(values: Tensor, sample_weight: Any, mask: Any, reduction: str | None) -> Tensor:
    """Return the divisor of this replica's loss: the sum of its sample weights, or the number of unmasked values."""
    if reduction != "mean_with_sample_weight":
        return torch.as_tensor(ops.sum(ops.cast(mask, "float64")))
    weights = keras_loss.apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
    return torch.as_tensor(ops.sum(ops.cast(weights, "float64")))


def _fraction(step: MicroBatchStep, count: Tensor) -> Tensor:
    if not step.rows.last or step.sums.held:
        raise StrategyError(
            "a loss that is divided by a count, a mask or weights needs its whole batch at once",
            got="a batch that accumulate splits into micro-batches",
            remedy="omit accumulate, or use a mean over samples",
        )
    own = (count * (0.0 if step.rows.is_padding else 1.0)).detach().clone()
    total = own.clone()
    step.hand.replicas.all_reduce(total)
    return torch.where(total > 0, own / total, torch.zeros_like(own))


LARGEST = torch.finfo(torch.float16).max
Apply = Callable[..., Any]
"""An optimizer's unwrapped `apply`: takes the optimizer, the gradients and optionally the variables."""


def weighing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `LossScaleOptimizer.scale_loss` so that within a step a replica's loss is weighted by its rows.

    Without the weight, the mean over a replica's rows has larger gradients than the mean over the whole batch, which
    overflow earlier.
    """

    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        step = current_step()
        return original(self, loss if step is None else step.weighed(loss))

    return scale_loss


def kept(step: MicroBatchStep, apply: Apply, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> Apply:
    """Return `apply`, with summed gradients above float16's maximum replaced by infinity, as on one device.

    This concerns variables whose gradients are float16 numbers on every replica. Infinity shows LossScaleOptimizer that
    the step has overflowed.
    """
    none = torch.zeros((), device=step.hand.device)
    wide = torch.stack([none if g is None else (g.half() != g).any().float() for g in gradients])
    step.hand.replicas.all_reduce(wide)
    halves = {id(variable) for variable, count in zip(variables, wide.tolist(), strict=True) if not count}

    def applied(optimizer: Any, sums: Sequence[Tensor | None], own: Sequence[Any] | None = None) -> Any:
        of = variables if own is None else own
        return apply(optimizer, [_held(s) if id(v) in halves else s for s, v in zip(sums, of, strict=True)], own)

    return applied


def _held(total: Tensor | None) -> Tensor | None:
    return None if total is None else total.masked_fill(total.abs() > LARGEST, math.inf)
