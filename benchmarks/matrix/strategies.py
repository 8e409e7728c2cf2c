"""The strategies of the matrix, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import manyhands as mh
from manyhands.core import StrategySpec
from manyhands.vectorized import Population

from .reference import Result, copied

TIMEOUT = 40
"""Seconds after which a run or check whose ranks do not answer is ended, also on a busy machine."""
POPULATION = "population"
SPECS: dict[str, StrategySpec] = {
    "single": mh.Single(),
    "accumulate2": mh.Single(accumulate=2),
    "mirrored2": mh.Mirrored(2),
    "mirrored3": mh.Mirrored(3),
    "sharded2": mh.Sharded(2),
    "sharded2-gradients": mh.Sharded(2, sharding="gradients"),
    "sharded2-optimizer": mh.Sharded(2, sharding="optimizer"),
    "tensor2": mh.TensorParallel(2),
    "context2": mh.ContextParallel(2),
    "pipeline2": mh.Pipeline(2, microbatches=3),
    "placed2": mh.Placed(devices=2),
    "ps1x2": mh.ParameterServer(servers=1, workers=2),
    POPULATION: mh.Single(),
    "mirrored2*tensor2": mh.Mirrored(2) * mh.TensorParallel(2),
    "mirrored2*context2": mh.Mirrored(2) * mh.ContextParallel(2),
    "mirrored2*pipeline2": mh.Mirrored(2) * mh.Pipeline(2, microbatches=2),
}


def spec_of(strategy: str, precision: str, draws: bool) -> StrategySpec:
    """Return a strategy in a precision, with layout-free random numbers where the network draws some."""
    return dataclasses.replace(SPECS[strategy], precision=precision, deterministic=draws)


def devices_of(spec: StrategySpec) -> str:
    """Return as many processes of this machine as a strategy needs."""
    return f"cpu*{spec.num_devices}" if spec.num_devices != 1 else "cpu"


def train_population(task: mh.Task, spec: StrategySpec) -> Result:
    """Train a task as the first of two members of a population; the other one has another seed."""
    population = Population([task, task.replace(seed=task.seed + 1)], spec, device="cpu", epochs=1)
    curves = population.step(population.total)
    return Result(curves[:, 0].tolist(), copied(population.model(0)))


def train_strategy(task: mh.Task, spec: StrategySpec, folder: Any, on_event: Any) -> Result:
    """Train a task by `mh.fit`, quietly."""
    run = mh.fit(
        task,
        spec,
        on=devices_of(spec),
        folder=folder,
        options=[
            mh.options.Display(progress=False),
            mh.options.Logging(log_to=on_event),
            mh.options.Recovery(timeout=TIMEOUT),
        ],
    )
    return Result(run.losses, run.state_dict())
