"""Preview of a network's partition into pieces, before any process is started."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..core import StrategySpec, Task
from ..data import Feed, check_source, source_of
from ..distributed import Device, hidden_process_group
from ..strategies import Outline, check_partition, in_double, outline
from .explain import built, layout_of, on_network, slots_of
from .restored_objects import left_alone

NUM_ROWS = 4
Probe = Callable[[nn.Module, Callable[[Any], Any]], Any]


def check_pieces(task: Task, spec: StrategySpec, devices: Sequence[Device]) -> None:
    """Raise if a task's network cannot be partitioned into the spec's stages; do nothing without stages."""
    if spec.stages == 1:
        return
    probe = _probe(task, spec, NUM_ROWS)
    with left_alone(task.loss, task.model), hidden_process_group():
        on_network(task, lambda model: check_partition(spec, _as_wide(model, spec), devices, probe))


def outline_of(task: Task, spec: StrategySpec, devices: Sequence[Device]) -> Outline:
    """Return how a task's network is partitioned, with the costs of its pieces as measured on this machine."""
    rows = (task.batch_size or 32) // (spec.num_parts * spec.accumulate * spec.microbatches)
    probe = _probe(task, spec, max(NUM_ROWS, min(64, rows)))
    assert probe is not None, "a task with a loss and data"
    model = _as_wide(built(task), spec)
    layout, times = layout_of(task, model, spec)
    with left_alone(task.loss, task.model), hidden_process_group():
        return outline(spec, model, devices, probe, layout=layout, slots=slots_of(task, model), rows=times)


def _as_wide(model: nn.Module, spec: StrategySpec) -> nn.Module:
    return in_double(model) if spec.precision == "fp64" else model


def _probe(task: Task, spec: StrategySpec, rows: int) -> Probe | None:
    """Return the loss of a few samples as a probe; None where a function makes the data, as it runs in the ranks."""
    compute = task.loss
    if compute is None or inspect.isfunction(task.data):
        return None
    source = source_of(task)
    wide = torch.float64 if spec.precision == "fp64" else None
    feed = Feed(source, batch_size=check_source(source, task.batch_size), shuffle=False, dtype=wide)
    with contextlib.closing(feed):
        batch = feed.peek(rows)
    return lambda model, fake: compute(model, fake(batch))
