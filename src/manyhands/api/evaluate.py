"""Public functions `evaluate` and `predict`: run a trained network over data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from .. import training
from ..core import Predictor, StrategySpec, Task, TaskError
from ..data import as_source, is_arrays
from ..distributed import DEFAULT_TIMEOUT, World
from ..training import Hand, Run, probe_of
from .runtime import On, runtime


def evaluate(
    run: Run,
    data: Any = None,
    strategy: StrategySpec | str | None = "single",
    *,
    on: On = None,
    timeout: float = DEFAULT_TIMEOUT,
    best: bool = False,
) -> dict[str, float]:
    """Return the loss and the metrics of a trained network by name.

    Args:
        run: The run; it needs its task, as in `mh.Run(path, task)`.
        data: Data in any form that a task accepts; by default the validation data of the run's task.
        strategy: Strategy under which the network is computed.
        on: Devices, as for `mh.fit`.
        timeout: Seconds within which a healthy operation completes.
        best: Use the weights of the best checkpoint instead of the last one.
    """
    task = run.require_task()
    held = task.valid if data is None else data
    if held is None:
        raise TaskError("mh.evaluate needs data", got="a task without valid=", remedy="pass mh.evaluate(run, data)")
    training.check_metrics(task, runtime.settle(strategy, on)[0].num_parts)
    return _over_data(training.evaluate, run, task, held, strategy, on, timeout, best)  # type: ignore[no-any-return]


def predict(
    run: Run | Predictor,
    data: Any,
    strategy: StrategySpec | str | None = "single",
    *,
    on: On = None,
    timeout: float = DEFAULT_TIMEOUT,
    best: bool = False,
) -> Any:
    """Return the predictions of a trained network for every row of some data, in the order of the rows.

    Args:
        run: The run, with its task; or an exported model, which is called in this process.
        data: Data in any form that a task accepts, or a list of numbers or of rows of numbers.
        strategy: Strategy under which the network is computed.
        on: Devices, as for `mh.fit`.
        timeout: Seconds within which a healthy operation completes.
        best: Use the weights of the best checkpoint instead of the last one.

    Returns:
        A tensor; a dict of tensors by name if there are several outputs. Outputs whose shapes differ between rows, such
        as those of texts of different lengths, are lists.
    """
    if isinstance(run, Predictor):
        return run(data)
    if isinstance(data, list) and data and isinstance(data[0], list | Number):
        data = torch.tensor(data)
    outputs: dict[str, Any] = _over_data(training.predict, run, run.require_task(), data, strategy, on, timeout, best)
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _over_data(
    act: Callable[..., Any],
    run: Run,
    task: Task,
    data: Any,
    strategy: StrategySpec | str | None,
    on: On,
    timeout: float,
    best: bool,
) -> Any:
    """Run `act` with the weights of a run on every rank, and return the result of the first rank."""
    spec, devices, _ = runtime.settle(strategy, on)
    precision = run.record["spec"].get("precision", "fp32")
    spec = dataclasses.replace(spec, precision=precision)
    work = functools.partial(_act, act=act, task=task, spec=spec, data=data, weights=run.state_dict(best=best))
    return runtime.call(work, devices, timeout, on=on)[0]


def _act(
    world: World,
    act: Callable[..., Any],
    task: Task,
    spec: StrategySpec,
    data: Any,
    weights: dict[str, Tensor],
) -> Any:
    """Build a replica with given weights on this rank, and return what `act` returns for it and the data."""
    hand = Hand(world, spec)
    # Arrays are batches of rows already; collate is only for samples of datasets.
    source = as_source(data, collate=None if is_arrays(data) else task.collate)
    rows = source.size if source.size is not None else task.batch_size or 32
    size = min(source.batch_size or task.batch_size or 32, max(1, rows))
    computed = (
        task.loss if act is training.evaluate and task.loss is not None else functools.partial(training.answers, task)
    )
    hand.make_replica(task.model(), task.make_optimizer, probe_of(hand, computed, source, size))
    hand.replica.load(weights)
    feed = hand.reader.make_feed(source, size, shuffle=False)
    try:
        return act(hand, task, feed)
    finally:
        feed.close()
        hand.close()
