"""Batch statistics over all replicas: BatchNorm that sees the global batch, on any device.

torch's SyncBatchNorm does not support CPU tensors; this one needs only an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import StrategyError
from ..distributed import World


class BatchStats:
    """Make a network's BatchNorm layers use the statistics of the whole batch."""

    def __init__(self, model: nn.Module | None, world: World) -> None:
        """Patch the model's batch-norm layers; without a model the caller uses `normalise` itself."""
        self._world = world
        self.is_padding = False
        """Whether this replica's current micro-batch is padding, so that it must not count."""
        self.layers: list[_BatchNorm] = []
        for name, layer in model.named_modules() if model is not None else ():
            if isinstance(layer, _BatchNorm):
                self.layers.append(layer)
                _require_own_forward(name, layer)
                # A bound method, so that a copy of the layer uses the copy's parameters.
                layer.forward = MethodType(self._forward(), layer)  # type: ignore[method-assign]

    def normalise(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        *_: Any,
    ) -> Tensor:
        """Compute torch's batch norm in training mode, with statistics over all replicas."""
        share = 0.0 if self.is_padding else 1.0
        y, mean, var, count = _normalise(x, weight, bias, eps, self._world, share)
        if running_mean is not None and running_var is not None:
            _move(running_mean, running_var, mean, var, count, momentum)
        return y

    def forward_of(self, layer: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward with statistics over all replicas, or its own if it has no batch statistics."""
        return MethodType(self._forward(), layer) if isinstance(layer, _BatchNorm) else own

    def close(self) -> None:
        """Restore the layers' own forward."""
        for layer in self.layers:
            del layer.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchStats:
        return self

    def _forward(self) -> Callable[[_BatchNorm, Tensor], Tensor]:
        def forward(layer: _BatchNorm, x: Tensor) -> Tensor:
            uses_batch = layer.training or layer.running_mean is None
            if not uses_batch:
                return type(layer).forward(layer, x)
            layer._check_input_dim(x)
            weight = 0.0 if self.is_padding else 1.0
            y, mean, var, count = _normalise(x, layer.weight, layer.bias, layer.eps, self._world, weight)
            if layer.training and layer.track_running_stats:
                _update_running(layer, mean, var, count)
            return y

        return forward


class _Normalise(torch.autograd.Function):
    """Normalize by statistics that are summed over the replicas; backward sums its two statistics likewise."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        world: World,
        share: float,
    ) -> Any:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        var, mean = torch.var_mean(wide, dims, correction=0)
        count = share * x.numel() / x.shape[1]
        # Sums of squares lose precision in fp32; these vectors are short, so they are sent as float64.
        wide_mean = mean.double()
        sums = torch.cat([wide_mean, var.double() + wide_mean.square(), wide_mean.new_ones(1)]) * count
        world.all_reduce(sums)
        total = sums[-1]
        if x.numel() == x.shape[1] and float(total) <= 1:
            raise ValueError(f"BatchNorm needs more than one value per channel in training, but got {tuple(x.shape)}")
        mean, square = (sums[:-1] / total).chunk(2)
        var = (square - mean.square()).clamp_(min=0)
        stats = (mean.to(wide.dtype), var.to(wide.dtype))
        y = F.batch_norm(x, *stats, weight, bias, training=False, eps=eps)
        ctx.save_for_backward(x, weight, *stats, total)
        ctx.eps, ctx.world, ctx.share = eps, world, share
        ctx.mark_non_differentiable(*stats, total)
        return y, *stats, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise StrategyError(
                "synchronized batch statistics do not support second-order gradients",
                got="a backward with create_graph=True",
                remedy='use a layer without batch statistics, such as GroupNorm, or batch_stats="local"',
            )
        x, weight, mean, var, total = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = mean.dtype
        invstd = torch.rsqrt(var + ctx.eps)
        xhat = (x.to(wide) - mean.view(shape)) * invstd.view(shape)
        dy = dy.to(wide)
        d_bias, d_weight = dy.sum(dims), (dy * xhat).sum(dims)
        sums = torch.cat([d_bias, d_weight])
        ctx.world.all_reduce(sums)
        mean_dy, mean_dy_xhat = (sums / total.to(wide)).chunk(2)
        scale = invstd if weight is None else invstd * weight.to(wide)
        # A padding row did not enter the statistics, so it gets no gradient through them.
        through_stats = (mean_dy.view(shape) + xhat * mean_dy_xhat.view(shape)) * ctx.share
        dx = (dy - through_stats) * scale.view(shape)
        if weight is None:
            return dx.to(x.dtype), None, None, None, None, None
        return dx.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None, None, None


def _require_own_forward(name: str, layer: _BatchNorm) -> None:
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise StrategyError(
            "batch statistics can only be synchronized for the BatchNorm layers of torch",
            got=f"{name} ({type(layer).__name__}), which has its own forward",
            remedy='use a BatchNorm and a separate activation, or batch_stats="local"',
        )


def _normalise(*args: Any) -> tuple[Tensor, ...]:
    return _Normalise.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


def _update_running(layer: _BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1.0 / float(layer.num_batches_tracked)
    _move(layer.running_mean, layer.running_var, mean, var, count, momentum)


@torch.no_grad()
def _move(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, count: Tensor, momentum: float) -> None:
    """Move running statistics towards those of a batch."""
    unbiased = var * (count / (count - 1).clamp(min=1)).to(var.dtype)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)
