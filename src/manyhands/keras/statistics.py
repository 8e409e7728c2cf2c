"""Batch statistics over all replicas: BatchNormalization uses the global batch, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras import backend, ops
from torch import Tensor

from .step import MicroBatchStep, current_step


def over_replicas(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap `BatchNormalization._moments` so that within a step the mean and variance are those of all replicas."""

    def _moments(self: Any, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        step = current_step()
        if step is not None:
            return _of_all(step, inputs, mask, self._reduction_axes)
        if self.synchronized and mask is None:
            # Keras refuses synchronized=True with PyTorch; with one replica, synchronized statistics are its own.
            return ops.moments(inputs, axes=self._reduction_axes)  # type: ignore[no-any-return]
        return original(self, inputs, mask)

    return _moments


def _of_all(step: MicroBatchStep, inputs: Tensor, mask: Tensor | None, axes: list[int]) -> tuple[Tensor, Tensor]:
    if step.rows.is_padding:
        # The batch may have zero rows, whose mean would be NaN.
        sums, slack = inputs.double().sum(axes).expand(3, -1) * 0.0, 0.0 if mask is None else backend.epsilon()
    elif mask is None:
        var, mean = (moment.double() for moment in torch.var_mean(inputs, axes, correction=0))
        count = torch.full_like(mean, inputs.numel() / mean.numel())
        sums, slack = torch.stack([mean, var + mean.square(), torch.ones_like(mean)]) * count, 0.0
    else:
        counted = torch.broadcast_to(mask.bool().unsqueeze(-1), inputs.shape).double()
        wide = inputs.double() * counted
        sums = torch.stack([each.sum(axes) for each in (wide, wide.square(), counted)])
        slack = backend.epsilon()
    total, squares, number = _sum(sums, step)
    mean = total / (number + slack)
    # The sum of all rows' squared deviations from this mean, which is exact also if slack was added to the divisor.
    var = (squares - 2 * mean * total + number * mean.square()) / (number + slack)
    return mean.to(inputs.dtype), var.clamp(min=0).to(inputs.dtype)


def scaled(values: Tensor, factor: float) -> Tensor:
    """Return the values unchanged, with their gradients scaled by a factor."""
    return values if factor == 1.0 else _Scaled.apply(values, factor)  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def _sum(*args: Any) -> Tensor:
    return _WeightedSum.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _WeightedSum(torch.autograd.Function):
    """Differentiable sum over the replicas; each replica's loss is weighted by its share of the rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, step: MicroBatchStep) -> Tensor:
        ctx.step = step
        summed = values.clone()
        step.hand.replicas.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = ctx.step.weight
        summed = gradient * weight
        ctx.step.hand.replicas.all_reduce(summed)
        # The optimizer step weights gradients once more.
        return summed / weight if weight else torch.zeros_like(summed), None
