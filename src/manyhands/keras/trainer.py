"""Wrappers of Keras' fit, evaluate and predict, for models created in a strategy's scope.

The training loop is that of Keras. It gets this replica's rows as its input, callbacks that run on the first replica
only, and step functions that combine the results of the replicas. A model without a strategy, or with one replica, runs
as in plain Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras import ops, tree
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from .batch_share import KerasShare, hand_out, known_share, num_rows, take_share
from .callbacks import OnceForAll, met
from .inputs import distributed, opened, require_by_itself
from .metrics_sync import Measures
from .step import GradientSums, MicroBatchStep, taking
from .strategy import warn_of_no_scope

if TYPE_CHECKING:
    from .strategy import Strategy

StrategyOf = Callable[[Any], "Strategy | None"]


def fit(original: Callable[..., Any], strategy_of: StrategyOf) -> Callable[..., Any]:
    """Wrap `Model.fit` so that each replica trains on its rows; `strategy_of` returns a model's active strategy."""

    @functools.wraps(original)
    def fit(
        self: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        require_by_itself(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
        strategy = strategy_of(self)
        if strategy is None:
            warn_of_no_scope(self)
            return original(
                self, opened(x), y, batch_size, epochs, verbose, callbacks, validation_split, opened(validation_data),
                shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,
                validation_batch_size, validation_freq,
            )  # fmt: skip
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        strategy.joint.begin("fit", self)
        trained_on = distributed(
            strategy, x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight,
            micros=strategy.spec.accumulate,
        )  # fmt: skip
        if validation_data is not None:
            held = data_adapter_utils.unpack_x_y_sample_weight(validation_data)
            validation_data = distributed(strategy, *held, validation_batch_size or batch_size, validation_steps)
        once = OnceForAll(
            strategy, self, callbacks, verbose,
            add_history=True, epochs=epochs, steps=steps_per_epoch or trained_on.num_batches,
        )  # fmt: skip
        return original(
            self,
            trained_on,
            epochs=epochs,
            verbose=verbose,
            callbacks=once,
            validation_data=validation_data,
            shuffle=shuffle,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
        )

    return fit


def evaluate(original: Callable[..., Any], strategy_of: StrategyOf) -> Callable[..., Any]:
    """Wrap `Model.evaluate` so that each replica evaluates its rows; all replicas get the results for all rows."""

    @functools.wraps(original)
    def evaluate(
        self: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        require_by_itself(x, y=y, sample_weight=sample_weight)
        strategy = strategy_of(self)
        if strategy is None or kwargs.get("_use_cached_eval_dataset"):
            x = opened(x) if strategy is None else x
            return original(self, x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs)
        strategy.joint.begin("evaluate", self)
        held = distributed(strategy, x, y, sample_weight, batch_size, steps)
        once = OnceForAll(strategy, self, callbacks, verbose, epochs=1, steps=steps or held.num_batches)
        return original(self, held, verbose=verbose, steps=steps, callbacks=once, return_dict=return_dict, **kwargs)

    return evaluate


def predict(original: Callable[..., Any], strategy_of: StrategyOf) -> Callable[..., Any]:
    """Wrap `Model.predict` so that each replica computes its rows; all replicas get the predictions for all rows."""

    @functools.wraps(original)
    def predict(
        self: Any,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, opened(x), batch_size, verbose, steps, callbacks)
        strategy.joint.begin("predict", self)
        held = distributed(strategy, x, None, None, batch_size, steps)
        once = OnceForAll(strategy, self, callbacks, verbose, epochs=1, steps=steps or held.num_batches)
        return original(self, held, verbose=verbose, steps=steps, callbacks=once)

    return predict


def on_batch(original: Callable[..., Any], strategy_of: StrategyOf) -> Callable[..., Any]:
    """Wrap `train_on_batch`, `test_on_batch` or `predict_on_batch`.

    Every replica is given the whole batch and computes its rows; a batch of a distributed dataset is split already.
    """

    @functools.wraps(original)
    def on_batch(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, x, *args, **kwargs)
        strategy.joint.begin(original.__name__, self)
        # Arrays derived from handed-out ones, such as x / 255, have no known share.
        known = known_share([x, args, kwargs])
        share = known or strategy.share(num_rows(x))
        hand_out(share)
        cut = functools.partial(_own_rows, share if known is None else None)
        result = original(self, cut(x), *map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        strategy.share_memory(self)
        return result

    return on_batch


def _own_rows(share: KerasShare | None, value: Any) -> Any:
    has_rows = all(getattr(leaf, "shape", ()) for leaf in tree.flatten(value) if leaf is not None)
    return share.taken(value) if share is not None and has_rows and tree.flatten(value) else value


def make_function(original: Callable[..., Any], strategy_of: StrategyOf, kind: str) -> Callable[..., Any]:
    """Wrap `make_train_function`, `make_test_function` or `make_predict_function`; `kind` is "train", for example.

    The function that Keras makes then runs on this replica's rows, and its results are combined over the replicas.
    """

    @functools.wraps(original)
    def make(self: Any, force: bool = False) -> Any:
        original(self, force=force)
        name = f"{kind}_function"
        plain = getattr(self, name)
        if not getattr(plain, "is_joined", False):
            joined = _joined(self, plain, strategy_of, kind)
            joined.is_joined = True  # type: ignore[attr-defined]
            setattr(self, name, joined)
        return getattr(self, name)

    return make


def _joined(model: Any, plain: Callable[..., Any], strategy_of: StrategyOf, kind: str) -> Callable[..., Any]:
    def function(data: list[Any]) -> Any:
        strategy = strategy_of(model)
        if strategy is None:
            return plain(data)
        share = take_share(data[0])
        with strategy.narrow():
            if kind == "predict":
                return _predicted(strategy, plain, share, data[0])
            logs = _stepped(model, strategy, plain, share, data[0])
        if kind == "train" and model.optimizer is not None:
            # `iterations` is a variable, or a tensor if the optimizer accumulates gradients, on any device.
            strategy.hand.progress.report(lambda: int(ops.convert_to_numpy(model.optimizer.iterations)))
        return logs

    return function


def _stepped(model: Any, strategy: Strategy, plain: Callable[..., Any], share: KerasShare, own: Any) -> Any:
    """Run one step on this replica's rows `own`, by micro-batch, and return its logs over all replicas."""
    measures, sums, logs = Measures(model.metrics, strategy.hand, model), GradientSums(), None
    for rows, part in share.micros(own):
        with taking(MicroBatchStep(strategy, rows, sums, update=strategy.update)):
            logs = plain([part])
        measures.take(logs, rows)
    joined = measures.joined(logs, has_failed=strategy.failure is not None)
    if measures.has_failed:
        met(strategy)
    return joined


def _predicted(strategy: Strategy, plain: Callable[..., Any], share: KerasShare, own: Any) -> Any:
    """Return the predictions for the rows of all replicas; `own` are the rows of this one."""
    (rows,) = share.rows
    with taking(MicroBatchStep(strategy, rows, GradientSums())):
        outputs = plain([own])
    return tree.map_structure(lambda output: strategy.hand.gather(output[: rows.size].contiguous()), outputs)
