"""Public function `explain`: preview how a strategy splits a network, and what each device holds and sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import training
from ..core import StrategySpec, as_spec, as_task
from ..strategies import Outline, SplitTable, require_built, require_loss
from .runtime import On, TaskLike, runtime


def explain(
    task: TaskLike,
    strategy: StrategySpec | str | None = None,
    *,
    on: On = None,
    params: Mapping[str, Any] | None = None,
) -> SplitTable | Outline:
    """Return how a strategy splits the layers, and what each device holds and sends in a step, without training.

    Print the result to see it as a table.

    Args:
        task: A Task, or a function that returns one.
        strategy: Strategy, as for `mh.fit`.
        on: Devices, as for `mh.fit`; they are needed only if the strategy does not state their number.
        params: Parameters of the task function.

    Returns:
        A table of the layers. For a strategy that partitions the network (`mh.Pipeline`, `mh.Placed`), the partition
        that `mh.partition` returns.

    >>> import torch, manyhands as mh
    >>> task = mh.Task(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=(torch.ones(8, 4), torch.ones(8, 1)),
    ...     batch_size=4,
    ... )
    >>> print(mh.explain(task, mh.Sharded(2)))
    layers  kind    way  whole  a device
    * x2    Linear       196 B     116 B
    a device holds 232 B: parameters 116 B, gradients 116 B, optimizer state 0 B
    a device sends 294 B a step: shards 294 B
    """
    made = as_task(task, params)
    spec = as_spec(strategy)
    require_built(spec)
    if on is not None or spec.num_devices is None:
        spec = runtime.settle(spec, on)[0]
    require_loss(spec, made.loss is not None)
    if spec.stages != 1:
        return training.outline_of(made, *runtime.settle(spec, on)[:2])
    return training.explain(made, spec)[0]
