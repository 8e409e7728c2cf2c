"""Checks of arguments that several public functions make before any process starts."""

from __future__ import annotations

import inspect

from .. import training
from ..core import Task
from ..data import check_source, source_of


def check_data(task: Task, steps: int | None) -> None:
    """Raise for invalid data, an invalid batch size, or a schedule that does not fit the number of steps.

    If `task.data` is a function, nothing is checked, because it is called in the ranks.

    Args:
        task: The task.
        steps: Number of steps of the run; None for whole epochs.
    """
    if inspect.isfunction(task.data):
        return
    source = source_of(task)
    num_steps = source.num_steps(check_source(source, task.batch_size))
    training.check_schedule(task, num_steps if steps is None else steps)
