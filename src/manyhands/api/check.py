"""Public function `check`: compare a strategy with one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from .. import training
from ..core import StrategySpec, as_task
from ..distributed import DEFAULT_TIMEOUT, NullWorld
from ..strategies import require_loss
from ..training import Verdict
from .checks import check_data
from .recording import explain_mathematics
from .runtime import On, TaskLike, own_randomness, runtime
from .served import check_served


def check(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Verdict:
    """Compare two steps in float64 under a strategy with those on one device, and return where they differ.

    Compares losses, gradients, buffers and the weights after each update, in training mode, on rows from all over the
    data. Random numbers are layout-free in both, as with deterministic=True, so that dropout is compared too.
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
            # The rows of a trial may be too few for micro-batches, which training has.
            training.check_statistics(made, spec)
    return dataclasses.replace(verdict, notes=(*verdict.notes, *explain_mathematics(spec)))
