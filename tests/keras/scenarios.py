"""Keras programs, each a function of a folder: run alone and by two replicas, the results must be equal."""

from __future__ import annotations

import json
import os
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch
from keras import layers
from keras.src.backend.common import dtypes
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer
from torch.utils.data import DataLoader, TensorDataset

import manyhands.keras as mhk
from manyhands.distributed import current_world

rng = np.random.default_rng(0)
INPUTS = rng.normal(size=(101, 8))
LABELS = rng.integers(0, 3, size=101)
TARGETS = rng.normal(size=(101, 2))
TOKENS = rng.integers(1, 12, size=(50, 6)) * (np.arange(6) < rng.integers(1, 7, size=(50, 1)))
SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {}


def scenario(fn: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """Registers one; it begins with the same seed everywhere and computes in float64.

    Outside of TensorFlow Keras makes float32 of whatever its rules of types call float64: products, means, maxima.
    """

    def seeded(folder: Path) -> dict[str, Any]:
        keras.utils.set_random_seed(7)
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            with mock.patch.dict(dtypes.BIT64_TO_BIT32_DTYPE, float64="float64"):
                return fn(folder)
        finally:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy("float32")

    SCENARIOS[fn.__name__] = seeded
    return seeded


def results(model: Any, history: Any = None, **more: Any) -> dict[str, Any]:
    """What is compared: losses and metrics by epoch, and every weight."""
    return {
        "history": {} if history is None else history.history,
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        **more,
    }


def classifier(**compiled: Any) -> Any:
    with mhk.MirroredStrategy().scope():
        model = keras.Sequential(
            [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dense(3, kernel_regularizer="l2")]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            **{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": loss, "metrics": ["accuracy"], **compiled}
        )
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = slice(20 * index, 20 * index + 20)
        return (
            INPUTS[rows],
            {"a": TARGETS[rows, :1], "b": LABELS[rows]},
            {
                "a": np.linspace(0, 2, len(INPUTS[rows])),
                "b": np.ones(len(INPUTS[rows])),
            },
        )


class OwnStep(keras.Model):
    """A subclassed model with a train_step of its own, as the Keras guide writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(16, activation="tanh"), layers.Dense(2)
        self.unused = layers.Dense(3)
        self.tracker, self.error = keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.error]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = keras.ops.mean(keras.losses.mean_squared_error(y, y_pred))
        loss.backward()
        weights = [w for w in self.trainable_weights if w.value.grad is not None]
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self.tracker.update_state(loss, sample_weight=len(x))
        self.error.update_state(y, y_pred)
        return {"loss": self.tracker.result(), "mae": self.error.result(), "last": loss.detach()}


@scenario
def sequential_with_arrays(folder: Path) -> dict[str, Any]:
    """Shuffled arrays, a last batch of one row, batch statistics, class weights, validation."""
    model = classifier()
    history = model.fit(
        INPUTS, LABELS, batch_size=20, epochs=3, verbose=0, validation_split=0.3, class_weight={0: 1.0, 1: 2.0, 2: 0.5}
    )
    values = model.evaluate(INPUTS, LABELS, verbose=0, batch_size=50, return_dict=True)
    return results(model, history, values=values, answers=model.predict(INPUTS, verbose=0, batch_size=50))


@scenario
def functional_with_a_pydataset(folder: Path) -> dict[str, Any]:
    """Two outputs, loss weights, sample weights, an activity regulariser, shuffled batches that threads read."""
    with mhk.MirroredStrategy().scope():
        inputs = keras.Input((8,))
        hidden = layers.Dense(12, activation="relu", activity_regularizer="l2")(inputs)
        model = keras.Model(inputs, {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)})
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5, use_ema=True),
            loss={"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"a": 0.3, "b": 1.0},
            weighted_metrics={"a": "mae", "b": "accuracy"},
        )
    read, world = OrderedEnqueuer._run, current_world()

    def read_late(self: Any) -> None:
        time.sleep(0.0 if world is None else 0.05 * world.rank)
        read(self)

    # Each replica's threads begin at another moment.
    with mock.patch.object(OrderedEnqueuer, "_run", read_late):
        history = model.fit(Batches(workers=2), epochs=2, verbose=0, validation_data=Batches())
    return results(model, history)


@scenario
def subclassed_with_its_own_step(folder: Path) -> dict[str, Any]:
    """A shuffled DataLoader, a parameter that nothing uses, a value in the logs that is no metric."""
    with mhk.MirroredStrategy().scope():
        model = OwnStep()
        model.compile(optimizer="rmsprop")
        model.unused.build((None, 2))
    data = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    history = model.fit(DataLoader(data, batch_size=16, shuffle=True), epochs=3, verbose=0)
    return results(model, history)


class GuidedStep(OwnStep):
    """As the guide has it for compiled losses and metrics, whose results are a dict in a dict."""

    metrics = keras.Model.metrics

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        self.zero_grad()
        loss.backward()
        weights = [w for w in self.trainable_weights if w.value.grad is not None]
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@scenario
def a_step_as_the_guide_writes_it(folder: Path) -> dict[str, Any]:
    """Means over batches, of which the last one has five rows."""
    with mhk.MirroredStrategy().scope():
        model = GuidedStep()
        number = keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.mean(abs(y - p)), "number")
        model.compile(optimizer="sgd", loss="mse", metrics=["mae", number])
    return results(model, model.fit(INPUTS, TARGETS, batch_size=16, epochs=2, verbose=0))


@scenario
def a_loss_that_is_a_number(folder: Path) -> dict[str, Any]:
    """A function that gives the mean itself; rows that do not divide evenly."""
    with mhk.MirroredStrategy().scope():
        model = keras.Sequential([layers.Dense(9, activation="tanh"), layers.Dense(2)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda y, p: torch.mean((y - p) ** 2))
    return results(model, model.fit(INPUTS, TARGETS, batch_size=9, epochs=2, verbose=0))


@scenario
def masked_tokens(folder: Path) -> dict[str, Any]:
    """Padded texts: a loss over the words that are there, batch statistics over them too."""
    with mhk.MirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Embedding(12, 6, mask_zero=True),
                layers.SimpleRNN(8, return_sequences=True),
                layers.BatchNormalization(),
                layers.Dense(12),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(epsilon=1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return results(model, model.fit(TOKENS, TOKENS, batch_size=7, epochs=2, verbose=0))


class PartsOfTheWhole(keras.Model):  # type: ignore[misc]
    """A train_step that computes losses with the functions for custom loops."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        squares = keras.ops.mean(keras.losses.mean_squared_error(y, self(x)), axis=1)
        loss = mhk.compute_average_loss(squares) + mhk.scale_regularization_loss(keras.ops.sum(self.dense.kernel**2))
        loss.backward()
        self.optimizer.apply([w.value.grad for w in self.trainable_weights], self.trainable_weights)
        return {"loss": loss.detach()}


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Looks after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return pad([x for x, _ in samples], batch_first=True), pad([y for _, y in samples], batch_first=True)


@scenario
def texts_as_long_as_the_longest(folder: Path) -> dict[str, Any]:
    """Batches padded as a whole, a step of parts, a callback that only the first replica has."""
    with mhk.MirroredStrategy().scope() as strategy:
        model = PartsOfTheWhole()
        # The step tells a number by the name of a metric that it does not use.
        model.compile(optimizer=keras.optimizers.SGD(0.02), loss="mse")
    texts = [torch.from_numpy(INPUTS[i : i + 2 + i % 7, :1]) for i in range(22)]
    data = DataLoader([(text, 2 * text) for text in texts], batch_size=8, collate_fn=padded)  # type: ignore[arg-type]
    history = model.fit(data, epochs=2, verbose=0, callbacks=[Watching()] if strategy.hand.is_first else [])
    longest = DataLoader([(text, 2 * text) for text in texts[:9]], batch_size=9, collate_fn=padded)  # type: ignore[arg-type]
    return results(model, history, answers=model.predict(longest, verbose=0))


class Steered(keras.Model):  # type: ignore[misc]
    """A model whose steps depend on its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8, kernel_regularizer="l2"), layers.Dense(2)
        self.beta, self.config, self.scale = 1.0, types.SimpleNamespace(shift=0.0), torch.ones(())

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x)) * self.beta * self.scale + self.config.shift


class Steering(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes whatever a callback may: numbers, flags, what hangs on a model or a layer, the way of the rate."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model = self.model
        model.beta, model.config.shift, model.scale = 1 / (1 + epoch), 0.1 * epoch, torch.tensor(1.0 + epoch)
        model.hidden.trainable = epoch != 1
        model.hidden.kernel_regularizer.l2 = 0.01 * epoch
        model.optimizer.momentum = 0.5
        if epoch == 2:
            model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.beta *= 0.99


@scenario
def a_callback_that_steers(folder: Path) -> dict[str, Any]:
    """What it changes counts on all replicas; what callbacks know afterwards all know."""
    with mhk.MirroredStrategy().scope():
        model = Steered()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    history = model.fit(INPUTS, TARGETS, batch_size=40, epochs=4, verbose=0, callbacks=[Steering()])
    model.optimizer = keras.optimizers.SGD(1e-3)
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=9.0, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
    later = model.fit(INPUTS, TARGETS, batch_size=40, epochs=4, verbose=0, callbacks=[stop, slower])
    history.history |= {f"later_{name}": values for name, values in later.history.items()}
    return results(model, history, known=[stop.best_epoch, stop.stopped_epoch, stop.best, slower.best, *later.epoch])


@scenario
def sums_and_accumulators(folder: Path) -> dict[str, Any]:
    """A loss that is a sum, gradients that Keras' own optimizer accumulates, a schedule of the learning rate."""
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-3, 2, 0.9)
    model = classifier(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        optimizer=keras.optimizers.Adam(schedule, epsilon=1e-3, gradient_accumulation_steps=2),
    )
    return results(model, model.fit(INPUTS, LABELS, batch_size=30, epochs=2, verbose=0, shuffle="batch"))


@scenario
def a_loop_of_ones_own(folder: Path) -> dict[str, Any]:
    """strategy.run and strategy.reduce over a distributed dataset, with Keras losses and a custom one."""
    strategy = mhk.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, use_bias=False), layers.BatchNormalization(), layers.Dense(2)]
        )
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
        error = keras.metrics.RootMeanSquaredError()
    data = DataLoader(TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)), batch_size=33)
    mean_error = keras.losses.MeanAbsoluteError()

    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        predicted = model(x, training=True)
        squares = keras.losses.mean_squared_error(y, predicted)
        loss = mhk.compute_average_loss(squares) + mean_error(y, predicted)
        loss = loss + mhk.scale_regularization_loss(keras.ops.sum(model.layers[0].kernel ** 2)) * 0.01
        loss.backward()
        optimizer.apply([w.value.grad for w in model.trainable_weights], model.trainable_weights)
        error.update_state(y, predicted)
        return loss.detach()

    losses = []
    for batch in strategy.experimental_distribute_dataset(data):
        losses.append(float(strategy.reduce(mhk.ReduceOp.SUM, strategy.run(step, args=tuple(batch)))))
    return results(model, losses=losses, error=float(error.result()))


@scenario
def a_distributed_dataset_in_fit(folder: Path) -> dict[str, Any]:
    """The script that everybody knows."""
    strategy = mhk.MirroredStrategy()
    model = classifier()
    data = DataLoader(TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS)), batch_size=25, shuffle=True)
    return results(model, model.fit(strategy.experimental_distribute_dataset(data), epochs=2, verbose=0))


@scenario
def batch_by_batch(folder: Path) -> dict[str, Any]:
    """train_on_batch and its like, of batches that do not divide evenly, and of handed out rows that were changed."""
    model = classifier()
    told = [model.train_on_batch(INPUTS[i : i + 15], LABELS[i : i + 15]) for i in range(0, 45, 15)]
    data = DataLoader(TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS)), batch_size=15)
    batches = mhk.MirroredStrategy().experimental_distribute_dataset(data)
    told += [model.train_on_batch(x * 2.0, y) for x, y in batches]
    told.append(model.test_on_batch(INPUTS[:9], LABELS[:9]))
    answers = model.predict_on_batch(INPUTS[:9])
    return results(model, losses=np.asarray(told, dtype=float), answers=answers)


@scenario
def a_generator(folder: Path) -> dict[str, Any]:
    """Whole batches that can only be iterated, with steps per epoch."""
    model = classifier()

    def batches() -> Any:
        while True:
            for start in range(0, 100, 25):
                yield INPUTS[start : start + 25], LABELS[start : start + 25]

    return results(model, model.fit(batches(), epochs=2, steps_per_epoch=3, verbose=0))


@scenario
def state_of_a_layer(folder: Path) -> dict[str, Any]:
    """A layer that moves a value by what it sees gets what all replicas saw."""

    class Running(layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x - keras.ops.stop_gradient(self.mean.value.clone())

    with mhk.MirroredStrategy().scope():
        model = keras.Sequential([Running(), layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse")
    # The next value is of the last one, and that is of all rows, only after a step: rows divide evenly here.
    model.fit(INPUTS[:80], TARGETS[:80], batch_size=20, epochs=1, verbose=0, shuffle=False)
    return {"weights": [np.asarray(model.layers[0].mean)], "history": {}}


def served(optimizer: Any) -> dict[str, Any]:
    """By servers, with a validation in between; what the optimizer remembers counts too."""
    with mhk.ParameterServerStrategy().scope():
        model = keras.Sequential(
            [layers.Dense(16, activation="tanh"), layers.BatchNormalization(), layers.Dense(9), layers.Dense(2)]
        )
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    history = model.fit(INPUTS, TARGETS, batch_size=20, epochs=2, verbose=0, validation_data=(INPUTS, TARGETS))
    model.train_on_batch(INPUTS[:7], TARGETS[:7])
    memory = [np.asarray(variable).ravel() for variable in optimizer.variables]
    values = model.evaluate(INPUTS, TARGETS, verbose=0, return_dict=True)
    answers = model.predict(INPUTS, verbose=0, batch_size=50)
    return results(model, history, memory=np.concatenate(memory), values=values, answers=answers)


@scenario
def servers(folder: Path) -> dict[str, Any]:
    """Each has some of the variables."""
    rate = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.9)
    return served(keras.optimizers.Nadam(rate, epsilon=1e-3, clipnorm=0.3, weight_decay=0.01))


@scenario
def an_optimizer_that_looks_at_all(folder: Path) -> dict[str, Any]:
    """One server has all of the variables."""
    return served(keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.3, use_ema=True))


@scenario
def a_server_beside_a_worker(folder: Path) -> dict[str, Any]:
    """As with a TF_CONFIG of a chief and a server, of which the second takes no rows."""
    cluster = {"chief": ["localhost:1"], "ps": ["localhost:2"]}
    task = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    # Alone there is no second one.
    environ = {"TF_CONFIG": json.dumps(task)} if current_world() is not None else {}
    with mock.patch.dict(os.environ, environ):
        return served(keras.optimizers.Adam(1e-2, epsilon=1e-3))


@scenario
def recomputed(folder: Path) -> dict[str, Any]:
    """Backward computes activations again."""
    with mhk.MirroredStrategy(recompute="blocks").scope():
        model = keras.Sequential(
            [layers.Dense(16, activation="gelu"), layers.Dense(16, activation="gelu"), layers.Dense(2)]
        )
        model.compile(optimizer="sgd", loss="mse")
    return results(model, model.fit(INPUTS, TARGETS, batch_size=32, epochs=2, verbose=0))
