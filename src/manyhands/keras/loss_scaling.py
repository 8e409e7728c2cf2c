"""Loss scaling for float16 over replicas, such that the scale develops as on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .step import MicroBatchStep, current_step

LARGEST = torch.finfo(torch.float16).max
Apply = Callable[..., Any]
"""An optimizer's own function of gradients and variables."""


def weighing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `LossScaleOptimizer.scale_loss`: within a step, a replica's loss is weighted by its rows.

    The mean over fewer rows has larger gradients, which would overflow earlier.
    """

    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        step = current_step()
        return original(self, loss if step is None else step.weighed(loss))

    return scale_loss


def kept(step: MicroBatchStep, apply: Apply, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> Apply:
    """Return the function with sums that overflow half precision made infinite, as one device would have them."""
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
