"""Public function `check`: compare a strategy with one device; and a check of data that `fit` makes too."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from .. import training
from ..core import StrategySpec, Task, as_task
from ..data import check_source, source_of
from ..distributed import DEFAULT_TIMEOUT, NullWorld
from ..strategies import require_loss
from ..training import Verdict
from .parameter_servers import check_served
from .recording import explain_mathematics
from .runtime import On, TaskLike, own_randomness, runtime


def check(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Verdict:
    """Compare two steps under a strategy with the same steps on one device, in float64.

    Losses, gradients, buffers and the weights after each update are compared, in training mode, on rows from all over
    the data. In both cases random numbers depend on the sample and the step, as with deterministic=True, so that
    dropout is compared too.

    Args:
        task: A Task, or a function that returns one.
        strategy: Strategy, as for `mh.fit`.
        on: Devices, as for `mh.fit`.
        params: Parameters of the task function.
        timeout: Seconds within which a healthy operation completes.

    Returns:
        A Verdict, which is true if the steps are equal. Printed, it names the first tensor that differs, the operation
        that causes the difference, and a remedy.
    """
    made = training.with_data(as_task(task, params))
    spec, devices, _ = runtime.settle(strategy, on, with_servers=True)
    require_loss(spec, made.loss is not None)
    training.check_pieces(made, spec, devices)
    check_data(made, None)
    if spec.servers:
        training.check_statistics(made, spec)
        verdict = check_served(made, spec, devices, timeout)
    else:
        with own_randomness():
            plan = training.plan_of(made, spec)
            whole = training.take_steps(NullWorld(), made, StrategySpec(), plan)
            failed = training.fails_in_parts(made, spec, plan, whole)
        if failed is not None:
            return failed
        split = functools.partial(training.take_split_steps, task=made, spec=spec, plan=plan, draws=whole.draws)
        parts = runtime.call(split, devices, timeout, on=on)[0]
        with own_randomness():
            verdict = training.judge(made, spec, plan, whole, parts)
        if verdict:
            # The compared steps may have too few rows for the micro-batches of training.
            training.check_statistics(made, spec)
    return dataclasses.replace(verdict, notes=(*verdict.notes, *explain_mathematics(spec)))


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
