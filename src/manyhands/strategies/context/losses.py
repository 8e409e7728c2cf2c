"""Rules for losses: each rank computes those of its own tokens, and totals are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .elements import aligned, broadcast, reference
from .split_tensor import SequenceDim, SplitTensor, is_split, resplit, whole, whole_shape


def _reduced(losses: SplitTensor, reduction: str, count: Any = None) -> Any:
    """Return the losses reduced to a sum or a mean; `count` replaces the number of losses in the mean."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (losses.numel() if count is None else count)


def by_element(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a loss of each element, such as a squared error."""
    reduction = kwargs.pop("reduction", "mean")
    if args or reduction not in ("mean", "sum", "none") or any(kwargs.pop(n, None) is not None for n in _LEGACY):
        return NotImplemented
    if not isinstance(input, Tensor) or not isinstance(target, Tensor):
        return NotImplemented
    shape = broadcast([whole_shape(input), whole_shape(target)])
    found = reference([input, target], shape)
    if found is None or whole_shape(input) != whole_shape(target):
        return NotImplemented
    place, ranks = found.place, found.ranks
    local = [aligned(tensor, place, len(shape), ranks) for tensor in (input, target)]
    settings = {name: aligned(value, place, len(shape), ranks) for name, value in kwargs.items()}
    return _reduced(SplitTensor.of(func(*local, reduction="none", **settings), place, ranks), reduction)


_LEGACY = ("size_average", "reduce")


def cross_entropy(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Compute the cross entropy of each token; a mean counts the tokens of all ranks."""
    if not isinstance(input, SplitTensor) or is_split(weight) or (size_average, reduce) != (None, None):
        return NotImplemented
    shape = whole_shape(input)
    classes = 1 if len(shape) > 1 else 0
    place, ranks = input.place, input.ranks
    if place.dim == classes:
        return NotImplemented
    is_class = not target.is_floating_point()
    # An index has no dim for the classes.
    at = place.at(place.dim - (is_class and place.dim > classes))
    settings: dict[str, Any] = {"ignore_index": ignore_index} if is_class else {}
    settings |= {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    local = func(input.local, resplit(target, at, ranks), weight, reduction="none", **settings)
    losses = SplitTensor.of(local, place.at(place.dim - (place.dim > classes)), ranks)
    return _reduced(losses, reduction, _count(target, at, losses, weight, ignore_index) if is_class else None)


def _count(target: Any, place: SequenceDim, losses: SplitTensor, weight: Any, ignore_index: int) -> Tensor:
    """Return the divisor of a mean: the number of tokens that are not ignored, or the sum of their weights."""
    known = target if not is_split(target) else whole(target)
    counted = known != ignore_index
    if weight is None:
        number: Tensor = counted.sum()
        return number
    total: Tensor = weight[known.where(counted, 0)].where(counted, 0.0).sum()
    return total


def nll_loss(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Compute the negative log likelihood of each token."""
    return cross_entropy(func, input, target, weight, size_average, ignore_index, reduce, reduction)


def kl_div(
    func: Any, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    log_target: bool = False,
) -> Any:  # fmt: skip
    """Compute a divergence; its mean over the batch divides by the first dim."""
    if (size_average, reduce) != (None, None):
        return NotImplemented
    wanted = "sum" if reduction == "batchmean" else reduction
    found = by_element(func, input, target, reduction=wanted, log_target=log_target)
    if found is NotImplemented or reduction != "batchmean":
        return found
    return found / whole_shape(input)[0]


LOSSES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
         F.binary_cross_entropy_with_logits),
        by_element,
    ),
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.kl_div: kl_div,
}  # fmt: skip
"""Rules of losses by function."""
