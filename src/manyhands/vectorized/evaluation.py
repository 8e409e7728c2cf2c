"""Evaluate stacked networks on the same data: each batch is read once, for all members together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..core import Mean, Task
from ..data import Cursor, Feed, as_source, check_source, map_leaves, source_of
from ..distributed import Device, NullWorld
from ..training import Meter, parted
from .program import Program
from .stack import Stack

Pair = tuple[Tensor, Tensor]
"""Sums of a metric over samples, and the numbers of samples; each has one entry per member."""


class Evaluation:
    """Evaluate the members of a stack on the validation data of their tasks."""

    def __init__(self, task: Task, program: Program, device: Device, dtype: torch.dtype | None) -> None:
        self._task, self._program = task, program
        self._world = NullWorld(device)
        source = as_source(task.valid, collate=task.collate)
        usual = task.batch_size or check_source(source_of(task), None)
        self._feed = Feed(source, batch_size=usual, shuffle=False, device=device.torch, dtype=dtype)

    def measure(self, stack: Stack) -> list[dict[str, float]]:
        """Return the loss and metrics of every member of the stack; averaged weights are used if there are any."""
        sums: dict[str, Pair] = {}
        functions, _ = parted(self._task, self._world)
        meters = [parted(self._task, self._world)[1] for _ in range(len(stack))]
        for batch in self._feed.epoch(Cursor()):
            ids = torch.from_numpy(batch.ids).to(stack_device(stack))
            (total, count), answers = self._program.evaluate(stack, batch.data, ids)
            _add(sums, "loss", total if count is None else Mean(total, count), batch.num_samples)
            for name, metric in functions.items():
                _add(sums, name, _each(metric, answers, batch.data, len(stack)), batch.num_samples)
            if any(meters):
                _show(meters, answers, batch.data, batch.num_samples)
        values = {name: (total / count).tolist() for name, (total, count) in sums.items()}
        measured = [{name: numbers[row] for name, numbers in values.items()} for row in range(len(stack))]
        for row, own in zip(measured, meters, strict=True):
            row.update({name: value for meter in own for name, value in meter.values().items()})
        return measured


def stack_device(stack: Stack) -> torch.device:
    """Return the device of a stack's tensors."""
    return next(iter(stack.tensors.values())).device


def _add(sums: dict[str, Pair], name: str, value: Tensor | Mean, num_samples: int) -> None:
    if isinstance(value, Mean):
        total, count = value.total.double(), value.count.double()
    else:
        total, count = value.double() * num_samples, torch.full_like(value, num_samples, dtype=torch.float64)
    before = sums.get(name)
    sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)


def _each(metric: Any, answers: Any, batch: Any, num_members: int) -> Tensor | Mean:
    """Return a metric's value on one batch for every member, computed with vmap if possible, else one by one."""

    def one(answer: Any) -> Any:
        value = metric(answer, batch)
        return (value.total, value.count) if isinstance(value, Mean) else torch.as_tensor(value)

    try:
        found = vmap(one)(answers)
    except Exception:
        values = [one(_row(answers, index)) for index in range(num_members)]
        pairs = [value if isinstance(value, tuple) else (value,) for value in values]
        device = next(leaf for leaf in values[0]).device if isinstance(values[0], tuple) else None
        found = tuple(
            torch.stack([torch.as_tensor(v, device=device) for v in column]) for column in zip(*pairs, strict=True)
        )
        found = found if len(found) == 2 else found[0]
    return Mean(*found) if isinstance(found, tuple) else found


def _show(meters: list[list[Meter]], answers: Any, batch: Any, num_samples: int) -> None:
    for index, own in enumerate(meters):
        for meter in own:
            meter.update(_row(answers, index), batch, num_samples)


def _row(answers: Any, index: int) -> Any:
    return map_leaves(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, answers)
