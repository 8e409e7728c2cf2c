"""Custom training loops: batches in any order, every row once, steps that use their strategy, and refusals."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk
from manyhands.core import ManyhandsError
from manyhands.distributed import current_world

from .behaviours import network
from .scenarios import INPUTS, TARGETS, results, scenario

LOOPS: dict[str, Callable[[Path], dict[str, Any]]] = {}
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
    """Batches stored in a list, reversed, from two datasets, modified, or fetched inside the step."""
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


def loop_of_ones_own(fn: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    LOOPS[fn.__name__] = fn
    return fn


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except ManyhandsError as error:
        return str(error)
    return ""


class Looks(keras.callbacks.Callback):  # type: ignore[misc]
    """Evaluates a distributed dataset on the first replica alone, and tries what all would have to do."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__()
        self.loop, self.file = loop, folder / "looked.txt"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = self.model.evaluate(self.loop.batches(25), verbose=0)
        refused = said(lambda: self.loop.strategy.reduce("SUM", 1.0))
        self.file.write_text(f"{loss:.9g} {refused}")


@loop_of_ones_own
def a_callback_looks_at_a_distributed_dataset(folder: Path) -> dict[str, Any]:
    loop = Loop(mhk.MirroredStrategy())
    model = network(strategy=loop.strategy)
    model.fit(loop.batches(25), epochs=1, verbose=0, callbacks=[Looks(loop, folder)])
    return {"loss": model.evaluate(loop.batches(25), verbose=0), "text": (folder / "looked.txt").read_text()}


@loop_of_ones_own
def what_loops_must_not_do(folder: Path) -> dict[str, Any]:
    """Return the error of each refused call, by name."""
    strategy = mhk.MirroredStrategy()
    loop, model = Loop(strategy), network(strategy=strategy)
    batches = loop.batches(25)
    x, y = next(iter(batches))
    keras.utils.set_random_seed(strategy.hand.rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        apart = keras.Sequential([keras.Input((8,)), layers.Dense(2)])
        apart.compile(optimizer="sgd", loss="mse")
        apart.fit(INPUTS, TARGETS, verbose=0)

    def learn_apart() -> None:
        apart.optimizer.apply([torch.ones_like(w.value) for w in apart.trainable_weights], apart.trainable_weights)

    return {
        "applied outside": said(lambda: loop.step(x, y)),
        "weights beside": said(lambda: model.fit(batches, class_weight={0: 1.0}, verbose=0)),
        "targets beside": said(lambda: model.evaluate(batches, TARGETS, verbose=0)),
        "accumulated": said(lambda: mhk.MirroredStrategy(accumulate=2).run(loop.step, (x, y))),
        "rows for another model": said(lambda: apart.fit(batches, verbose=0)),
        "other weights": said(lambda: strategy.run(learn_apart)),
        "not together": said(
            lambda: model.evaluate(batches, verbose=0) if strategy.hand.is_first else model.predict(INPUTS, verbose=0)
        ),
        "not with the same data": said(
            lambda: model.fit(INPUTS, TARGETS, validation_data=(INPUTS, TARGETS) if strategy.hand.is_first else None)
        ),
        "warned": [str(each.message) for each in warned if "scope" in str(each.message)],
    }


@loop_of_ones_own
def options_of_a_strategy(folder: Path) -> dict[str, Any]:
    """Custom loops use the strategy's precision; with a distributed dataset they use its micro-batches too."""
    sizes: list[int] = []

    def squares(y: Any, predicted: Any) -> Any:
        sizes.append(len(y))
        return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)

    strategy = mhk.MirroredStrategy(accumulate=2)
    model = network(strategy=strategy, loss=squares)
    data = strategy.experimental_distribute_dataset(DataLoader(DATA, batch_size=80))
    model.fit(data, epochs=1, verbose=0)
    model.train_on_batch(*next(iter(strategy.experimental_distribute_dataset(DataLoader(DATA, batch_size=50)))))
    narrow = mhk.MirroredStrategy(precision="bf16").run(lambda: str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
    return {"sizes": sizes, "narrow": narrow}


@loop_of_ones_own
def another_choice_of_devices(folder: Path) -> dict[str, Any]:
    """Replicas are there already; what one device trains beside them, each replica has for itself."""
    mhk.MirroredStrategy(["cpu:0", "cpu:1"])
    alone = network(strategy=mhk.OneDeviceStrategy("cpu"))
    alone.fit(INPUTS, TARGETS, verbose=0)
    return {"said": said(lambda: mhk.MirroredStrategy(["cpu:0"])), "steps": int(alone.optimizer.iterations.numpy())}
