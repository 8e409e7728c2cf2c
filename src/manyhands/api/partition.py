"""Public function `partition`: preview how a strategy partitions a network, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import StrategyError, StrategySpec, as_task
from ..strategies import Outline, require_loss
from ..training import outline_of
from .runtime import On, TaskLike, runtime


def partition(
    task: TaskLike,
    strategy: StrategySpec | str = "placed",
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
) -> Outline:
    """Return how `mh.Placed` or `mh.Pipeline` would partition a task's network, without starting a process.

    Print the result, or draw it with `show("partition.svg")`.

    Args:
        task: A Task, or a function that returns one.
        strategy: `mh.Placed(...)` or `mh.Pipeline(...)`, possibly combined with others.
        on: Devices, as for `mh.fit`.
        params: Parameters of the task function.

    Raises:
        StrategyError: The strategy does not partition the network, or the network cannot be partitioned.

    >>> import torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.ones(8, 4), torch.ones(8, 1)),
    ...     batch_size=4,
    ... )
    >>> mh.partition(task, mh.Placed({"0": 0, "2": 1}), on="cpu*2").show()
    stages=2,place=0@0;2@1: 2 pieces on 2 devices, 128 bytes across
      0  cpu#0  0, 1  (2 operations, 40 parameters)
           to 1 on cpu#1: 128 bytes
      1  cpu#1  2  (1 operation, 9 parameters)
    """
    made = as_task(task, params)
    spec, devices, _ = runtime.settle(strategy, on)
    if spec.stages == 1:
        raise StrategyError(
            "only mh.Placed and mh.Pipeline partition a network",
            got=str(spec),
            remedy="pass mh.Placed() or mh.Pipeline(2)",
        )
    require_loss(spec, made.loss is not None)
    return outline_of(made, spec, devices)
