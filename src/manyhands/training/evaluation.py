"""Evaluation and prediction over all replicas: totals and counts are summed before they are divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from ..core import DataError, Task, evaluating
from ..data import Batch, Cursor, Feed
from .hand import Hand
from .metrics import MetricSums, compute, parted
from .predictor import inputs_of, named, outputs_of
from .step import whole_loss


def evaluate(hand: Hand, task: Task, feed: Feed) -> dict[str, float]:
    """Return the task's loss and metrics over a feed, with the averaged weights where there are any.

    Every sample counts once, for any number of replicas.
    """
    sums = MetricSums(hand.replicas)
    functions, meters = parted(task, hand.replicas)
    averaged = hand.averages.in_place() if hand.averages is not None else nullcontext()
    with averaged, evaluating(hand.model), torch.no_grad():
        for batch in _batches(hand, feed):
            with hand.scope():
                if task.loss is not None:
                    sums.add("loss", whole_loss(hand.replica, task.loss(hand.model, batch.data)), batch.num_samples)
                if task.metrics:
                    outputs = hand.replica.plain(outputs_of(task, hand.model, inputs_of(task, batch.data)))
                    for name, metric in functions.items():
                        sums.add(name, metric(outputs, batch.data), batch.num_samples)
            # A padding row belongs to another replica, which passes it to its own meters.
            for meter in meters if batch.num_samples else ():
                meter.update(outputs, batch.data, batch.num_samples)
    return {**sums.means(), **compute(meters, hand.replicas)}


def predict(hand: Hand, task: Task, feed: Feed) -> dict[str, Tensor | list[Tensor]]:
    """Return the task's predictions for every sample of a feed, in order; a list of rows where shapes differ."""
    rows: dict[str, list[Tensor]] = {}
    places: list[int] = []
    with evaluating(hand.model), torch.no_grad():
        for batch in _batches(hand, feed):
            with hand.scope():
                outputs = named(hand.replica.plain(outputs_of(task, hand.model, inputs_of(task, batch.data))))
            for name, value in outputs.items():
                _require_rows(name, value, batch.num_samples)
                rows.setdefault(name, []).append(_full(value[: batch.num_samples]).cpu())
            places.extend(batch.ids.tolist())
    gathered = hand.replicas.gather_objects((places, rows))
    order = torch.tensor([place for ids, _ in gathered for place in ids]).argsort()
    return {name: _in_order([part for _, parts in gathered for part in parts[name]], order) for name in rows}


def _require_rows(name: str, value: Tensor, num: int) -> None:
    if value.shape[:1] < (num,):
        raise DataError(
            "predict must return one row for each row of the data",
            got=f"{name!r} of shape {tuple(value.shape)} for {num} rows",
            remedy="pass rows as one array, or a tuple of arrays with the same rows, and let predict keep the "
            "rows first",
        )


def _in_order(parts: list[Tensor], order: Tensor) -> Tensor | list[Tensor]:
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)[order]
    singles = [row for part in parts for row in part]
    return [singles[place] for place in order.tolist()]


def _batches(hand: Hand, feed: Feed) -> Iterator[Batch]:
    """Yield one epoch of batches; layers with batch statistics must know of padding rows even in evaluation."""
    for batch in feed.epoch(Cursor()):
        hand.replica.set_padding(batch.num_samples == 0)
        hand.reader.draw_for(batch, salt=1)
        yield batch
    hand.replica.set_padding(False)


def _full(tensor: Tensor) -> Tensor:
    """Convert half-precision outputs to fp32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
