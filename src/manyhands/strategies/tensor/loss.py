"""Cross entropy of logits whose classes are sharded over ranks, without gathering whole rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .axis import Axis


def cross_entropy(
    axis: Axis,
    logits: Tensor,
    target: Tensor,
    num_classes: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute torch's cross entropy from this rank's shard of the logits along dim 1, or dim 0 if 1-dimensional."""
    is_single = logits.dim() == 1
    rows = logits.unsqueeze(0) if is_single else logits.movedim(1, -1)
    counted = target != ignore_index
    require_within(target.where(counted, 0), num_classes, "Target {} is out of bounds.")
    losses = _losses(rows, target.where(counted, 0), num_classes, label_smoothing, axis)
    losses = losses.squeeze(0) if is_single else losses
    losses = losses.where(counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def require_within(indices: Tensor, count: int, text: str) -> None:
    """Raise torch's error for an index that is negative or too large, which no rank's shard contains."""
    if isinstance(indices, FakeTensor):
        return
    is_known = (indices >= 0) & (indices < count)
    if indices.device.type != "cpu":
        # Does not wait for the device; torch's own kernels abort in the same way.
        torch._assert_async(is_known.all(), text.format("?"))
    elif not is_known.all():
        raise IndexError(text.format(int(indices[~is_known][0])))


def _losses(*args: Any) -> Tensor:
    return _Losses.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


class _Losses(torch.autograd.Function):
    """The loss of every row: the log-sum-exp of its logits minus the target's logit."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, target: Tensor, num_classes: int, smoothing: float, axis: Axis) -> Tensor:
        wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
        begin, count = axis.span(num_classes)
        top = wide.amax(-1) if count else wide.new_full(wide.shape[:-1], -torch.inf)
        top = _reduced(top, "max", axis)
        shares = (wide - top.unsqueeze(-1)).exp()
        place = target - begin
        mine = (place >= 0) & (place < count)
        place = place.clamp(0, max(0, count - 1)).unsqueeze(-1)
        picked = wide.gather(-1, place).squeeze(-1).where(mine, 0.0) if count else torch.zeros_like(top)
        sums = _reduced(torch.stack([shares.sum(-1), picked, wide.sum(-1)]), "sum", axis)
        total, logit, all_logits = sums.unbind(0)
        log_sum = total.log() + top
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), place, mine)
        ctx.smoothing, ctx.num_classes, ctx.dtype = smoothing, num_classes, rows.dtype
        return log_sum - (1 - smoothing) * logit - smoothing * all_logits / num_classes

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, place, mine = ctx.saved_tensors
        wanted = torch.zeros_like(shares)
        if shares.shape[-1]:
            wanted.scatter_(-1, place, mine.unsqueeze(-1).to(shares.dtype) * (1 - ctx.smoothing))
        result = (shares - wanted - ctx.smoothing / ctx.num_classes) * gradient.unsqueeze(-1)
        return result.to(ctx.dtype), None, None, None, None


def _reduced(tensor: Tensor, how: str, axis: Axis) -> Tensor:
    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(tensor, how, axis.mesh))
    return summed
