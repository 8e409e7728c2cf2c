"""Checks of arguments that several functions of the API make before any process starts."""

from __future__ import annotations

import inspect

from .. import training
from ..core import Task
from ..data import check_source, source_of


def check_data(task: Task, steps: int | None) -> None:
    """Check what is known about the data before any process starts; a function that makes data runs in the ranks."""
    if inspect.isfunction(task.data):
        return
    source = source_of(task)
    num_steps = source.num_steps(check_source(source, task.batch_size))
    training.check_schedule(task, num_steps if steps is None else steps)
