"""Loops of one's own: batches in any order, every row once, steps that ask for their strategy; and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk
from manyhands.cluster import current_world

from .scenarios import INPUTS, TARGETS, results, scenario

DATA = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))


class Loop:
    """A network with batch statistics, and a step of its own, under some strategy."""

    def __init__(self, strategy: mhk.Strategy, optimizer: Any = None) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((8,)), layers.Dense(12, activation="tanh"), layers.BatchNormalization(), layers.Dense(2)]
            )
            self.optimizer = optimizer or keras.optimizers.Adam(0.02, epsilon=1e-3)
            self.error = keras.metrics.RootMeanSquaredError()
        self.mean_error = keras.losses.MeanAbsoluteError()

    def step(self, x: Any, y: Any) -> Any:
        self.model.zero_grad()
        predicted = self.model(x, training=True)
        loss = mhk.compute_average_loss(keras.losses.mean_squared_error(y, predicted)) + self.mean_error(y, predicted)
        loss = loss + 0.01 * mhk.scale_regularization_loss(keras.ops.sum(self.model.layers[0].kernel ** 2))
        loss.backward()
        weights = self.model.trainable_weights
        self.optimizer.apply([w.value.grad for w in weights], weights)
        self.error.update_state(y, predicted)
        return loss.detach(), len(x), y[:, 0]

    def batches(self, size: int) -> mhk.DistributedInput:
        return self.strategy.experimental_distribute_dataset(DataLoader(DATA, batch_size=size))  # type: ignore[no-any-return]

    def take(self, *args: Any) -> Any:
        return self.strategy.run(self.step, args=args)


@scenario
def batches_in_any_order(folder: Path) -> dict[str, Any]:
    """Kept in a list, from the last to the first, from two datasets at once, changed by hand, taken within the step."""
    loop = Loop(mhk.MirroredStrategy())
    strategy, losses = loop.strategy, []
    kept = list(loop.batches(33))
    losses += [loop.take(*batch) for batch in reversed(kept)]
    for large, small in zip(loop.batches(40), loop.batches(15), strict=False):
        losses.append(loop.take(*large))
        losses.append(loop.take(*small))
    losses += [loop.take(x * 2.0, y * 1.0) for x, y in list(loop.batches(33))]
    within = iter(loop.batches(33))
    losses += [strategy.run(lambda: loop.step(*next(within))) for _ in range(4)]
    told = [float(strategy.reduce("SUM", loss)) for loss, *_ in losses]
    return results(loop.model, losses=told, error=float(loop.error.result()))


def counted(loop: Loop) -> dict[str, Any]:
    """Rows as they are reduced and gathered; the last batch is a single one."""
    strategy, told = loop.strategy, [loop.take(*batch) for batch in loop.batches(25)]
    return results(
        loop.model,
        losses=[float(strategy.reduce("SUM", loss)) for loss, *_ in told],
        error=float(loop.error.result()),
        counts=[int(strategy.reduce("SUM", count)) for _, count, _ in told],
        rows=np.concatenate([keras.ops.convert_to_numpy(strategy.gather(y)) for *_, y in told]),
        means=[float(strategy.reduce("MEAN", y, axis=0)) for *_, y in told],
    )


@scenario
def every_row_counts_once(folder: Path) -> dict[str, Any]:
    return counted(Loop(mhk.MirroredStrategy()))


@scenario
def a_loop_beside_a_server(folder: Path) -> dict[str, Any]:
    """A server runs the loop, too, and is no replica of it."""
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"]}
    task = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    with mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(task)} if current_world() is not None else {}):
        loop = Loop(mhk.ParameterServerStrategy())
    strategy = loop.strategy
    mean = [float(strategy.reduce("MEAN", 3.0)), float(strategy.reduce("SUM", 3.0)), strategy.num_replicas_in_sync]
    return {**counted(loop), "mean": mean}


class LooksAround(keras.Model):  # type: ignore[misc]
    """A step in which rows look at each other, with PyTorch's own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)
        self.dense.build((None, 8))
        self.torch_optimizer = torch.optim.Adam([w.value for w in self.dense.trainable_weights], lr=0.02, eps=1e-3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        strategy = mhk.get_strategy()
        self.torch_optimizer.zero_grad()
        own = self(x, training=True)
        others = strategy.gather(own)
        loss = torch.logsumexp(-torch.cdist(own, others).square(), 1).mean()
        loss.backward()
        self.torch_optimizer.step()
        count = strategy.reduce("SUM", len(x))
        return {"spread": loss.detach(), "count": count, "replicas": strategy.num_replicas_in_sync / strategy.hand.size}


@scenario
def a_step_that_asks_for_its_strategy(folder: Path) -> dict[str, Any]:
    """`fit` is called outside of the scope; batches are uneven, the first one is a single row."""
    with mhk.MirroredStrategy().scope():
        model = LooksAround()
        model.compile()
    batches = ((INPUTS[start:stop], TARGETS[start:stop]) for start, stop in ((0, 1), (1, 26), (26, 60), (60, 101)))
    return results(model, model.fit(batches, steps_per_epoch=4, verbose=0))
